"""Where documents come from: the standard library's source, the hub, or a peer's own files."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path

import datasets

from peer.errors import UserError, did_you_mean
from peer.protocol.manifest import DataSpec

log = logging.getLogger(__name__)

_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HUB = "hf://datasets/"
_ARCHIVES = ("zip://", "tar://", "gzip://", "bz2://", "xz://", "lz4://", "zstd://")
_OWN_FILES_HINT = "train_files takes files, folders and globs of UTF-8 text"


def load_documents(spec: DataSpec, train_files: tuple[str, ...], cache_dir: Path | None) -> datasets.Dataset:
    """The documents that this peer trains and validates on.

    Args:
        train_files: the peer's own files, folders or globs; when given they replace the run's source.
        cache_dir: where hub downloads are kept; None means the `datasets` default. Local sources write nothing.

    Returns:
        A dataset with the string columns `path` (relative, the same on every machine) and `text`.

    Raises:
        UserError: a source that does not exist or cannot be reached, a missing text column, or no text at all.
    """
    with _no_progress_bars():
        if train_files:
            origin, hint = f"train_files {list(train_files)}", _OWN_FILES_HINT
            documents = _read_texts(_own_files(train_files))
        elif spec.source == "hub":
            origin, hint = f"{spec.name} split {spec.split!r}", "choose another split, or set train_files"
            documents = _load_hub(spec, cache_dir)
        else:
            root = Path(sysconfig.get_path("stdlib"))
            origin, hint = f"no Python source under {root}", "install the full Python, or set train_files"
            documents = _read_texts(_stdlib_files(root))
    if not any(documents["text"]):
        raise UserError(f"the data set is empty: {origin}", hint)
    return documents


def split_documents(documents: datasets.Dataset, fraction: float) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(train, validation), the same on every machine: by SHA-256 of each document's path.

    Both sides get at least one document. A lone document is cut by position instead: its last `fraction` of
    characters validates.

    Raises:
        UserError: a lone document too short to cut.
    """
    paths = list(documents["path"])
    if len(paths) == 1:
        return _split_text(paths[0], documents[0]["text"], fraction)
    points = [_unit_interval(path) for path in paths]
    by_point = sorted(range(len(paths)), key=lambda index: (points[index], index))
    wanted = sum(point < fraction for point in points)
    validation = set(by_point[: min(max(wanted, 1), len(paths) - 1)])
    train_indices = [index for index in range(len(paths)) if index not in validation]
    return documents.select(train_indices), documents.select(sorted(validation))


def _unit_interval(path: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    return int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


def _split_text(path: str, text: str, fraction: float) -> tuple[datasets.Dataset, datasets.Dataset]:
    if len(text) < 2:
        raise UserError(
            f"the data set is one document of {len(text)} characters ({path}); a validation split needs at least 2",
            "add text, or more documents",
        )
    cut = min(max(int(len(text) * (1.0 - fraction)), 1), len(text) - 1)
    return _in_memory([(path, text[:cut])]), _in_memory([(path, text[cut:])])


def _in_memory(documents: Iterable[tuple[str, str]]) -> datasets.Dataset:
    rows = list(documents)
    features = datasets.Features(path=datasets.Value("string"), text=datasets.Value("large_string"))
    columns = {"path": [path for path, _ in rows], "text": [text for _, text in rows]}
    return datasets.Dataset.from_dict(columns, features=features)


def _read_texts(files: Iterable[tuple[str, Path]]) -> datasets.Dataset:
    """(relative path, file) pairs -> documents; a file that is empty or not UTF-8 is left out and counted."""
    documents: list[tuple[str, str]] = []
    not_text = 0
    for name, file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            not_text += 1
            continue
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}", "mend it, or leave it out") from None
        if text:
            documents.append((name, text))
    if not_text:
        log.warning("%d files are not UTF-8 text and were left out", not_text)
    return _in_memory(documents)


def _stdlib_files(root: Path) -> list[tuple[str, Path]]:
    files = _walk(root, lambda folder: folder not in _STDLIB_EXCLUDED)
    return [(name, file) for name, file in files if name.endswith(".py")]


def _walk(root: Path, enters: Callable[[str], bool]) -> list[tuple[str, Path]]:
    """The regular files below root as (relative path, file), sorted; only folders that `enters` accepts are entered."""
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if enters(folder)]
        found += [Path(parent, name) for name in names]
    return sorted((file.relative_to(root).as_posix(), file) for file in found if file.is_file())


def _own_files(patterns: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Every file that the patterns name, once, sorted by its path below the folder or glob that found it."""
    found: dict[Path, str] = {}
    for pattern in patterns:
        files = _expand(os.path.expanduser(pattern))
        if not files:
            raise UserError(f"train_files {pattern!r} matches no file (looked in {Path.cwd()})", _OWN_FILES_HINT)
        for name, file in files:
            found.setdefault(file.resolve(), name)
    return sorted((name, file) for file, name in found.items())


def _expand(pattern: str) -> list[tuple[str, Path]]:
    path = Path(pattern)
    if os.path.isdir(path):  # false, too, for a name that no system takes
        # A checkout's .git is not text to learn.
        files = _walk(path, lambda folder: not folder.startswith(".") and folder != "__pycache__")
        return [(name, file) for name, file in files if not file.name.startswith(".")]
    if os.path.isfile(path):
        return [(path.name, path)]
    fixed = list(itertools.takewhile(lambda part: not has_magic(part), path.parts))
    matches = [Path(match) for match in glob(pattern, recursive=True)] if has_magic(pattern) else []
    return [(match.relative_to(Path(*fixed)).as_posix(), match) for match in matches if match.is_file()]


def _load_hub(spec: DataSpec, cache_dir: Path | None) -> datasets.Dataset:
    where = f"{spec.name}" + (f" (subset {spec.subset!r})" if spec.subset else "")
    try:
        # the prefix keeps `datasets` from looking for a folder of that name here
        builder = datasets.load_dataset_builder(
            f"{_HUB}{spec.name}", spec.subset, revision=spec.revision, cache_dir=str(cache_dir) if cache_dir else None
        )
        _check_files(builder, str(spec.name))
        builder.download_and_prepare()
        rows = builder.as_dataset(split=spec.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"cannot load the data set {where}, split {spec.split!r}: {' '.join(str(error).split())}",
            "check the name and the network, or train on your own files with the setting train_files",
        ) from None
    if spec.text_column not in rows.column_names:
        raise UserError(
            f"the data set {where} has no column {spec.text_column!r}",
            did_you_mean(spec.text_column, rows.column_names),
        )
    rows = rows.select_columns([spec.text_column])
    if spec.text_column != "text":
        rows = rows.rename_column(spec.text_column, "text")
    paths = [f"{spec.name}/{spec.subset or 'default'}/{spec.split}/{index}" for index in range(len(rows))]
    return rows.add_column("path", paths)


def _check_files(builder: datasets.DatasetBuilder, name: str) -> None:
    """Refuse data files that are not in the data set's own repository: its card may name paths of this machine."""
    for files in (builder.config.data_files or {}).values():
        for file in files:
            *archives, place = str(file).split("::")
            inside = place.startswith(f"{_HUB}{name}@") and ".." not in place.split("/")
            if not inside or not all(archive.startswith(_ARCHIVES) for archive in archives):
                raise ValueError(f"it names the file {str(file)[:128]!r} outside of itself")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep `datasets` from drawing over the console, and leave its setting as it was."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
