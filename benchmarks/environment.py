"""The environment in which hivemind's peers run: a virtual one with pinned versions, made when it is first needed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.errors import UserError

CONSTRAINTS = Path(__file__).with_name("hivemind.txt")
PACKAGES = ("hivemind", "torch", "numpy", "bitsandbytes")
MARKER = "atoll-benchmark"
TAIL_CHARS = 2000
Run = Callable[[Sequence[str]], None]


def default_folder() -> Path:
    """In the user's cache."""
    return Path.home() / ".cache" / "atoll" / "benchmark-hivemind"


def prepared(folder: Path, say: Callable[[str], None], run: Run | None = None) -> str:
    """The interpreter of the environment in `folder`, which is made first unless it is there and its pins are these.

    Args:
        folder: absent, empty, or an earlier environment of this function.
        say: progress.
        run: a command; raises UserError when it fails.

    Raises:
        UserError: something else is in the folder, or the packages cannot be installed.
    """
    run = run or _run
    python, marker = folder / "bin" / "python", folder / MARKER
    pins = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()
    if marker.exists() and marker.read_text() == pins and python.exists():
        return str(python)
    if folder.exists() and any(folder.iterdir()) and not marker.exists():  # a folder that this did not create
        raise UserError(f"--environment={folder}: holds something else", "name a folder that is absent or empty")
    say(f"installing hivemind and an older numpy into {folder}")
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    marker.write_text("unfinished")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, "--constraint", str(CONSTRAINTS), *PACKAGES])
    marker.write_text(pins)
    return str(python)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise _failed(command, str(error)) from None
    if done.returncode:
        raise _failed(command, done.stdout[-TAIL_CHARS:].strip())


def _failed(command: Sequence[str], output: str) -> UserError:
    hint = "measure without it: --systems atoll gloo"
    return UserError(f"hivemind's environment cannot be made: {' '.join(command[1:4])} failed", f"{output}\n{hint}")
