"""Checks before a peer or bootstrap starts, so that what a person can mend is said at once and in their words."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peer.errors import UserError
from peer.protocol.address import HostAddress, PeerAddress, parse_host_address
from peer.system.file_lock import FileLock, lock_file
from peer.system.output_files import check_output_folder, make_folder

Connect = Callable[[PeerAddress, float], "str | None"]

RETRY_PAUSE_S = 1.0
MAX_PROBES_AT_ONCE = 16
SHARED_LOCKS = 8  # more than hivemind makes; each takes a page


def check_output_dir(path: Path, setting: str = "output_dir") -> None:
    """Create the folder if needed, and write to it; `setting` names it in messages.

    Raises:
        UserError: it is a file, or cannot be created or written to.
    """
    remedy = f"Choose another folder with --{setting.replace('_', '-')}."
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"{setting}={path}: is a file, not a folder", remedy)
        check_output_folder(path)
        make_folder(path)
    except OSError as error:
        raise UserError(f"{setting}={path}: cannot be written to: {_reason(error)}", remedy) from None


def check_resumable(path: Path) -> None:
    """Check that a checkpoint folder that was named is there; what is in it is verified when it is read.

    Raises:
        UserError: no such folder.
    """
    if not os.path.isdir(path):  # false, too, for a name that no system takes
        raise UserError(
            f"resume_from_checkpoint={path}: no such folder",
            "Name a folder checkpoint-<step>, or give --resume-from-checkpoint alone for the newest one.",
        )


def check_shared_memory() -> None:
    """Check that processes can share locks: hivemind makes some while it is imported, and they lie in /dev/shm.

    Raises:
        UserError: /dev/shm is missing, full or read-only.
    """
    try:
        [multiprocessing.Lock() for _ in range(SHARED_LOCKS)]
    except OSError as error:
        raise UserError(
            f"shared memory (/dev/shm) cannot be used: {_reason(error)}",
            "Mount a writable tmpfs of some MiB there with space left: docker run --shm-size 64m, or\n"
            "mount -t tmpfs -o size=64m tmpfs /dev/shm",
        ) from None


def check_host_ports(host_maddrs: Sequence[str]) -> None:
    """Check that every listening address belongs to this machine and that its port is free.

    The libp2p daemon binds with SO_REUSEPORT: on a port that another daemon uses it would start without a word, and
    each of the two would get some of the connections. This check does not share ports.

    Raises:
        UserError: malformed, foreign, privileged or in use; all addresses are tried first.
    """
    problems = [problem for text in host_maddrs if (problem := _listen_problem(parse_host_address(text)))]
    if problems:
        raise _cannot_listen(problems)


def check_reachable(
    addresses: Sequence[PeerAddress],
    *,
    attempts: int = 3,
    timeout_s: float = 5.0,
    connect: Connect | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> list[PeerAddress]:
    """Probe every TCP address, all at the same time; QUIC addresses are taken on trust.

    Args:
        addresses: at least one; one good address is enough to join.
        attempts: tries for each address.
        timeout_s: seconds that one try may take.
        connect: tries one address within some seconds; returns what is wrong, or None. Tests give their own.
        pause: called between tries with RETRY_PAUSE_S, since a refused connection costs no time.

    Returns:
        The addresses worth dialling, in the order given.

    Raises:
        UserError: no address answers.
    """
    assert addresses
    assert attempts >= 1
    probe = connect or _tcp_connect

    def problem_of(address: PeerAddress) -> str | None:
        problem = None
        for attempt in range(attempts if address.transport == "tcp" else 0):
            if attempt:
                pause(RETRY_PAUSE_S)
            problem = probe(address, timeout_s)
            if problem is None:
                break
        return problem

    with ThreadPoolExecutor(max_workers=min(len(addresses), MAX_PROBES_AT_ONCE)) as pool:
        problems = list(pool.map(problem_of, addresses))
    good = [address for address, problem in zip(addresses, problems, strict=True) if problem is None]
    if not good:
        raise _unreachable(addresses, [problem or "" for problem in problems], attempts, timeout_s)
    return good


def lock_identity(path: Path) -> FileLock:
    """Hold the identity whose key is, or will be, at `path`, so that no second process runs under it.

    The lock is a file of its own beside the key (`<path>.lock`), so that the key can be created exclusively later.

    Raises:
        UserError: another process holds it, or the folder cannot be written to.
    """
    def in_use(holder: str) -> UserError:
        return UserError(
            f"identity in use: {path} belongs to process {holder}, which is still running",
            "One identity runs once at a time: stop the other, or start this one with its own --output-dir.",
        )

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock_file(path.with_name(path.name + ".lock"), in_use)
    except OSError as error:
        what = f"identity_path={path}: cannot be locked: {_reason(error)}"
        raise UserError(what, "Choose a folder that you can write to.") from None


def _cannot_listen(problems: list[str]) -> UserError:
    others = [f"nor on {problem}" for problem in problems[1:]]
    remedy = "Choose another address with --host-maddrs; /ip4/0.0.0.0/tcp/0 takes any free port."
    return UserError(f"cannot listen on {problems[0]}", "\n".join([*others, remedy]))


def _listen_problem(address: HostAddress) -> str | None:
    if address.host_kind not in ("ip4", "ip6"):
        return f"{address}: a listening address needs /ip4 or /ip6"
    family = socket.AF_INET6 if address.host_kind == "ip6" else socket.AF_INET
    kind = socket.SOCK_STREAM if address.transport == "tcp" else socket.SOCK_DGRAM
    try:
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                # Without it, connections of a peer that has just stopped (TIME_WAIT) look like a port in use.
                # It does not share a port that another process listens on; for UDP it would, so there it stays off.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: f"port {address.port} is in use by another program",
            errno.EADDRNOTAVAIL: f"{address.host} is not an address of this machine",
            errno.EACCES: f"port {address.port} needs administrator rights; use one above 1023",
        }
        return f"{address}: {reasons.get(error.errno or 0, _reason(error))}"
    return None


def _tcp_connect(address: PeerAddress, timeout_s: float) -> str | None:
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s):
            return None
    except socket.gaierror:
        return f"the name {address.host} is not known here"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return _reason(error).lower()


def _unreachable(addresses: Sequence[PeerAddress], problems: list[str], attempts: int, timeout_s: float) -> UserError:
    """The message for one or for many addresses, each with what happened to it."""
    tries = f"(tried {attempts} times)" if attempts > 1 else "(tried once)"
    remedy = "Check that the port is open on that host, or ask the organiser for another bootstrap."
    if len(addresses) > 1:
        lines = [f"{address}: {problem}" for address, problem in zip(addresses, problems, strict=True)]
        return UserError(f"cannot join: none of {len(addresses)} addresses answers", "\n".join([*lines, remedy, tries]))
    address, problem = addresses[0], problems[0]
    if problem == "no answer":
        what = f"no answer from {address} within {attempts * timeout_s:g} s"
        return UserError(f"cannot join: {what}", f"The address answers no TCP connection. {remedy}\n{tries}")
    return UserError(f"cannot join: {address}: {problem}", f"{remedy}\n{tries}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
