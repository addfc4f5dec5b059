"""YAML as people mean it: the one reader of manifests, settings, scenarios and values on the command line.

The core schema of YAML 1.2 (`1e-5` is a number, `no` and `12:30` are words; digits may be grouped, `1_000`): plain
values only, no tags, no aliases, no key twice. https://yaml.org/spec/1.2.2/#103-core-schema
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from peer.errors import UserError

MAX_DEPTH = 8

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NAMED = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True), **dict.fromkeys(("false", "False", "FALSE"), False),
    **{f"{sign}.{word}": value for sign, value in (("", math.inf), ("+", math.inf), ("-", -math.inf))
       for word in ("inf", "Inf", "INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}  # fmt: skip

def parse_yaml(text: str | bytes) -> Any:
    """YAML or JSON text -> dicts with text as keys, lists, text, numbers, truth values, None.

    Raises:
        ValueError: one line that says what is wrong and in which line of the text.
    """
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else _value_of(node)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_limited(path: str | Path, limit: int, what: str, hint: str = "give the path of a YAML file") -> bytes:
    """The bytes of a file that a person named.

    Args:
        limit: bytes it may have; no more are read.
        what: what it is, such as "manifest", for messages.
        hint: what to do if it cannot be read.

    Raises:
        UserError: it cannot be read, or is larger, with its size.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
            size = _size_of(file, len(content))
    except (OSError, ValueError) as error:      # ValueError: a path with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{what} {path} cannot be read: {reason}", hint) from None
    if len(content) > limit:
        raise UserError(f"{what} {path} is {size}; the limit is {limit} bytes", "is it the right file?")
    return content


def _size_of(file: BinaryIO, num_read: int) -> str:
    """A pipe or a device has no size: then what was read of it."""
    size = os.fstat(file.fileno()).st_size
    return f"{size} bytes" if size >= num_read else f"more than {num_read - 1} bytes"


def _check_events(text: str | bytes) -> None:
    """Raise ValueError for what makes a small document endless to load, aliases and deep nesting, and for tags."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{_line(event)}: an alias (*name) is not allowed; write the value out")
        if tag is not None:
            raise ValueError(f"{_line(event)}: the tag {tag[:64]!r} is not allowed; write a value, text in quotes")
        if depth > MAX_DEPTH:
            raise ValueError(f"{_line(event)}: nested more than {MAX_DEPTH} deep")


def _value_of(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return dict(_pairs(node))
    if isinstance(node, yaml.SequenceNode):
        return [_value_of(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node) if node.style is None else node.value  # what is quoted is text


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[str, Any]]:
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"{_line(key_node)}: a key must be one word, not a list or a mapping")
        key = key_node.value
        if key in lines:
            twice = f"the key {key[:64]!r} is there twice, first in line {lines[key]}"
            raise ValueError(f"{_line(key_node)}: {twice}; remove one of them")
        lines[key] = _line_number(key_node)
        yield key, _value_of(value_node)


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if text in _NAMED:
        return _NAMED[text]
    try:
        if _INTEGER.fullmatch(text):
            digits = text.replace("_", "")
            return int(digits, 0) if digits[:2] in ("0o", "0x") else int(digits)
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    except ValueError:      # no digits behind 0x, or more than 4300
        raise ValueError(f"{_line(node)}: {text[:32]!r} is not a number that can be read") from None
    return text


def _line(place: yaml.Node | yaml.Event) -> str:
    return f"line {_line_number(place)}"


def _line_number(place: yaml.Node | yaml.Event) -> int:
    assert place.start_mark is not None
    return int(place.start_mark.line) + 1
