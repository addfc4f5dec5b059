"""Files that survive a crash: flushed to the disk, hashed, and moved into place by one rename."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

_HASH_CHUNK_BYTES = 2**20


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits, in constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    path.write_bytes(content)
    flush(path)


def flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the content of `source`, without a second copy where the file system allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    flush(target)


def remove_tree(path: Path) -> None:
    """Delete a folder that may be half gone already."""
    shutil.rmtree(path, ignore_errors=True)
