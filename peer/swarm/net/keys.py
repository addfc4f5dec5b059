"""The identity key on disk: created with O_EXCL at mode 0600, never readable by others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from peer.errors import UserError
from peer.protocol.identity import Identity


def load_or_create_identity(path: Path) -> Identity:
    """Read the Ed25519 key at `path`, or create it.

    Raises:
        UserError: unreadable, not such a key, or readable by other users.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _load(path)
    except OSError as error:
        raise UserError(
            f"cannot create the identity file {path}: {error.strerror}", "give another --identity-path"
        ) from None
    identity = Identity.generate()
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.to_bytes())
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink()  # half a key would be a damaged one for ever
        raise UserError(f"cannot write the identity file {path}: {error.strerror}", "check the disk") from None
    return identity


def check_identity(path: Path) -> None:
    """Say what is wrong with the key at `path`; that there is none yet is fine.

    Raises:
        UserError: unreadable, not such a key, or readable by other users.
    """
    if path.exists():
        _load(path)


def _load(path: Path) -> Identity:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the identity file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(
            f"the identity file {path} has mode {mode:04o}: others could read the key",
            f"run: chmod 600 {path}\nwhere the file system has no modes, give an --identity-path on another one",
        )
    try:
        return Identity.from_bytes(content)
    except ValueError as error:
        raise UserError(
            f"the identity file {path} is damaged or of another kind: {error}",
            "move it away to get a new identity, or restore it from a backup",
        ) from None
