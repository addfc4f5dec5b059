from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from pydantic import ValidationError

from peer.data import sources
from peer.data.sources import load_documents, split_documents
from peer.errors import UserError
from peer.protocol.manifest import DataSpec

STDLIB = DataSpec()


def dataset_of(*texts: tuple[str, str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"path": [path for path, _ in texts], "text": [text for _, text in texts]})


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def test_stdlib_takes_sorted_sources_without_tests_and_packages(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "json/z.py", "test/x.py", "lib2to3/tests/x.py", "idlelib/idle_test/x.py",
                 "site-packages/torch/x.py", "dist-packages/x.py", "__pycache__/x.py", "notes.txt", "bad.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\xff\xfe" if name == "bad.py" else name.encode())
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    documents = load_documents(STDLIB, (), None)
    assert documents["path"][:] == ["a.py", "b.py", "json/z.py"]
    assert documents["text"][:] == ["a.py", "b.py", "json/z.py"]


def test_the_real_stdlib_is_megabytes_of_text():
    documents = load_documents(STDLIB, (), None)
    assert "json/decoder.py" in documents["path"][:]
    assert sum(map(len, documents["text"])) > 5_000_000


def test_no_stdlib_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=f"empty: no Python source under {tmp_path}"):
        load_documents(STDLIB, (), None)


def test_own_files_folders_and_globs_replace_the_source(tmp_path, caplog):
    write(tmp_path / "one", a="alpha", empty="")
    write(tmp_path / "one" / ".git", hidden="no")
    write(tmp_path / "two" / "deep", b="beta", c="gamma")
    (tmp_path / "two" / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "lone.md").write_text("delta")
    with caplog.at_level(logging.WARNING):
        documents = load_documents(
            STDLIB, (str(tmp_path / "one"), str(tmp_path / "two" / "**"), str(tmp_path / "lone.md")), None
        )
    found = dict(zip(documents["path"], documents["text"], strict=True))
    assert found == {"a.txt": "alpha", "deep/b.txt": "beta", "deep/c.txt": "gamma", "lone.md": "delta"}
    assert "1 files are not UTF-8" in caplog.text


def test_a_file_named_twice_is_one_document(tmp_path):
    write(tmp_path, a="alpha")
    assert len(load_documents(STDLIB, (str(tmp_path), str(tmp_path / "a.txt"), str(tmp_path / "*.txt")), None)) == 1


def test_own_files_may_be_relative_globs(tmp_path, monkeypatch):
    write(tmp_path, a="alpha")
    monkeypatch.chdir(tmp_path)
    assert load_documents(STDLIB, ("*.txt",), None)["path"][:] == ["a.txt"]


def test_a_pattern_without_a_match_is_named(tmp_path):
    with pytest.raises(UserError, match=r"'/nowhere/\*\.txt' matches no file"):
        load_documents(STDLIB, ("/nowhere/*.txt",), None)
    (tmp_path / "blob").write_bytes(b"\xff")
    with pytest.raises(UserError, match="the data set is empty: train_files") as caught:
        load_documents(STDLIB, (str(tmp_path),), None)
    assert "UTF-8" in caught.value.hint


def test_an_unreachable_hub_is_a_users_problem_not_a_traceback():
    with pytest.raises(UserError, match=r"cannot load the data set no-owner/no-such-set \(subset 'x'\)") as caught:
        load_documents(DataSpec(source="hub", name="no-owner/no-such-set", subset="x"), (), None)
    assert "train_files" in caught.value.hint


def test_hub_columns(monkeypatch):
    rows = datasets.Dataset.from_dict({"content": ["one", "two"], "stars": [1, 2]})
    builder = SimpleNamespace(
        config=SimpleNamespace(data_files={"train": ["hf://datasets/o/n@abc/data.parquet"]}),
        download_and_prepare=lambda: None, as_dataset=lambda split: {"train": rows}[split],
    )  # fmt: skip
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_args, **_kwargs: builder)
    documents = load_documents(DataSpec(source="hub", name="o/n", text_column="content"), (), None)
    assert documents["text"][:] == ["one", "two"]
    assert documents["path"][:] == ["o/n/default/train/0", "o/n/default/train/1"]
    with pytest.raises(UserError, match="no column 'contents'") as caught:
        load_documents(DataSpec(source="hub", name="o/n", text_column="contents"), (), None)
    assert caught.value.hint == "did you mean 'content'?"


