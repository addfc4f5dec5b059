"""Checkpoints that are whole or absent: written aside, hashed, flushed, then renamed.

    <run>/checkpoint-<step>/
        <stem>.safetensors     tensors
        state.json             everything else
        manifest.json          SHA-256 of each file and of each tensor, and of itself
        ...                    extra files

A folder has one writer. Readers may come at any time: what they can see under its final name is complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peer.checkpoint import inventory
from peer.checkpoint.files import flush, link_or_copy, open_plain, remove_tree, unify_modes, write_bytes
from peer.checkpoint.inventory import CheckpointError, Place

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
_FREE_MARGIN_BYTES = 2**20
_ANOTHER = "resume from another checkpoint"
_NAME = re.compile(r"checkpoint-(\d+)(\.old)?")
_STEM = re.compile(inventory.STEM_PATTERN)
_EXTRA = re.compile(inventory.FILE_PATTERN)
MAX_STATE_BYTES = 2**20


def write_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any],
    extra_files: Sequence[Path] = (), keep: int = 3,
) -> Path:
    """Write `root/checkpoint-<step>` atomically, then prune to `keep` checkpoints.

    Args:
        root: made if absent; must have no other writer.
        step: >= 0; a checkpoint of the same step is replaced.
        tensors: file stem -> name -> tensor, on any device.
        state: a JSON document; its `round` and `run_id`, if any, are what checkpoints are ordered and found by.
        extra_files: moved in once the checkpoint is complete.
        keep: how many checkpoints are kept, >= 1; this one always is.

    Raises:
        CheckpointError: a bad name, too little space, or the disk failed. Earlier checkpoints and the extra files
            are then as they were.
    """
    _check_arguments(step, tensors, extra_files, keep)
    target = root / f"checkpoint-{step}"
    aside = root / f"{target.name}.tmp-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        _check_space(root, tensors, extra_files)
        aside.mkdir()
        _fill(aside, step, tensors, state, extra_files)
        _move_into_place(aside, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error}", "earlier checkpoints are untouched; check the disk"
        ) from error
    finally:
        remove_tree(aside)
    for file in extra_files:
        with contextlib.suppress(OSError):  # the checkpoint is complete
            file.unlink()
    _prune(root, target, keep)
    return target


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint in a folder, unverified. `place`: None where that cannot be read. `written`: in nanoseconds."""

    path: Path
    place: Place | None
    written: int

    @property
    def age(self) -> tuple[bool, int, int, int, bool]:
        """Sorts the newest last: by round, and not by step, which begins again where a peer starts fresh."""
        place = self.place or Place(step=0)
        return self.place is None, place.round, self.written, place.step, self.path.suffix != ".old"

    @property
    def in_words(self) -> str:
        return f"{self.path} (step {self.place.step}, round {self.place.round})" if self.place else str(self.path)


def look_up(root: Path, run_id: str | None = None) -> list[Found]:
    """The checkpoints in `root` and in its run folders, newest first; those of one run, if it is named.

    Leftovers of a crash and links to other places are not among them; one whose inventory cannot be read comes first.
    """
    found = []
    for path in (*root.glob("checkpoint-*"), *root.glob("*/checkpoint-*")):
        if path.is_symlink() or (path.parent != root and path.parent.is_symlink()):
            continue
        place = inventory.read_place(path)
        mine = run_id is None or place is None or place.run_id == run_id
        if _NAME.fullmatch(path.name) and path.is_dir() and mine:
            found.append(Found(path=path, place=place, written=_written(path)))
    return sorted(found, key=lambda one: one.age, reverse=True)


def list_checkpoints(root: Path, run_id: str | None = None) -> list[Path]:
    """The paths of `look_up`."""
    return [one.path for one in look_up(root, run_id)]


def find_checkpoint(
    root_or_path: Path, run_id: str | None = None, max_tensors_bytes: int = inventory.MAX_TENSORS_BYTES
) -> Path:
    """The newest valid checkpoint below a folder, or the folder itself if it is one.

    A corrupt checkpoint is passed over with a warning that says why; one that was named is an error.

    Args:
        run_id: whose checkpoints; None: all.
        max_tensors_bytes: of a file of tensors; more are not read.

    Raises:
        CheckpointError: nothing valid there.
    """
    if (root_or_path / inventory.INVENTORY_FILE).exists() or _NAME.fullmatch(root_or_path.name):
        inventory.verify_files(root_or_path, max_tensors_bytes)
        return root_or_path
    reasons = []
    for path in list_checkpoints(root_or_path, run_id):
        try:
            inventory.verify_files(path, max_tensors_bytes)
        except CheckpointError as error:
            log.warning("passing over %s", error.what)
            reasons.append(error.what)
        else:
            return path
    of_run = f" of run {run_id[:16]}" if run_id else ""
    hint = "\n".join(reasons) or "the folder has no checkpoint-<step>; start without resuming, or name another folder"
    raise CheckpointError(f"no valid checkpoint{of_run} in {root_or_path}", hint)


