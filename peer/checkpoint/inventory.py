"""The list of what a checkpoint holds: SHA-256 of each file, of each tensor, and of the list itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from peer.checkpoint.files import open_plain, sha256_file
from peer.errors import UserError
from peer.protocol.manifest import Digest, Spec
from peer.protocol.problems import explain_validation

INVENTORY_FILE = "manifest.json"
FILE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
STEM_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,63}$"
MAX_INVENTORY_BYTES = 32 * 2**20
MAX_TENSORS_BYTES = 2**42  # of one file, where the caller knows no better limit
MAX_OTHER_BYTES = 2**30
_FORMAT = 2

Count = Annotated[int, Field(ge=0, lt=2**53)]


class FileEntry(Spec):
    """One file as it was written."""

    bytes: Count
    sha256: Digest


class Inventory(Spec):
    """The list itself; names are those of files in the folder, never paths."""

    format: int
    step: Count
    round: Count
    run_id: Annotated[str, Field(max_length=64)]
    files: dict[Annotated[str, Field(pattern=FILE_PATTERN)], FileEntry]
    tensors: dict[Annotated[str, Field(pattern=STEM_PATTERN)], dict[str, Digest]]
    sha256: Digest


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted."""


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and little-endian values of a contiguous CPU tensor, 64 hex digits."""
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a checkpoint stands in training; `round` and `run_id` as its state says, 0 and "" where it does not."""

    step: int
    round: int = 0
    run_id: str = ""


def describe(folder: Path, place: Place, tensors: Mapping[str, Mapping[str, str]]) -> bytes:
    """The inventory of every file in `folder`, as bytes to be written there.

    Args:
        folder: complete but for the inventory.
        tensors: file stem -> tensor name -> digest.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(folder.iterdir())
    }
    body = {"format": _FORMAT, **asdict(place), "files": files, "tensors": tensors}
    return _with_own_digest(body)


def read_place(folder: Path) -> Place | None:
    """Where the checkpoint in a folder stands, unverified; None where its inventory is no inventory."""
    try:
        listed = _read(folder)
    except CheckpointError:
        return None
    return Place(step=listed.step, round=listed.round, run_id=listed.run_id)


def verify_files(folder: Path, max_tensors_bytes: int = MAX_TENSORS_BYTES) -> Inventory:
    """The inventory of a checkpoint all of whose files are listed and unchanged. Nothing outside of it is read.

    Args:
        max_tensors_bytes: of a file of tensors; more are not read.

    Raises:
        CheckpointError: which file is missing, unexpected or differs, and how.
    """
    listed = _read(folder)
    for entry in os.scandir(folder):
        if entry.name != INVENTORY_FILE and entry.name not in listed.files:
            raise _corrupt(folder, f"{entry.name[:128]!r} is not in its list of files")
    for name, expected in listed.files.items():
        path = folder / name
        limit = max_tensors_bytes if path.suffix == ".safetensors" else MAX_OTHER_BYTES
        try:
            with open_plain(path, limit) as file:
                size = os.fstat(file.fileno()).st_size
            if size != expected.bytes:
                raise _corrupt(folder, f"{name} has {size} bytes instead of {expected.bytes}")
            if sha256_file(path) != expected.sha256:
                raise _corrupt(folder, f"{name} has another SHA-256 than when it was written")
        except OSError as error:
            raise _corrupt(folder, f"{name} cannot be read: {error.strerror}") from None
    return listed


def verify_tensors(folder: Path, stem: str, named: Mapping[str, Tensor], expected: Mapping[str, str]) -> None:
    """Check loaded tensors against their digests: the file was right, but were the tensors read from it?

    Raises:
        CheckpointError: the first tensor that is missing, unexpected, or differs.
    """
    for name in sorted(set(named) ^ set(expected)):
        raise _corrupt(folder, f"{stem}: tensor {name!r} is " + ("missing" if name in expected else "unexpected"))
    for name, digest in expected.items():
        if tensor_digest(named[name]) != digest:
            raise _corrupt(folder, f"{stem}: tensor {name!r} has another SHA-256 than when it was written")


def _read(folder: Path) -> Inventory:
    try:
        with open_plain(folder / INVENTORY_FILE, MAX_INVENTORY_BYTES) as file:
            content = file.read(MAX_INVENTORY_BYTES)
        listed = json.loads(content)
        # Compared as bytes: a changed byte that JSON does not mind is still a changed byte.
        body = {key: value for key, value in listed.items() if key != "sha256"} if isinstance(listed, dict) else {}
        if not body or content != _with_own_digest(body):
            raise _corrupt(folder, f"{INVENTORY_FILE} does not match its own SHA-256")
        if body.get("format") != _FORMAT:
            raise _corrupt(folder, f"{INVENTORY_FILE} has format {body.get('format')!r:.20}, not {_FORMAT}")
        return Inventory.model_validate(listed, strict=True)
    except OSError as error:
        raise _corrupt(folder, f"{INVENTORY_FILE} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise _corrupt(folder, f"{INVENTORY_FILE}: {explain_validation(error, Inventory).splitlines()[0]}") from None
    except RecursionError:
        raise _corrupt(folder, f"{INVENTORY_FILE} is nested too deep") from None
    except ValueError as error:
        raise _corrupt(folder, f"{INVENTORY_FILE} is not JSON: {error}") from None


def _with_own_digest(body: Mapping[str, Any]) -> bytes:
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _corrupt(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is not valid: {reason}", "resume from another checkpoint")
