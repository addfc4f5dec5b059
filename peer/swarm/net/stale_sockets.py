"""Socket files that killed libp2p daemons leave behind."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from pathlib import Path

UNIX_SOCKETS = Path("/proc/net/unix")
MIN_AGE_S = 60.0  # a daemon that is just starting has bound its socket and does not listen yet


def sweep_stale_sockets(folder: Path | None = None) -> int:
    """Remove hivemind's socket files of daemons that were killed; returns how many. Live sockets stay.

    What the kernel lists are the sockets of this network namespace alone, while the folder may be shared with others
    (containers); so a socket that is not listed is probed first, as connecting by path crosses namespaces.
    """
    folder = folder or Path(tempfile.gettempdir())
    listening = {line.split()[-1] for line in UNIX_SOCKETS.read_text().splitlines()[1:]}
    removed = 0
    for path in folder.glob("hivemind-p2p*.sock"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if str(path) not in listening and time.time() - path.stat().st_mtime > MIN_AGE_S and not _bound(path):
                path.unlink()
                removed += 1
    return removed


def _bound(path: Path) -> bool:
    """Whether a socket is bound there.

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