def read_checkpoint(
    path: Path, max_tensors_bytes: int = inventory.MAX_TENSORS_BYTES
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """(file stem -> name -> tensor on the CPU, state) of a checkpoint whose every byte was verified.

    Raises:
        CheckpointError: which file or tensor is missing or differs.
    """
    listed = inventory.verify_files(path, max_tensors_bytes)
    if missing := {STATE_FILE, *(f"{stem}.safetensors" for stem in listed.tensors)} - set(listed.files):
        raise CheckpointError(f"checkpoint {path} has no {min(missing)}", _ANOTHER)
    tensors = {stem: load_tensors(path / f"{stem}.safetensors") for stem in listed.tensors}
    state = read_state(path)
    for stem, named in tensors.items():
        inventory.verify_tensors(path, stem, named, listed.tensors[stem])
    return tensors, state


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of a verified checkpoint.

    Raises:
        CheckpointError: it is no safetensors file, or of types that this torch has not.
    """
    try:
        return load_file(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]!r}"
        raise CheckpointError(f"checkpoint file {path} cannot be read: {reason}", _ANOTHER) from error


def read_state(folder: Path) -> dict[str, Any]:
    """The numbers of a verified checkpoint.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = folder / STATE_FILE
    try:
        with open_plain(path, MAX_STATE_BYTES) as file:
            state = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}", _ANOTHER) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint file {path} holds {type(state).__name__}, no mapping", _ANOTHER)
    return state


def _written(path: Path) -> int:
    """0 if it is gone meanwhile, or has no inventory."""
    with contextlib.suppress(OSError):
        return (path / inventory.INVENTORY_FILE).stat().st_mtime_ns
    return 0


def _check_arguments(
    step: int, tensors: Mapping[str, Mapping[str, Tensor]], extra_files: Sequence[Path], keep: int
) -> None:
    if step < 0 or keep < 1:
        raise CheckpointError(f"step={step}, keep={keep}: step must be at least 0 and keep at least 1")
    for stem in tensors:
        if not _STEM.fullmatch(stem):
            raise CheckpointError(f"checkpoint file stem {stem!r}: must match {_STEM.pattern}")
    taken = {STATE_FILE, inventory.INVENTORY_FILE, *(f"{stem}.safetensors" for stem in tensors)}
    for file in extra_files:
        if not _EXTRA.fullmatch(file.name) or file.name in taken:
            raise CheckpointError(f"extra file {file.name!r}: must match {_EXTRA.pattern} and be none of the others")
        taken.add(file.name)


def _check_space(root: Path, tensors: Mapping[str, Mapping[str, Tensor]], extra_files: Sequence[Path]) -> None:
    tensor_bytes = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    needed = tensor_bytes + sum(file.stat().st_size for file in extra_files) + _FREE_MARGIN_BYTES
    total, _, free = shutil.disk_usage(root)
    if needed > free and total > 0:  # 0: some network and FUSE mounts tell no size
        raise CheckpointError(
            f"a checkpoint needs {needed / 2**20:.1f} MiB; {free / 2**20:.1f} MiB free in {root}",
            "free space, lower save_total_limit, or choose another output_dir",
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any],
    extra_files: Sequence[Path],
) -> None:
    digests = {}
    for stem, named in tensors.items():
        own = _own_storage(named)
        digests[stem] = {name: inventory.tensor_digest(tensor) for name, tensor in own.items()}
        save_file(own, folder / f"{stem}.safetensors")
        flush(folder / f"{stem}.safetensors")
    write_bytes(folder / STATE_FILE, json.dumps(state, sort_keys=True, indent=1).encode())
    for file in extra_files:
        link_or_copy(file, folder / file.name)
    place = Place(step=step, round=int(state.get("round", 0)), run_id=str(state.get("run_id", "")))
    write_bytes(folder / inventory.INVENTORY_FILE, inventory.describe(folder, place, digests))
    unify_modes(folder)
    flush(folder)


def _own_storage(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no storage: safetensors refuses views of one another."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        own[name] = plain
    return own


def _move_into_place(aside: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        # A folder cannot be replaced in one rename: between the two, readers find the old one by its other name.
        remove_tree(old)
        target.rename(old)
    aside.rename(target)
    flush(target.parent)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob("checkpoint-*.tmp-*"):
        log.warning("removing %s, left by a write that did not finish", path)
        remove_tree(path)


def _prune(root: Path, written: Path, keep: int) -> None:
    """Keep `written`, and of the others those that were written last, whatever their steps and rounds: an older
    lineage's may be higher for ever."""
    by_time = sorted(look_up(root), key=lambda one: one.written, reverse=True)
    others = [one.path for one in by_time if one.path != written]
    kept = [path for path in others if path.suffix != ".old"][: keep - 1]
    for path in others:
        if path in kept:
            continue
        # Renamed first, so that no reader finds it half deleted.
        doomed = path.with_name(f"{path.name}.tmp-pruned")
        try:
            path.rename(doomed)
        except OSError as error:
            log.warning("cannot prune %s: %s", path, error)
        else:
            remove_tree(doomed)
