"""Socket files that killed libp2p daemons leave behind."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path


def sweep_stale_sockets(folder: Path | None = None) -> int:
    """Remove hivemind's socket files of daemons that were killed; returns how many. Live sockets stay."""
    folder = folder or Path(tempfile.gettempdir())
    listening = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    removed = 0
    for path in folder.glob("hivemind-p2p*.sock"):
        if str(path) in listening or _bound(path):
            continue
        try:
            path.unlink()
            removed += 1
        except OSError:
            continue  # another user's, or gone meanwhile
    return removed


def _bound(path: Path) -> bool:
    """Whether a socket is bound there; /proc/net/unix does not show those of other network namespaces (containers).

    A datagram socket cannot connect to a stream socket: if there is one the kernel says so, and it hears nothing.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
