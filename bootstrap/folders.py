"""Where a bootstrap keeps its runs: one alone in the state folder, further ones each in a folder of its name there."""

from __future__ import annotations

import contextlib
from pathlib import Path

from bootstrap.manifest_serial import FILE_NAME, Published
from peer.errors import ProtocolError, UserError, did_you_mean
from peer.protocol.records import parse_json
from peer.system.file_lock import lock_folder

LOCK_NAME = "bootstrap.lock"


def run_folder(state_dir: Path, name: str, alone: bool) -> Path:
    """The folder of a run: the one that it had, whatever is served beside it now."""
    return _served_here(state_dir).get(name, state_dir if alone else state_dir / name)


def find_run(state_dir: Path, name: str | None) -> Path:
    """The folder of a run that was served here.

    Args:
        name: None: the only one.

    Raises:
        UserError: there is none, or there are several.
    """
    folders = _served_here(state_dir)
    if not folders:
        hint = "start `atoll-bootstrap MANIFEST` once, or name the folder of its run with --state-dir"
        raise UserError(f"{state_dir} holds no run", hint)
    if name is not None:
        if name not in folders:
            raise UserError(f"{state_dir} holds no run {name}", did_you_mean(name, folders))
        return folders[name]
    if len(folders) > 1:
        choices = ", ".join(f"--run {one}" for one in sorted(folders))
        raise UserError(f"{state_dir} holds {len(folders)} runs", f"say which one: {choices}")
    return next(iter(folders.values()))


def published_in(folder: Path) -> Published:
    """What the node last published from there.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / FILE_NAME
    try:
        return parse_json(Published, path.read_bytes())
    except (OSError, ProtocolError) as error:
        raise UserError(f"{path} cannot be read: {error}", "start `atoll-bootstrap` there again") from None


def is_served(state_dir: Path) -> bool:
    """Whether a node runs there now."""
    try:
        lock_folder(state_dir, "state_dir", LOCK_NAME).close()
    except UserError:
        return True
    return False


def _served_here(state_dir: Path) -> dict[str, Path]:
    """Folders by the name of the run."""
    paths = [state_dir / FILE_NAME, *sorted(state_dir.glob(f"*/{FILE_NAME}"))]
    found = {}
    for path in paths:
        with contextlib.suppress(UserError):  # a file that is lost or damaged is written again by the node
            found[published_in(path.parent).name] = path.parent
    return found
