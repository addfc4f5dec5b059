"""Checkpoints that are whole or absent: written aside, hashed, flushed, then renamed.

    checkpoint-<step>/
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
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peer.checkpoint import inventory
from peer.checkpoint.files import flush, link_or_copy, remove_tree, unify_modes, write_bytes
from peer.checkpoint.inventory import CheckpointError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
_FREE_MARGIN_BYTES = 2**20
_NAME = re.compile(r"checkpoint-(\d+)(\.old)?")
_STEM = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_EXTRA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def write_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any],
    extra_files: Sequence[Path] = (), keep: int = 3,
) -> Path:
    """Write `root/checkpoint-<step>` atomically, then prune to `keep` checkpoints.

    Args:
        root: made if absent; must have no other writer.
        step: >= 0; a checkpoint of the same step is replaced.
        tensors: file stem -> name -> tensor, on any device.
        state: a JSON document.
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


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints under `root`, newest first, unverified; leftovers of a crash are not among them."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), match[2] is None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def find_checkpoint(root_or_path: Path) -> Path:
    """The newest valid checkpoint below a folder, or the folder itself if it is one.

    A corrupt checkpoint is passed over with a warning that says why; one that was named is an error.

    Raises:
        CheckpointError: nothing valid there.
    """
    if (root_or_path / inventory.INVENTORY_FILE).exists() or _NAME.fullmatch(root_or_path.name):
        inventory.verify_files(root_or_path)
        return root_or_path
    reasons = []
    for path in list_checkpoints(root_or_path):
        try:
            inventory.verify_files(path)
        except CheckpointError as error:
            log.warning("passing over %s", error.what)
            reasons.append(error.what)
        else:
            return path
    hint = "\n".join(reasons) or "the folder has no checkpoint-<step>; start without resuming, or name another folder"
    raise CheckpointError(f"no valid checkpoint in {root_or_path}", hint)


def read_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """(file stem -> name -> tensor on the CPU, state) of a checkpoint whose every byte was verified.

    Raises:
        CheckpointError: which file or tensor is missing or differs.
    """
    listed = inventory.verify_files(path)
    try:
        tensors = {stem: load_file(path / f"{stem}.safetensors") for stem in listed["tensors"]}
        state = json.loads((path / STATE_FILE).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}", "resume from another checkpoint") from error
    for stem, named in tensors.items():
        inventory.verify_tensors(path, stem, named, listed["tensors"][stem])
    return tensors, state


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
    free = shutil.disk_usage(root).free
    if needed > free:
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
    write_bytes(folder / inventory.INVENTORY_FILE, inventory.describe(folder, step, digests))
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
    """Keep `written`, whatever its step (it may be older than ones a bad resume left), and the newest others."""
    others = [path for path in list_checkpoints(root) if path != written]
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
