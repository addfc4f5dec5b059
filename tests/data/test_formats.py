"""Each format and each compression gives the same rows, from any offset on; what is no text is named."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.data import formats
from peer.data.formats import TOO_LONG, format_of, read_rows
from peer.data.problems import FileProblem
from peer.data.shards import text_or_reason

TEXTS = ["alpha\nbeta", 'q"uo,te', "", "ünïcode ☃ 🐚", "x" * 3000]


def parquet(texts: list[Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), sink, row_group_size=2)
    return sink.getvalue()


def arrow(texts: list[Any], make: Any) -> bytes:
    table, sink = pa.table({"text": texts}), io.BytesIO()
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def csv_of(texts: list[str], mark: str = ",") -> bytes:
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    return "".join(f"{row}\r\n" for row in [f"id{mark}text", *(f"{i}{mark}{q}" for i, q in enumerate(quoted))]).encode()


CONTENT = {
    "a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    "a.ndjson": "".join(json.dumps({"text": text}) + "\r\n\n" for text in TEXTS).encode(),
    "a.json": json.dumps([{"text": text, "more": [1, {"a": "]"}]} for text in TEXTS], indent=1).encode(),
    "a.parquet": parquet(TEXTS), "a.csv": csv_of(TEXTS), "a.tsv": csv_of(TEXTS, "\t"),
    "a.arrow": arrow(TEXTS, pa.ipc.new_file), "stream.arrow": arrow(TEXTS, pa.ipc.new_stream),
}  # fmt: skip
PACK = {
    "": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}  # fmt: skip


def rows(name: str, data: bytes, offset: int = 0, column: str = "text") -> list[tuple[Any, int]]:
    return list(read_rows(io.BytesIO(data), name, column, offset))


class FromItsBeginning(io.BytesIO):
    """A stream that cannot be moved, such as a file that is checked while it is read."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation("seek")


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", CONTENT)
def test_every_format_gives_the_rows_from_every_offset(name, packed):
    data = PACK[packed](CONTENT[name])
    found = rows(name + packed, data)
    assert [value for value, _ in found] == TEXTS
    for index, (_, offset) in enumerate(found):
        assert rows(name + packed, data, offset) == found[index + 1 :]
        moved = list(read_rows(FromItsBeginning(data), name + packed, "text", offset))
        assert moved == found[index + 1 :]


@pytest.mark.parametrize(("name", "told"), [
    ("a.TXT", ("text", "")), ("b.jsonl.gz", ("jsonl", "gz")), ("c.tar.gz", ("text", "gz")), ("Makefile", ("text", "")),
    ("d.JSON", ("json", "")), ("e.v1.parquet.zst", ("parquet", "zst")), (".gz", ("text", "")),
])  # fmt: skip
def test_the_suffixes_tell_the_format(name, told):
    assert format_of(name) == told


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_every_encoding_that_is_marked_is_text(encoding):
    marks = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
    text = "the quick ☃ fox\n" * 2000
    data = marks.get(encoding, b"") + text.encode(encoding)
    assert "".join(value for value, _ in rows("a.txt", data)) == text
    lines = "".join(json.dumps({"text": f"é {i}"}, ensure_ascii=False) + "\n" for i in range(3000))
    found = rows("a.jsonl", marks.get(encoding, b"") + lines.encode(encoding))
    assert [value for value, _ in found] == [f"é {i}" for i in range(3000)]


def test_a_bad_byte_costs_one_character_and_line_ends_are_plain():
    assert rows("a.txt", b"good \xff text\r\nnext") == [("good � text\nnext", 17)]
    assert [value for value, _ in rows("a.jsonl", b'{"text": "a\xff"}\n')] == ["a�"]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=300), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_long_text_is_cut_into_whole_characters_and_nothing_is_lost(text, size):
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PIECE_BYTES", max(size, 4))
        found = rows("a.txt", data)
        assert all(rows("a.txt", data, offset) == found[index + 1 :] for index, (_, offset) in enumerate(found))
    if data[:2] not in (b"\xff\xfe", b"\xfe\xff") and not data.startswith(codecs.BOM_UTF8):
        assert "".join(value for value, _ in found).replace("\r", "") == text.replace("\r", "")


def test_a_line_of_any_length_is_a_row_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 64)
    data = b'{"text": "%s"}\n{"text": "short"}\n{"text": "%s"}' % (b"x" * 500, b"y" * 500)
    assert [value for value, _ in rows("a.jsonl", data)] == [TOO_LONG, "short", TOO_LONG]


ROWS = [
    ('{"text": "good"}', None), ('{"text": null}', "null"), ('{"text": ""}', "empty"), ('{"text": " \\n"}', "empty"),
    ('{"text": 7}', "number"), ('{"text": true}', "number"), ('{"text": ["a"]}', "list"),
    ('{"text": {"a": 1}}', "object"), ('{"other": "x"}', "without the column"), ("{torn", "not JSON"),
    ('"bare"', None), ("17", "number"), ("[" * 100_000, "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), ROWS)
def test_a_row_that_is_no_text_is_left_out_with_a_reason(line, reason):
    (value, _), (after, _) = rows("a.jsonl", f'{line}\n{{"text": "after"}}\n'.encode())
    assert text_or_reason(value)[1] == reason
    assert after == "after"


def cut(name: str) -> bytes:
    return PACK["." + name.rpartition(".")[2] if name.count(".") > 1 else ""](CONTENT[name.removesuffix(".gz")
        .removesuffix(".zst").removesuffix(".bz2").removesuffix(".xz")])[:-40]  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.bz2", "a.jsonl.xz", "a.parquet", "a.arrow", "a.json",
                                  "a.parquet.gz", "a.arrow.zst"])  # fmt: skip
def test_a_torn_file_is_named(name):
    with pytest.raises(FileProblem):
        rows(name, cut(name))


@pytest.mark.parametrize(("name", "data", "told"), [
    ("photo.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not text; formats are"),
    ("a.pdf", b"%PDF-1.7\n\0binary", "not text"), ("a.parquet", b"PAR1 no parquet", "torn or not parquet"),
    ("a.gz", b"plain text", "torn or not text in gz"), ("a.arrow", b"ARROW1 no", "torn or not arrow"),
    ("a.csv", b"id,body\n1,x\n", "no column 'text'; it has id, body"), ("a.csv", b"", "no column"),
    ("a.json", b'[{"text": "a"}, {"text" "b"}]', "row 1"),
])  # fmt: skip
def test_a_file_that_is_none_of_these_is_named_with_the_reason(name, data, told):
    with pytest.raises(FileProblem, match=told):
        rows(name, data)


def test_a_column_that_is_missing_is_named_with_those_there_are(tmp_path: Path):
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(FileProblem, match=r"no column 'body'; it has (id, )?text"):
            rows(name, CONTENT[name], column="body")
    mixed = pa.table({"text": [[1, 2], None]})
    pq.write_table(mixed, tmp_path / "lists.parquet")
    found = rows("lists.parquet", (tmp_path / "lists.parquet").read_bytes())
    assert [text_or_reason(value)[1] for value, _ in found] == ["list", "null"]
