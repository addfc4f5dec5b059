"""One process at a time: exclusive locks on files, which end with the process however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

from peer.errors import UserError

log = logging.getLogger(__name__)


class FileLock:
    """An exclusive hold on a file until `close`, or until this process and its forked children are gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would not free it from a forked child
            except OSError as error:
                log.debug("the lock was none: %s", error)
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_file(path: Path, in_use: Callable[[str], UserError]) -> FileLock:
    """Lock a file, which is created if absent and holds the process id of its owner.

    It stays when the lock is released: removing it would let two processes hold two files of one name. Where the file
    system has no locks (Lustre, some network and FUSE mounts), a warning is logged and nothing is locked.

    Args:
        in_use: process id of the owner -> the error to raise.

    Raises:
        UserError: another process holds it.
        OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise in_use(holder) from None
    except OSError as error:
        log.warning(
            "cannot lock %s (%s): this file system has no locks, so start no second process there", path, error.strerror
        )
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # a full disk: the lock holds, and only its owner is unknown
        log.debug("%s does not name its owner: %s", path, error)
    return FileLock(descriptor)


def lock_folder(path: Path, setting: str, name: str) -> FileLock:
    """Hold a folder that exists, so that no second process of the same kind writes into it.

    Args:
        setting: names the folder in messages.
        name: of the lock file in it.

    Raises:
        UserError: another process holds it, or nothing can be written there.
    """
    remedy = f"Choose another folder with --{setting.replace('_', '-')}."

    def in_use(holder: str) -> UserError:
        what = f"{setting}={path}: is in use by process {holder}, which is still running"
        return UserError(what, f"Two would mix and delete each other's files. {remedy}")

    try:
        return lock_file(path / name, in_use)
    except OSError as error:
        raise UserError(f"{setting}={path}: cannot be locked: {error.strerror}", remedy) from None
