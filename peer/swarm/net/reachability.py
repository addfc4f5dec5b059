"""Whether others can open connections to this machine: peers probe it at start, before others rely on it.

libp2p's connections carry streams both ways, so a machine that can only dial out runs as a client: it dials the peers
that accept connections, and they open their streams over those connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer.errors import ProtocolError, UserError, in_words
from peer.protocol.address import parse_host_address
from peer.protocol.wire import Kind, ReachMessage, ReachRequest
from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.stream import FrameStream, StreamClosedError, Traffic
from peer.swarm.runtime.timing import Timing

log = logging.getLogger(__name__)
REACH_NAME = "atoll/reach"
GREETING = b"/multistream/1.0.0\n"  # the first bytes of a libp2p host on a new connection
MAX_PORTS = 4
ASKED_AT_MOST = 3
DIALS_AT_ONCE = 8
TRIES_WITH_ROUTER = 3  # a router that forwards ports on request takes a few seconds
TRIES_UNANSWERED = 2


def tcp_ports(maddrs: Sequence[str]) -> tuple[int, ...]:
    """The TCP ports of these addresses, at most MAX_PORTS."""
    ports = []
    for text in maddrs:
        with contextlib.suppress(UserError):
            address = parse_host_address(text.split("/p2p/", 1)[0])
            if address.transport == "tcp":
                ports.append(address.port)
    return tuple(dict.fromkeys(ports))[:MAX_PORTS]


class DialBackServer:
    """Probes, for a peer that asks, whether a new connection to the address at which it is seen succeeds.

    Only the address of the requester's own connection is dialled, so the server cannot be directed to a third party.
    """

    def __init__(self, p2p: Any, timing: Timing) -> None:
        self._p2p, self._timing = p2p, timing
        self._dialling = asyncio.Semaphore(DIALS_AT_ONCE)

    async def answer(self, stream: FrameStream) -> None:
        """Answer one request on one stream."""
        request = await stream.receive_message(Kind.REACH, ReachRequest, self._timing.dial_back_answer_s)
        seen = await seen_at(self._p2p, stream.remote, self._timing)
        reached = False
        for host in seen[:MAX_PORTS]:
            for port in request.ports:
                async with self._dialling:
                    reached = reached or await greets(host, port, self._timing)
        await stream.send_message(Kind.REACH, ReachMessage(reached=reached, tried=bool(seen)))


async def accepts_connections(
    p2p: Any, helpers: Sequence[str], ports: Callable[[], Any], tries: int, timing: Timing
) -> bool | None:
    """Ask peers to dial this machine; None if none of them could tell.

    Args:
        helpers: peer ids that this host can reach.
        ports: awaitable: the ports to try, read before each try.
        tries: how often to repeat a negative answer; without any answer, at least twice.
    """
    answer: bool | None = None
    for attempt in range(max(tries, TRIES_UNANSWERED)):
        if attempt:
            await asyncio.sleep(timing.dial_back_pause_s)
        request = ReachRequest(ports=tcp_ports(await ports()))
        if not request.ports:
            return None
        asked = [_ask(p2p, helper, request, timing) for helper in helpers[:ASKED_AT_MOST]]
        said = [one for one in await asyncio.gather(*asked) if one is not None]
        answer = any(said) if said else None
        if answer or (answer is False and attempt + 1 >= tries):
            break
    return answer


async def _ask(p2p: Any, helper: str, request: ReachRequest, timing: Timing) -> bool | None:
    stream: FrameStream | None = None
    try:
        _, reader, writer = await asyncio.wait_for(
            p2p.call_binary_stream_handler(PeerID.from_base58(helper), REACH_NAME), timing.dial_back_answer_s
        )
        stream = FrameStream(helper, ZeroCopyProtocol.adopt(reader, writer), Traffic())
        await stream.send_message(Kind.REACH, request)
        longest_s = timing.dial_back_answer_s + MAX_PORTS**2 * timing.dial_timeout_s
        message = await stream.receive_message(Kind.REACH, ReachMessage, longest_s)
        return message.reached if message.tried else None
    except (TimeoutError, P2PDaemonError, StreamClosedError, ProtocolError, OSError, EOFError) as error:
        log.info("%s did not report whether it can reach this machine: %s", helper, in_words(error))
        return None
    finally:
        if stream is not None:
            stream.close()


async def greets(host: str, port: int, timing: Timing) -> bool:
    """Whether a libp2p host answers there."""
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timing.dial_timeout_s)
        said = await asyncio.wait_for(reader.readexactly(1 + len(GREETING)), timing.dial_timeout_s)
        return said[1:] == GREETING
    except (TimeoutError, OSError, EOFError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def seen_at(p2p: Any, peer_id: str, timing: Timing) -> list[str]:
    """The addresses that a connected peer's connections come from."""
    found = []
    for info in await asyncio.wait_for(p2p.list_peers(), timing.dial_back_answer_s):
        if str(info.peer_id) == peer_id:
            found += [host for address in info.addrs if (host := _host(address)) is not None]
    return list(dict.fromkeys(found))


def _host(address: Multiaddr) -> str | None:
    text = str(address)
    return text.split("/")[2] if text.startswith(("/ip4/", "/ip6/")) and "/p2p-circuit" not in text else None
