from __future__ import annotations

import contextlib
import json
import math
import os
import threading

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import UserError
from peer.protocol.yaml_text import parse_yaml, read_limited

PLAIN = {
    "1e-5": 1e-5, "1E6": 1e6, "1e6": 1e6, "6.02e+23": 6.02e23, "-.5e1": -5.0, "2.": 2.0, "+3": 3, "-0": 0,
    "1_000": 1000, "0x1F": 31, "0o17": 15, "017": 17, "true": True, "False": False, "~": None, "null": None, "": None,
    "no": "no", "yes": "yes", "off": "off", "on": "on", "y": "y", "12:30": "12:30", "2024-01-31": "2024-01-31",
    "1e": "1e", "e5": "e5", ".": ".", "1.2.3": "1.2.3", "'1e5'": "1e5", '"true"': "true", "_1": "_1",
}  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_plain_values_are_what_yaml_1_2_says(text):
    value = parse_yaml(f"a: {text}")["a"]
    assert value == PLAIN[text]
    assert type(value) is type(PLAIN[text])


def test_infinity_and_no_number():
    assert parse_yaml("[.inf, +.INF, -.Inf]") == [math.inf, math.inf, -math.inf]
    assert math.isnan(parse_yaml(".NaN"))


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice, first in line 1; remove one of them"),
    ("x:\n  a: 1\n  'a': 2", "line 3: the key 'a' is there twice, first in line 2"),
    ("x: [{a: 1,\n  a: 1}]", "line 2: the key 'a' is there twice"),
    ('{"a": 1, "a": 1}', "line 1: the key 'a' is there twice"),
    ("1: a\n1: b", "line 2: the key '1' is there twice"),
    ("a: &x 1\nb: *x", "line 2: an alias"),
    ("a: 1\nb: !!str 1", "line 2: the tag 'tag:yaml.org,2002:str' is not allowed; write a value, text in quotes"),
    ("!!python/name:os.system", "the tag 'tag:yaml.org,2002:python/name:os.system' is not allowed"),
    ("a:\n ? [b]\n : c", "line 2: a key must be one word"),
    ("a: " + "[" * 9, "nested more than 8 deep"),
    ("a: 0x_", "line 1: '0x_' is not a number"),
    ("a: " + "1" * 5000, "is not a number that can be read"),
    ("a: 1\n---\nb: 1", "line 2"),
    ("a: [", "line 1"),
    (b"\xff\xfe\x00\xd8", "position 2"),
])
def test_what_is_refused_is_told_in_one_line(text, message):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        parse_yaml(text)
    assert message in str(caught.value)


WORDS = st.from_regex(r"[ -~]{0,8}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_json_is_read_as_json(document):
    assert parse_yaml(json.dumps(document)) == document


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_with_a_value_error(text):
    with contextlib.suppress(ValueError):
        parse_yaml(text)


def test_what_yaml_writes_is_read_back():
    document = {"a": 1e-7, "b": "no", "c": "0x", "d": [True, None, "x: y"], "e": {"f": "017"}}
    assert parse_yaml(yaml.safe_dump(document)) == document


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"#" * 32_000)
    assert len(read_limited(path, 32_000, "manifest")) == 32_000
    with pytest.raises(UserError, match=r"run\.yaml is 32000 bytes; the limit is 31000 bytes"):
        read_limited(path, 31_000, "manifest")


def test_a_pipe_without_end_is_not_read_to_the_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write():
        with path.open("wb", buffering=0) as pipe:
            pipe.write(b"#" * 2000)

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(UserError, match="pipe is more than 1000 bytes; the limit is 1000 bytes"):
        read_limited(path, 1000, "manifest")
    writer.join()


@pytest.mark.parametrize(("name", "reason"), [("none", "No such file"), (".", "Is a directory"), ("a\0b", "null byte")])
def test_a_file_that_cannot_be_read(tmp_path, name, reason):
    with pytest.raises(UserError, match=f"settings file .* cannot be read: .*{reason}"):
        read_limited(f"{tmp_path}/{name}", 10, "settings file")
