"""Socket files that killed libp2p daemons leave behind."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

PROBE_TIMEOUT_S = 1.0


def sweep_stale_sockets(folder: Path | None = None) -> int:
    """Remove hivemind's socket files of daemons that were killed; returns how many. Live sockets stay."""
    folder = folder or Path(tempfile.gettempdir())
    listening = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    removed = 0
    for path in folder.glob("hivemind-p2p*.sock"):
        if str(path) in listening or _answers(path):
            continue
        try:
            path.unlink()
            removed += 1
        except OSError:
            continue  # another user's, or gone meanwhile
    return removed


def _answers(path: Path) -> bool:
    """Whether somebody listens; /proc/net/unix does not show sockets of other network namespaces (containers)."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # another user's, or too busy to answer
    return True
