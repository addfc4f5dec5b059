"""Which folder `atoll rounds` reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from peer.errors import UserError
from peer.explain.journal import has_rounds

RUNS = Path("runs")
MAX_NAMED = 8


def find_folder(given: Path | None, runs: Path, environ: Mapping[str, str], wait: bool = False) -> Path:
    """The folder to read: the one given, that of ATOLL_OUTPUT_DIR, or the newest with records below `runs`.

    Args:
        wait: records need not be there yet, if the folder is.

    Raises:
        UserError: there is none, nothing in it, or it cannot be looked into.
    """
    try:
        return _find(given, runs, environ, wait)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}", "Run this as the peer's user.") from None


def _find(given: Path | None, runs: Path, environ: Mapping[str, str], wait: bool) -> Path:
    named = given or (Path(environ["ATOLL_OUTPUT_DIR"]) if environ.get("ATOLL_OUTPUT_DIR") else None)
    if named is None:
        known = _journals(runs)
        if not known:
            raise UserError(
                f"no round records below {runs}/",
                "Name the --output-dir of a peer: atoll rounds RUN-FOLDER. `atoll join` writes them, one a round.",
            )
        return known[0]
    folder = named
    if not os.path.isdir(folder):  # false, too, for a name that no system takes
        raise UserError(f"{folder}: no such folder", _elsewhere(runs) or "Name the --output-dir of a peer.")
    if not has_rounds(folder) and not (wait and not _journals(folder)):
        hint = _elsewhere(folder) or "No round of a peer has ended there yet; --follow waits for the first one."
        raise UserError(f"{folder}: no round records (rounds.jsonl)", hint)
    return folder


def _journals(root: Path) -> list[Path]:
    """Folders at most two levels below with records, the newest first."""
    found = []
    for path in (path for pattern in ("*/rounds.jsonl", "*/*/rounds.jsonl") for path in root.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # it is being rotated
            found.append((path.stat().st_mtime, path.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


def _elsewhere(root: Path) -> str:
    known = _journals(root)
    more = f", ... ({len(known)} in all)" if len(known) > MAX_NAMED else ""
    return f"There are records in {', '.join(map(str, known[:MAX_NAMED]))}{more}." if known else ""
