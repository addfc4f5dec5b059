from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from pydantic import ValidationError

from peer.data import sources
from peer.data.resident import read_documents, split_documents
from peer.data.shards import Shard, is_held_out
from peer.data.sources import SHARD_BYTES, list_sources
from peer.errors import UserError
from peer.protocol.manifest import DataSpec, FileSpec, SourceSpec

STDLIB = DataSpec()


def hub(**more: object) -> DataSpec:
    return DataSpec(sources=(SourceSpec(kind="hub", **{"name": "o/n", **more}),))


def names(shards: list[Shard]) -> list[str]:
    return [file.name for shard in shards for file in shard]


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def own(*patterns: Path | str) -> sources.TextSource:
    (source,) = list_sources(STDLIB, tuple(map(str, patterns)))
    return source


def test_stdlib_takes_sorted_sources_without_tests_and_packages(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "json/z.py", "test/x.py", "lib2to3/tests/x.py", "idlelib/idle_test/x.py",
                 "site-packages/torch/x.py", "dist-packages/x.py", "__pycache__/x.py", "notes.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    (source,) = list_sources(STDLIB, ())
    assert names(source.shards) == ["a.py", "b.py", "json/z.py"]
    assert read_documents(source) == ["a.py", "b.py", "json/z.py"]


def test_the_real_stdlib_is_megabytes_of_text_in_memory():
    (source,) = list_sources(STDLIB, ())
    assert source.resident
    assert len(source.shards) == 1
    assert "json/decoder.py" in names(source.shards)
    assert sum(map(len, read_documents(source))) > 5_000_000


def test_no_stdlib_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=f"empty: no Python source under {tmp_path}"):
        list_sources(STDLIB, ())


def test_own_files_folders_and_globs_replace_the_sources(tmp_path, caplog):
    write(tmp_path / "one", a="alpha", empty="")
    write(tmp_path / "one" / ".git", hidden="no")
    write(tmp_path / "two" / "deep", b="beta", c="gamma")
    (tmp_path / "two" / "image.png").write_bytes(b"\x89PNG\r\n\0\xff")
    (tmp_path / "lone.md").write_text("delta")
    with caplog.at_level(logging.WARNING):
        source = own(tmp_path / "one", tmp_path / "two" / "**", tmp_path / "lone.md")
        assert sorted(read_documents(source)) == ["alpha", "beta", "delta", "gamma"]
    assert names(source.shards) == ["a.txt", "deep/b.txt", "deep/c.txt", "empty.txt", "image.png", "lone.md"]
    assert "left out: image.png: not text; formats are text, jsonl, json, csv, parquet and arrow" in caplog.text


def test_a_file_named_twice_is_read_once(tmp_path):
    write(tmp_path, a="alpha")
    assert names(own(tmp_path, tmp_path / "a.txt", tmp_path / "*.txt").shards) == ["a.txt"]


def test_own_files_may_be_relative_globs(tmp_path, monkeypatch):
    write(tmp_path, a="alpha")
    monkeypatch.chdir(tmp_path)
    assert names(own("*.txt").shards) == ["a.txt"]


def test_a_pattern_without_a_match_is_named(tmp_path):
    with pytest.raises(UserError, match=r"'/nowhere/\*\.txt' matches no file"):
        own("/nowhere/*.txt")
    (tmp_path / "blob").write_bytes(b"\0\xff")
    with pytest.raises(UserError, match="the data set is empty: train_files") as caught:
        read_documents(own(tmp_path))
    assert "parquet" in caught.value.hint


def test_large_files_of_this_machine_make_shards_in_their_order(tmp_path):
    for number in range(5):
        with (tmp_path / f"{number}.txt").open("wb") as file:
            file.truncate(SHARD_BYTES // 2)
    source = own(tmp_path)
    assert not source.resident
    assert [len(shard) for shard in source.shards] == [2, 2, 1]
    assert names(source.shards) == [f"{number}.txt" for number in range(5)]


def test_an_unreachable_hub_is_a_users_problem_not_a_traceback():
    with pytest.raises(UserError, match=r"cannot load the data set no-owner/no-such-set \(subset 'x'\)") as caught:
        list_sources(hub(name="no-owner/no-such-set", subset="x"), ())
    assert "train_files" in caught.value.hint


def hub_of(monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": list(files), "test": []}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_args, **_kwargs: builder)


def test_the_files_of_a_split_on_the_hub_are_shards_at_their_commit(monkeypatch):
    hub_of(monkeypatch, "hf://datasets/o/n@abc/data/b.parquet", "hf://datasets/o/n@abc/data/a.parquet")
    (source,) = list_sources(hub(text_column="content", weight=2.5), ())
    assert (source.column, source.weight, source.resident) == ("content", 2.5, False)
    (first,), (second,) = source.shards
    assert (first.name, first.tag, first.hub) == ("o/n/data/a.parquet", "abc", True)
    assert second.place.endswith("/datasets/o/n/resolve/abc/data/b.parquet")
    with pytest.raises(UserError, match="no such split: did you mean 'train'"):
        list_sources(hub(split="trains"), ())


@pytest.mark.parametrize("name", ["Documents/private", "json/json", "csv/data", "buckets/me"])
def test_a_name_on_the_hub_is_never_a_folder_of_this_machine(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "diary.txt").write_text("dear diary")
    with pytest.raises(UserError, match=f"cannot load the data set {name}"):
        list_sources(hub(name=name), ())


@pytest.mark.parametrize(
    "name", ["text", "json", "/etc", "~/private", "../private", "a/../b", "file:///etc", "hf://datasets/a/b", "./a/b",
             "a/b/c"],
)  # fmt: skip
def test_what_is_no_name_of_an_owner_and_a_data_set_is_refused(name):
    with pytest.raises(ValidationError, match="name"):
        hub(name=name)


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd", "file:///etc/passwd", "https://example.org/a.txt", "hf://datasets/other/one@abc/a.txt",
        "zip://a.txt::/home/me/all.zip", "file:///etc/passwd::hf://datasets/o/n@abc/a.zip",
        "hf://datasets/o/n@abc/../../../x",
    ],
)  # fmt: skip
def test_a_data_set_whose_card_names_files_elsewhere_is_refused(monkeypatch, place):
    hub_of(monkeypatch, "hf://datasets/o/n@abc/a.txt", place)
    with pytest.raises(UserError, match="outside of itself"):
        list_sources(hub(), ())


