"""The list of what a checkpoint holds: SHA-256 of each file, of each tensor, and of the list itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.checkpoint.files import sha256_file
from peer.errors import UserError

INVENTORY_FILE = "manifest.json"
_FORMAT = 2


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
        place: of the checkpoint.
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
        listed = json.loads((folder / INVENTORY_FILE).read_bytes())
        return Place(step=int(listed["step"]), round=int(listed["round"]), run_id=str(listed["run_id"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def verify_files(folder: Path) -> dict[str, Any]:
    """The inventory of a checkpoint all of whose listed files are there, unchanged.

    Raises:
        CheckpointError: which file is missing or differs, and how.
    """
    listed = _read(folder)
    for name, expected in listed["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise _corrupt(folder, f"{name} has {size} bytes instead of {expected['bytes']}")
            if sha256_file(path) != expected["sha256"]:
                raise _corrupt(folder, f"{name} has another SHA-256 than when it was written")
        except OSError as error:
            raise _corrupt(folder, f"{name} cannot be read: {error.strerror}") from None
    return listed


def verify_tensors(folder: Path, stem: str, named: Mapping[str, Tensor], expected: Mapping[str, str]) -> None:
    """Check loaded tensors against their digests: the file was right, was what came out of it?

    Raises:
        CheckpointError: the first tensor that is missing, unexpected, or differs.
    """
    for name in sorted(set(named) ^ set(expected)):
        raise _corrupt(folder, f"{stem}: tensor {name!r} is " + ("missing" if name in expected else "unexpected"))
    for name, digest in expected.items():
        if tensor_digest(named[name]) != digest:
            raise _corrupt(folder, f"{stem}: tensor {name!r} has another SHA-256 than when it was written")


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = (folder / INVENTORY_FILE).read_bytes()
        listed = json.loads(content)
    except OSError as error:
        raise _corrupt(folder, f"{INVENTORY_FILE} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _corrupt(folder, f"{INVENTORY_FILE} is not JSON: {error}") from None
    body = {key: value for key, value in listed.items() if key != "sha256"} if isinstance(listed, dict) else {}
    # Compared as bytes: a changed byte that JSON does not mind is still a changed byte.
    if not body or content != _with_own_digest(body):
        raise _corrupt(folder, f"{INVENTORY_FILE} does not match its own SHA-256")
    if body["format"] != _FORMAT:
        raise _corrupt(folder, f"{INVENTORY_FILE} has format {body['format']!r}; this atoll reads {_FORMAT}")
    return body


def _with_own_digest(body: Mapping[str, Any]) -> bytes:
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _corrupt(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is not valid: {reason}", "resume from another checkpoint")
