"""Files that survive a crash: flushed to the disk, hashed, and moved into place by one rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

_HASH_CHUNK_BYTES = 2**20
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def open_plain(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a file that another person may have made: no link is followed, no pipe waited for, no device read.

    Raises:
        OSError: it is no regular file, holds more than `max_bytes`, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes; the limit is {max_bytes}")
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def sha256_file(path: Path) -> str:
    """SHA-256 of a regular file's bytes, 64 hex digits, in constant memory."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    path.write_bytes(content)
    flush(path)


def flush(path: Path) -> None:
    """Force a file's content to the disk, or a folder's entries where its file system can (CIFS and others cannot)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the content of `source`, without a second copy where the file system allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    flush(target)


def unify_modes(folder: Path) -> None:
    """Give each file in a folder the mode that new files have here: safetensors writes its own for the owner alone."""
    usual = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # a file system without modes
            path.chmod(usual)


def remove_tree(path: Path) -> None:
    """Delete a folder that may be half gone already."""
    shutil.rmtree(path, ignore_errors=True)
