"""The libp2p daemon of one host: how it is started, and what its failures mean to a person."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils.logging import use_hivemind_log_handler

from peer.errors import AtollError, UserError
from peer.protocol.identity import Identity
from peer.protocol.records import CLOCK_SKEW_S
from peer.swarm.net.reachability import TRIES_WITH_ROUTER, accepts_connections
from peer.swarm.net.socket_folder import open_socket_folder
from peer.swarm.runtime.timing import STANDARD, Timing

log = logging.getLogger(__name__)
_TIMES = re.compile(r"local time.*\(local: ([\d.]+), peer: ([\d.]+)\)")  # hivemind's words for clocks that differ
MAX_CALL_BYTES = 1 << 19  # of one call of the DHT; hivemind lets each be 4 MiB


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Where a node listens, its initial peers, and its identity.

    Attributes:
        client_mode: it accepts no connection and says so; None: found out at start.
        direct_port: where it accepts direct connections for large transfers, 0: any free port; None: there are none.
        mapped_port: where others reach that port; 0: the same port.
    """

    identity_path: Path
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    nat_port_map: bool = True
    check_identity: bool = True
    client_mode: bool | None = False
    direct_port: int | None = None
    mapped_port: int = 0
    timing: Timing = STANDARD

    @property
    def local_only(self) -> bool:
        return all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in self.host_maddrs)


class RunningTasks(dict[Any, asyncio.Task[Any]]):
    """Tasks until they end. hivemind keeps for ever the task of a call that its caller cancels, or dies in."""

    def __setitem__(self, key: Any, task: asyncio.Task[Any]) -> None:
        super().__setitem__(key, task)
        task.add_done_callback(lambda _: self.pop(key, None))


async def is_client(config: NodeConfig, p2p: Any) -> bool:
    """As the settings say, or else whether those that this host joins through cannot dial it."""
    if config.client_mode is not None:
        return config.client_mode
    if not config.initial_peers or config.announce_maddrs or config.local_only:
        return False

    async def maddrs() -> list[str]:
        return [str(address) for address in await p2p.get_visible_maddrs(latest=True)]

    helpers = [address.rsplit("/", 1)[-1] for address in config.initial_peers]
    tries = TRIES_WITH_ROUTER if config.nat_port_map else 1
    return await accepts_connections(p2p, helpers, maddrs, tries, config.timing) is False


async def start_daemon(config: NodeConfig, identity_path: str | None, client: bool = False) -> Any:
    """The running daemon under this key, or an anonymous one; raises UserError when it does not start.

    Args:
        client: others cannot dial it: it looks for relays among the peers that it knows.
    """
    use_hivemind_log_handler("nowhere")  # but in our log, which is printable and bounded
    P2P._UNIX_SOCKET_PREFIX = f"/unix{open_socket_folder()}/"
    try:
        p2p = await P2P.create(
            initial_peers=list(config.initial_peers),
            host_maddrs=list(config.host_maddrs),
            announce_maddrs=list(config.announce_maddrs) or None,
            identity_path=identity_path,
            check_if_identity_free=False,
            nat_port_map=config.nat_port_map and not config.local_only,
            auto_nat=not config.local_only,
            force_reachability="private" if client else None,
            use_auto_relay=client,
            startup_timeout=config.timing.daemon_start_s,
            idle_timeout=config.timing.daemon_idle_s,
            persistent_conn_max_msg_size=MAX_CALL_BYTES,
        )
    except P2PDaemonError as error:
        if "bootstrap peers" in str(error):
            raise explain_join_failure(error, config.initial_peers) from None
        raise UserError(f"the libp2p daemon did not start: {error}", _remedy_of(str(error))) from None
    p2p._client.control._handler_tasks = RunningTasks()
    return p2p


def _remedy_of(trouble: str) -> str:
    if "listen unix" in trouble:
        return "set TMPDIR to a writable folder of a local file system, with a short path"
    if "listen" in trouble or "address" in trouble or "multiaddr" in trouble:
        return "check --host-maddrs and --announce-maddrs"
    return "set GOLOG_LOG_LEVEL=info to hear more of it; if its program is damaged, install hivemind again"


async def stop_daemon(p2p: Any, timing: Timing) -> None:
    """End the daemon: SIGTERM first, then SIGKILL if it ignores that, as one with QUIC may."""
    try:
        await asyncio.wait_for(p2p.shutdown(), timing.daemon_end_s)
    except TimeoutError:
        log.warning("the libp2p daemon does not end within %g s: it is killed", timing.daemon_end_s)
        with contextlib.suppress(ProcessLookupError):
            p2p._child.kill()
        await p2p._child.wait()


async def refuse_taken_identity(config: NodeConfig, identity: Identity) -> None:
    """Ask the swarm whether this identity is already there (another machine with a copy of the key)."""
    probe_config = NodeConfig(
        identity_path=config.identity_path,
        host_maddrs=("/ip4/127.0.0.1/tcp/0",),
        initial_peers=config.initial_peers,
        nat_port_map=False,
        timing=config.timing,
    )
    probe = await start_daemon(probe_config, None)
    try:
        connecting = probe._client.connect(PeerID.from_base58(identity.peer_id), [])
        await asyncio.wait_for(connecting, config.timing.open_timeout_s)
    except (TimeoutError, P2PDaemonError):
        return
    finally:
        await stop_daemon(probe, config.timing)
    raise UserError(
        f"identity in use: a live peer already has the id {identity.peer_id}",
        f"each peer needs a key of its own: give another --identity-path than {config.identity_path}",
    )


def explain_join_failure(error: Exception, initial_peers: Sequence[str]) -> AtollError:
    """The words for why a host could not join."""
    text = str(error)
    if times := _TIMES.search(text):
        ahead_s = float(times[1]) - float(times[2])
        return UserError(
            f"this machine's clock is {abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the swarm's; "
            f"at most {CLOCK_SKEW_S:g} s are allowed",
            "set it (NTP), then join again",
        )
    if "can't access this node" in text:
        return UserError(
            "the bootstrap cannot connect back to this peer",
            "open a port and listen on it (--host-maddrs /ip4/0.0.0.0/tcp/PORT), and if the public address\n"
            "differs from this machine's own, name it: --announce-maddrs /ip4/PUBLIC_IP/tcp/PORT",
        )
    return UserError(
        f"cannot join: no answer from {', '.join(initial_peers)}",
        "check that the bootstrap is running and the address is complete, or ask the organiser for another one",
    )
