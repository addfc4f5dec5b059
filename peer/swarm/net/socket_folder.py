"""The private folder of the sockets between agents and their libp2p daemons, and what killed daemons leave in it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from pathlib import Path

from peer.errors import UserError
from peer.swarm.runtime.timing import STANDARD

log = logging.getLogger(__name__)
UNIX_SOCKETS = Path("/proc/net/unix")
MAX_PATH_BYTES = 107  # of a socket: the kernel keeps 108, with the zero at the end
NAME_BYTES = len("/p2pclient-0123456789a.sock")
OTHERS = (Path("/tmp"), Path("/var/tmp"))


def open_socket_folder() -> Path:
    """The folder of this user's sockets, made if absent and swept: below TMPDIR, or where that can hold none elsewhere.

    Raises:
        UserError: no temporary folder can hold it: read-only, without sockets, too long a path, another user's.
    """
    wanted = os.environ.get("TMPDIR")
    roots = (Path(wanted).absolute(), *OTHERS) if wanted else OTHERS
    problems: list[str] = []
    for root in roots:
        folder = root / f"atoll-{os.getuid()}"
        problem = _problem_of(folder)
        if problem is None:
            if problems:
                log.warning("%s; the sockets of this node are in %s", problems[0], folder)
            sweep_stale_sockets(folder)
            return folder
        problems.append(problem)
    raise UserError(problems[0], "set TMPDIR to a writable folder of a local file system, with a short path")


def _problem_of(folder: Path) -> str | None:
    """Make the folder and try it; -> why it can hold no sockets, None where it can."""
    size, limit = len(os.fsencode(folder)), MAX_PATH_BYTES - NAME_BYTES
    if size > limit:
        return f"{folder} cannot hold sockets: its path has {size} bytes, the limit is {limit}"
    probe_path = folder / f"try-{os.getpid()}.sock"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            return f"{folder} cannot hold sockets: it is not a folder of this user alone (mode 0700)"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.bind(str(probe_path))
        probe_path.unlink()
    except OSError as error:
        return f"{folder} cannot hold sockets: {error.strerror}"
    return None


def sweep_stale_sockets(folder: Path, min_age_s: float = STANDARD.stale_socket_s) -> int:
    """Remove hivemind's socket files of daemons that were killed; returns how many. Live sockets stay.

    What the kernel lists are the sockets of this network namespace alone, while the folder may be shared with others
    (containers); so a socket that is not listed is asked first, as connecting by path crosses namespaces.
    A daemon that is just starting has bound its socket and does not listen yet: young files stay.
    """
    listening = {line.split()[-1] for line in UNIX_SOCKETS.read_text().splitlines()[1:]}
    removed = 0
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if str(path) not in listening and time.time() - path.stat().st_mtime > min_age_s and not _bound(path):
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
