"""Where text comes from: the standard library's source, a shipped set, the hub, the web, or a peer's own files."""

from __future__ import annotations

import itertools
import logging
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path

from peer.data.problems import FileProblem, SourceBusy
from peer.data.shards import DataFile, Shard
from peer.data.web import check_public
from peer.errors import UserError
from peer.protocol.manifest import DataSpec, SourceSpec

log = logging.getLogger(__name__)

RESIDENT_BYTES = 64 << 20  # local files of no more, together, are held in memory and shuffled as one
SHARD_BYTES, SHARD_FILES = 64 << 20, 4096  # of local files that are read one after the other
INSTRUCTIONS = Path(__file__).with_name("instructions.jsonl")
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
OWN_FILES_HINT = "train_files takes files, folders and globs: text, jsonl, json, csv, parquet and arrow, also .gz, .zst"


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The files of one source.

    Attributes:
        name: for messages.
        column: of files that have columns.
        resident: small and on this machine.
        hint: what to do if there is no text in it.
    """

    name: str
    shards: Sequence[Shard]
    column: str = "text"
    weight: float = 1.0
    resident: bool = False
    hint: str = OWN_FILES_HINT


def list_sources(spec: DataSpec, train_files: tuple[str, ...], *, private_urls: bool = False) -> list[TextSource]:
    """The sources that this peer trains and validates on; reads the names of files, and none of them.

    Args:
        train_files: the peer's own files, folders or globs; when given they replace the run's sources.
        private_urls: files may lie on this machine's network.

    Raises:
        UserError: a source that does not exist or cannot be reached.
    """
    if train_files:
        column = spec.sources[0].text_column
        return [_local(f"train_files {list(train_files)}", _own_files(train_files), OWN_FILES_HINT, 1.0, column)]
    makers: dict[str, Callable[[SourceSpec], TextSource]] = {
        "python-stdlib": _stdlib, "instructions": _instructions, "hub": _hub,
        "web": partial(_web, public=not private_urls),
    }  # fmt: skip
    return [makers[source.kind](source) for source in spec.sources]


def _stdlib(spec: SourceSpec) -> TextSource:
    root = Path(sysconfig.get_path("stdlib"))
    files = [(name, file) for name, file in _walk(root, lambda folder: folder not in _STDLIB_EXCLUDED)
             if name.endswith(".py")]  # fmt: skip
    hint = "install the full Python, or set train_files"
    if not files:
        raise UserError(f"the data set is empty: no Python source under {root}", hint)
    return _local(f"the Python source under {root}", files, hint, spec.weight)


def _instructions(spec: SourceSpec) -> TextSource:
    files = [(INSTRUCTIONS.name, INSTRUCTIONS)]
    return _local("Atoll's instructions", files, "install Atoll again", spec.weight)


def _local(name: str, files: Sequence[tuple[str, Path]], hint: str, weight: float, column: str = "text") -> TextSource:
    """Files of this machine, in shards of some megabytes."""
    found = [(_described(name, path), path.stat().st_size) for name, path in files]
    shards: list[Shard] = []
    taken: list[DataFile] = []
    total = 0
    for file, size in found:
        if taken and (total + size > SHARD_BYTES or len(taken) == SHARD_FILES):
            shards, taken, total = [*shards, tuple(taken)], [], 0
        taken.append(file)
        total += size
    if taken:
        shards.append(tuple(taken))
    resident = sum(size for _, size in found) <= RESIDENT_BYTES
    if resident and shards:
        shards = [tuple(file for file, _ in found)]
    return TextSource(name=name, shards=shards, weight=weight, resident=resident, hint=hint, column=column)


def _described(name: str, path: Path) -> DataFile:
    status = path.stat()
    printable = os.fsencode(name).decode("utf-8", "replace")
    return DataFile(name=printable, place=os.fsdecode(path), tag=f"{status.st_size} {status.st_mtime_ns}")


def _web(spec: SourceSpec, *, public: bool) -> TextSource:
    files = [
        DataFile(name=_name_in(file.url), place=file.url, tag=file.sha256, sha256=file.sha256, public=public)
        for file in spec.files
    ]
    for file in files if public else ():
        _check_public(file.place)
    name = files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    return TextSource(
        name=name, shards=[(file,) for file in files], column=spec.text_column, weight=spec.weight,
        hint="ask the organiser whether the files moved, or set train_files",
    )  # fmt: skip


def _name_in(url: str) -> str:
    return url.split("?")[0].split("#")[0].rstrip("/").rpartition("/")[2] or url


def _check_public(url: str) -> None:
    try:
        check_public(url)
    except SourceBusy as error:
        log.warning("%s", error)
    except FileProblem as problem:
        raise UserError(
            f"the run's data: {problem}",
            "if you know that server, allow it with --private-urls; else leave this run, and tell its organiser",
        ) from None


def _hub(spec: SourceSpec) -> TextSource:
    from peer.data.hub_files import hub_files

    name = f"the data set {spec.name}" + (f" (subset {spec.subset!r})" if spec.subset else "")
    return TextSource(
        name=name, shards=[(file,) for file in hub_files(spec, name)], column=spec.text_column, weight=spec.weight,
        hint="choose another split or text_column, or set train_files",
    )  # fmt: skip


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
            raise UserError(f"train_files {pattern!r} matches no file (looked in {Path.cwd()})", OWN_FILES_HINT)
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
