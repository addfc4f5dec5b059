"""Where a bootstrap keeps its runs: one alone in the state folder, several each in a folder of its name there."""

from __future__ import annotations

from pathlib import Path

from bootstrap.manifest_serial import FILE_NAME
from peer.errors import UserError, did_you_mean

MAX_RUNS = 16  # of one node


def run_folder(state_dir: Path, name: str, alone: bool) -> Path:
    """The folder of a run; where it was served with others before, it keeps its own."""
    own = state_dir / name
    return state_dir if alone and not (own / FILE_NAME).exists() else own


def find_run(state_dir: Path, name: str | None) -> Path:
    """The folder of a run that was served here.

    Args:
        name: None: the only one.

    Raises:
        UserError: there is none, or there are several.
    """
    several = sorted(path.parent for path in state_dir.glob(f"*/{FILE_NAME}"))
    if name is None and (state_dir / FILE_NAME).exists() and not several:
        return state_dir
    names = [path.name for path in several]
    if name is None and len(several) == 1:
        return several[0]
    if name in names:
        return state_dir / name
    if name is not None and several:
        raise UserError(f"{state_dir} holds no run {name}", did_you_mean(name, names))
    if several:
        choices = ", ".join(f"--run {one}" for one in names)
        raise UserError(f"{state_dir} holds {len(several)} runs", f"say which one: {choices}")
    if name is not None and (state_dir / FILE_NAME).exists():
        return state_dir
    hint = "start `atoll-bootstrap MANIFEST` once, or name the folder of its run with --state-dir"
    raise UserError(f"{state_dir} holds no run", hint)
