"""Socket files that killed libp2p daemons leave behind."""

from __future__ import annotations

import tempfile
from pathlib import Path


def sweep_stale_sockets(folder: Path | None = None) -> int:
    """Remove hivemind's socket files of daemons that were killed; returns how many. Live sockets stay."""
    folder = folder or Path(tempfile.gettempdir())
    listening = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    removed = 0
    for path in folder.glob("hivemind-p2p*.sock"):
        if str(path) in listening:
            continue
        try:
            path.unlink()
            removed += 1
        except OSError:
            continue  # another user's, or gone meanwhile
    return removed