DIGEST = "a" * 64


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a/b", "/etc/passwd", "http://a b/c", f"http://{'a' * 2000}"]
)
def test_what_is_no_url_of_the_web_is_refused(url):
    with pytest.raises(ValidationError):
        FileSpec(url=url, sha256=DIGEST)


def test_a_source_has_what_belongs_to_its_kind_and_nothing_else():
    file = FileSpec(url="https://example.org/a.txt", sha256=DIGEST)
    for wrong in ({"kind": "web"}, {"kind": "hub"}, {"name": "a/b"}, {"files": (file,)}, {"weight": 0.0},
                  {"kind": "web", "files": (file,), "name": "a/b"}):  # fmt: skip
        with pytest.raises(ValidationError):
            SourceSpec(**wrong)
    with pytest.raises(ValidationError):
        DataSpec(sources=())


def test_files_of_the_readers_own_network_need_permission():
    url = "http://127.0.0.1:1/a/b.jsonl?x=1"
    spec = DataSpec(sources=(SourceSpec(kind="web", files=(FileSpec(url=url, sha256=DIGEST),)),))
    with pytest.raises(UserError, match="an address of this machine or of its network") as caught:
        list_sources(spec, ())
    assert "--private-urls" in caught.value.hint
    (source,) = list_sources(spec, (), private_urls=True)
    assert [(file.name, file.place, file.sha256) for (file,) in source.shards] == [("b.jsonl", url, DIGEST)]


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_silenced_and_then_as_before(monkeypatch, shown):
    states = []
    monkeypatch.setattr(
        datasets, "load_dataset_builder",
        lambda *_args, **_kwargs: states.append(datasets.are_progress_bars_disabled()) or 1 / 0,
    )
    was_disabled = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    with pytest.raises(ZeroDivisionError):
        list_sources(hub(), ())
    assert states == [True]
    assert datasets.are_progress_bars_disabled() is not shown
    (datasets.disable_progress_bars if was_disabled else datasets.enable_progress_bars)()


def test_the_split_is_by_a_hash_of_the_content_and_independent_of_the_other_documents():
    documents = [f"document {i}" for i in range(1000)]
    train, validation = split_documents(documents, 0.05)
    expected = [
        text for text in documents
        if int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48 < 0.05
    ]
    assert validation == expected == [text for text in documents if is_held_out(text, 0.05)]
    assert 30 < len(expected) < 70
    assert sorted([*train, *validation]) == sorted(documents)
    assert split_documents(documents[:500], 0.05)[1] == [text for text in expected if int(text.split()[1]) < 500]


@pytest.mark.parametrize("fraction", [1e-6, 0.5])
def test_both_sides_get_a_document_and_equal_ones_are_on_one_side(fraction):
    for count in (2, 3, 5):
        documents = [str(i) for i in range(count)] * 2
        train, validation = split_documents(documents, fraction)
        assert train
        assert validation
        assert sorted([*train, *validation]) == sorted(documents)
        assert not set(train) & set(validation)


def test_a_lone_document_is_cut_by_position():
    assert split_documents(["0123456789"], 0.2) == (["01234567"], ["89"])
    assert split_documents(["0123456789"] * 2, 0.2) == (["01234567"], ["89"])
    with pytest.raises(UserError, match="one document of 1 characters"):
        split_documents(["0"], 0.2)


def test_a_mixture_of_everything_that_people_have(tmp_path, caplog):
    """Null, empty, numeric and chat rows, jsonl, UTF-16, byte-order marks, CRLF, bad bytes and names, one long line."""
    good = "hello world " * 30
    rows = [good, None, "more text ", "", 7, [{"role": "user", "content": "hi"}]]
    write(tmp_path / "books" / "a", content="chapter a")
    write(tmp_path / "books" / "b", content="chapter b")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows * 20))
    (tmp_path / "utf16.txt").write_text("the quick brown fox", encoding="utf-16")
    (tmp_path / "bom-crlf.txt").write_bytes(b"\xef\xbb\xbf" + b"line one\r\nline two\r\n")
    (tmp_path / "one-bad-byte.txt").write_bytes(b"good \xff text")
    (tmp_path / "one-line.txt").write_text("word " * 2_000_000)
    (Path(str(tmp_path) + "/name\udce9.txt")).write_text("a name that is not UTF-8")
    with caplog.at_level(logging.WARNING):
        documents = read_documents(own(tmp_path))
    assert documents.count(good) == 20
    assert documents.count("more text ") == 20
    for text in ("chapter a", "chapter b", "the quick brown fox", "line one\nline two\n", "good � text",
                 "a name that is not UTF-8"):
        assert documents.count(text) == 1
    long = [text for text in documents if text.startswith("word word")]
    assert "".join(long) == "word " * 2_000_000
    assert len(documents) == 46 + len(long)
    assert ": 20 null, 20 empty, 20 number, 20 conversations without an assistant's turn" in caplog.text


def test_text_of_this_machine_does_not_wait_for_what_only_the_hub_needs():
    look = "import peer.data.sources, sys; print({'datasets', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout == "set()\n"