@pytest.mark.parametrize("name", ["Documents/private", "json/json", "csv/data", "buckets/me"])
def test_a_name_on_the_hub_is_never_a_folder_of_this_machine(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "diary.txt").write_text("dear diary")
    with pytest.raises(UserError, match=f"cannot load the data set {name}"):
        load_documents(DataSpec(source="hub", name=name), (), tmp_path / "cache")


@pytest.mark.parametrize(
    "name", ["text", "json", "/etc", "~/private", "../private", "a/../b", "file:///etc", "hf://datasets/a/b", "./a/b",
             "a/b/c"],
)  # fmt: skip
def test_what_is_no_name_of_an_owner_and_a_data_set_is_refused(name):
    with pytest.raises(ValidationError, match="name"):
        DataSpec(source="hub", name=name)


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd", "file:///etc/passwd", "https://example.org/a.txt", "hf://datasets/other/one@abc/a.txt",
        "zip://a.txt::/home/me/all.zip", "file:///etc/passwd::hf://datasets/o/n@abc/a.zip",
        "hf://datasets/o/n@abc/../../../x",
    ],
)  # fmt: skip
def test_a_data_set_whose_card_names_files_elsewhere_is_refused(monkeypatch, place):
    read = []
    builder = SimpleNamespace(
        config=SimpleNamespace(data_files={"train": ["hf://datasets/o/n@abc/a.txt", place]}),
        download_and_prepare=lambda: read.append(place),
    )
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_args, **_kwargs: builder)
    with pytest.raises(UserError, match="outside of itself"):
        load_documents(DataSpec(source="hub", name="o/n"), (), None)
    assert read == []


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_silenced_and_then_as_before(tmp_path, monkeypatch, shown):
    write(tmp_path, a="alpha")
    states = []
    monkeypatch.setattr(sources, "_own_files", lambda _: states.append(datasets.are_progress_bars_disabled()) or [])
    was_disabled = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    with pytest.raises(UserError):
        load_documents(STDLIB, (str(tmp_path),), None)
    assert states == [True]
    assert datasets.are_progress_bars_disabled() is not shown
    (datasets.disable_progress_bars if was_disabled else datasets.enable_progress_bars)()


def test_the_split_is_by_path_hash_and_independent_of_the_other_documents():
    documents = dataset_of(*[(f"file{i}.py", "x") for i in range(1000)])
    train, validation = split_documents(documents, 0.05)
    expected = {
        f"file{i}.py" for i in range(1000)
        if int.from_bytes(hashlib.sha256(f"file{i}.py".encode()).digest()[:6], "big") / 2**48 < 0.05
    }
    assert set(validation["path"]) == expected
    assert 30 < len(expected) < 70
    assert set(train["path"]) | expected == set(documents["path"])
    assert len(train) + len(validation) == 1000
    half = dataset_of(*[(f"file{i}.py", "x") for i in range(500)])
    assert set(split_documents(half, 0.05)[1]["path"]) == {name for name in expected if int(name[4:-3]) < 500}


@pytest.mark.parametrize("fraction", [1e-6, 0.5])
def test_both_sides_get_a_document(fraction):
    for count in (2, 3, 5):
        train, validation = split_documents(dataset_of(*[(f"{i}", "x") for i in range(count)]), fraction)
        assert len(train) >= 1
        assert len(validation) >= 1
        assert sorted([*train["path"], *validation["path"]]) == [str(i) for i in range(count)]


def test_a_lone_document_is_cut_by_position():
    train, validation = split_documents(dataset_of(("big.txt", "0123456789")), 0.2)
    assert (train["text"][0], validation["text"][0]) == ("01234567", "89")
    with pytest.raises(UserError, match="one document of 1 characters"):
        split_documents(dataset_of(("big.txt", "0")), 0.2)
