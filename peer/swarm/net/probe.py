"""What this node sees of its way to the swarm: clocks, latency, reachability, bandwidth; one finding each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from peer.protocol.records import CLOCK_SKEW_S
from peer.swarm.net.node import Node
from peer.swarm.net.reachability import accepts_connections, tcp_ports
from peer.swarm.net.speed import SPEED_NAME, LineSpeed, measure_speed
from peer.swarm.net.stream import StreamClosedError
from peer.system.finding import Finding

log = logging.getLogger(__name__)
PINGS = 5
SLOW_RTT_MS = 500.0
SLOW_MBIT = 2.0
CLIENT_ADVICE = (
    "Open a TCP port and give it with --host-maddrs /ip4/0.0.0.0/tcp/PORT, and if the public address is another one, "
    "that with --announce-maddrs. Without it the peer runs as a client: it trains, and two clients need a relay."
)


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Seconds of the shortest round trip, and how far this machine's clock is ahead of the other one's."""

    rtt_s: float
    ahead_s: float


async def examine(node: Node) -> list[Finding]:
    """All findings, of the first introducer that answers; a node without one has none."""
    for peer_id in node.introducers:
        pinged = await ping(node, peer_id)
        if pinged is not None:
            speed = await line_speed(node, peer_id, pinged.rtt_s)
            return [clock_finding(pinged), latency_finding(pinged), await reach_finding(node), speed_finding(speed)]
    return [Finding(check="latency", level="warn", text="the swarm answers no ping", advice="Try again later.")]


async def tell_warnings(node: Node, tell: Callable[[str], None]) -> None:
    """Tell a peer's person what `atoll doctor` would warn of; that it is a client the trainer says itself."""
    for finding in await examine(node):
        log.info("%s: %s: %s", finding.check, finding.level, finding.in_words)
        if finding.level != "pass" and not (finding.check == "reachable" and node.client):
            tell(finding.in_words)


async def ping(node: Node, peer_id: str) -> Ping | None:
    """Ask a peer for its time; None if it does not answer."""
    protocol = node.dht.protocol
    request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
    best: Ping | None = None
    for _ in range(PINGS):
        began, wall = time.monotonic(), time.time()
        try:
            answer = await asyncio.wait_for(
                protocol.get_stub(PeerID.from_base58(peer_id)).rpc_ping(request), node.timing.dht_timeout_s
            )
        except Exception:  # a stranger chooses what its answer raises: its own error, or broken bytes
            return best
        rtt_s = time.monotonic() - began
        if best is None or rtt_s < best.rtt_s:
            best = Ping(rtt_s=rtt_s, ahead_s=wall + rtt_s / 2 - answer.dht_time)
    return best


async def line_speed(node: Node, peer_id: str, rtt_s: float) -> LineSpeed | None:
    """Measure the line to a peer; None if it has no time for that."""
    try:
        stream = await node.open(peer_id, SPEED_NAME, "speed", bulk=True)
    except StreamClosedError:
        return None
    try:
        return await measure_speed(stream, rtt_s, node.timing, node.clock)
    finally:
        stream.close()


def clock_finding(pinged: Ping) -> Finding:
    """Records expire by the clock: a machine that is too far off is refused, and a drift is reported before that."""
    ahead = pinged.ahead_s
    text = f"this machine's clock is {abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's"
    if abs(ahead) <= CLOCK_SKEW_S / 3:
        return Finding(check="clock", level="pass", text=text)
    return Finding(
        check="clock", level="fail" if abs(ahead) > CLOCK_SKEW_S else "warn",
        text=f"{text}; at most {CLOCK_SKEW_S:g} s are allowed", advice="Set it, by NTP: timedatectl set-ntp true",
    )  # fmt: skip


def latency_finding(pinged: Ping) -> Finding:
    """A far swarm costs each round some round trips."""
    text = f"{1e3 * pinged.rtt_s:.1f} ms to the swarm and back"
    if 1e3 * pinged.rtt_s <= SLOW_RTT_MS:
        return Finding(check="latency", level="pass", text=text)
    return Finding(check="latency", level="warn", text=text, advice="Choose a machine nearer to the others.")


async def reach_finding(node: Node) -> Finding:
    """Whether others can open connections to this machine, and at which ports."""
    if node.client:
        text = "no other peer can open a connection to this machine"
        return Finding(check="reachable", level="warn", text=text, advice=CLIENT_ADVICE)

    async def maddrs() -> tuple[str, ...]:
        return node.maddrs

    reached = await accepts_connections(node.p2p, node.introducers, maddrs, 1, node.timing)
    ports = ", ".join(map(str, tcp_ports(node.maddrs)))
    if reached is False:
        text = f"no answer at TCP port {ports} from outside, though it is announced"
        return Finding(check="reachable", level="warn", text=text, advice=CLIENT_ADVICE)
    if reached is None:
        return Finding(check="reachable", level="pass", text=f"TCP port {ports}, which no other peer could try")
    return Finding(check="reachable", level="pass", text=f"others reach this machine at TCP port {ports}")


def speed_finding(speed: LineSpeed | None) -> Finding:
    """The line's speed; a slow one trains as well, with a recipe that sends little."""
    if speed is None:
        return Finding(check="bandwidth", level="pass", text="not measured: the other end has no time for it now")
    text = f"{speed.up / 1e6:,.1f} Mbit/s up, {speed.down / 1e6:,.1f} Mbit/s down"
    if min(speed.up, speed.down) >= SLOW_MBIT * 1e6:
        return Finding(check="bandwidth", level="pass", text=text)
    advice = "A wire instead of radio; see 'atoll plan' for what a recipe needs."
    return Finding(check="bandwidth", level="warn", text=f"{text}: a slow line", advice=advice)
