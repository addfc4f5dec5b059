"""Direct connections between two agents for large transfers: TLS over TCP, one connection per stream.

libp2p's daemon discovers and authenticates peers and reaches those that nothing else reaches, but every byte passes
three sockets and two more processes in it, and a stream's window is too small for a distant line. So a peer requests
the *endpoint* of the other over libp2p (port, digest of a certificate, token) and connects there; the token
authenticates the caller, the certificate the listener. If the listener is unreachable, the other peer is asked to dial
back; if neither is reachable, the stream goes through libp2p.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from hivemind.p2p import P2PDaemonError, PeerID

from peer.errors import ProtocolError, in_words
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, DirectEndpoint, DirectMessage, DirectRequest, EntryMessage, Kind
from peer.swarm.net.direct_listener import MAX_PEERS, DirectListener, tune
from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.reachability import seen_at
from peer.swarm.net.stream import FrameStream, StreamClosedError, Traffic
from peer.swarm.net.tls import client_side, shows
from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.runtime.tasks import cancel_and_wait, log_failure
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock, boot_clock

log = logging.getLogger(__name__)
DIRECT_NAME = "atoll/direct"
MAX_HOSTS = 2
FAILURES = (P2PDaemonError, StreamClosedError, ProtocolError, OSError, asyncio.TimeoutError, EOFError)
Accept = Callable[[str, str, ZeroCopyProtocol], Coroutine[Any, Any, None]]


class DirectTransport:
    """Streams that bypass libp2p, through this peer's direct listener or another peer's.

    Args:
        accept: (peer id, stream name, pipe) -> serves a stream that another peer has opened.

    Attributes:
        listener: this peer's direct listener, closed until it listens.
    """

    def __init__(self, p2p: Any, accept: Accept, timing: Timing, clock: Clock = boot_clock) -> None:
        self._p2p, self._accept, self._timing, self._clock = p2p, accept, timing, clock
        self.listener = DirectListener(self._enter, self._spawn, timing)
        self._client = client_side()
        self._endpoints: BoundedMap[str, DirectEndpoint] = BoundedMap(MAX_PEERS)
        self._shut: BoundedMap[str, tuple[float, float]] = BoundedMap(MAX_PEERS)  # until when, and for how long
        self._awaited: dict[str, tuple[str, asyncio.Future[ZeroCopyProtocol]]] = {}  # by ticket
        self._tasks: set[asyncio.Task[None]] = set()

    async def _enter(self, remote: str, entry: EntryMessage, pipe: ZeroCopyProtocol) -> None:
        """Serve a peer that connected to this listener: to open a stream, or because it was asked to dial back."""
        if entry.ticket is None:
            await self._accept(remote, entry.name, pipe)
            return
        awaited, future = self._awaited.get(entry.ticket, ("", None))
        if future is None or awaited != remote or future.done():
            log.debug("%s connected with an unknown or used ticket", remote)
            pipe.close()
        else:
            future.set_result(pipe)

    # -- the listeners of others -------------------------------------------------------------------------------------

    async def open(self, remote: str, name: str) -> ZeroCopyProtocol | None:
        """A direct connection for a stream of this name; None if only libp2p reaches the peer."""
        until, seconds = self._shut.get(remote, (0.0, 0.0))
        if until > self._clock():
            return None
        try:
            pipe = await self._go(remote, name) or await self._let_come(remote, name)
        except TimeoutError:
            pipe = None
        except FAILURES as error:
            log.debug("no direct connection to %s: %s", remote, type(error).__name__)  # the message may hold a token
            return None  # the peer is gone, as the caller will learn through libp2p
        if pipe is None:
            log.info("no direct connection to %s; large transfers use libp2p", remote)
            seconds = min(2.0 * seconds, self._timing.direct_longest_shut_s) or self._timing.direct_shut_s
            self._shut[remote] = self._clock() + seconds, seconds
        else:
            self._shut.pop(remote, None)
        return pipe

    async def _go(self, remote: str, name: str) -> ZeroCopyProtocol | None:
        """Connect to the other's listener: the endpoint that is known, or, if it has changed, the new one."""
        known = self._endpoints.pop(remote, None)
        for endpoint in (known, None):
            asked = endpoint or (await self._ask(remote, DirectRequest())).endpoint
            if asked is None or (endpoint is None and asked == known):
                return None
            with contextlib.suppress(OSError, asyncio.TimeoutError, EOFError, StreamClosedError):
                pipe = await self._through(remote, asked, EntryMessage(token=asked.token, name=name))
                self._endpoints[remote] = asked
                return pipe
        return None

    async def _let_come(self, remote: str, name: str) -> ZeroCopyProtocol | None:
        """Ask the other peer to dial back to this listener, when its own is unreachable."""
        endpoint = self.listener.told_to(remote, await seen_at(self._p2p, remote, self._timing))
        if endpoint is None:
            return None
        ticket = secrets.token_hex(32)
        future: asyncio.Future[ZeroCopyProtocol] = asyncio.get_running_loop().create_future()
        self._awaited[ticket] = remote, future
        pipe: ZeroCopyProtocol | None = None
        try:
            if (await self._ask(remote, DirectRequest(endpoint=endpoint, name=name, ticket=ticket))).came:
                await asyncio.wait({future}, timeout=self._timing.direct_timeout_s)
                pipe = future.result() if future.done() else None
            return pipe
        finally:
            del self._awaited[ticket]
            if pipe is None and future.done():  # it connected and reports that it could not
                future.result().close()

    async def _through(self, remote: str, endpoint: DirectEndpoint, entry: EntryMessage) -> ZeroCopyProtocol:
        """Connect to a listener, at the address that the other's libp2p connection comes from and no other."""
        loop = asyncio.get_running_loop()
        trouble: Exception = OSError("it is connected through a relay only")
        for host in (await seen_at(self._p2p, remote, self._timing))[:MAX_HOSTS]:
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            try:
                connection.setblocking(False)
                async with asyncio.timeout(self._timing.direct_connect_s):
                    await loop.sock_connect(connection, (host, endpoint.port))
            except (TimeoutError, OSError) as error:
                trouble = error
                connection.close()
                continue
            try:  # from here on a transport owns the socket: closed under it, its number would go to the next stream
                async with asyncio.timeout(self._timing.direct_greet_s):
                    return await self._greet(remote, connection, host, endpoint, entry)
            except (TimeoutError, OSError, EOFError, StreamClosedError) as error:
                trouble = error
        raise trouble

    async def _greet(
        self, remote: str, connection: socket.socket, host: str, endpoint: DirectEndpoint, entry: EntryMessage
    ) -> ZeroCopyProtocol:
        tune(connection)
        pipe = ZeroCopyProtocol()
        longest_s = self._timing.direct_timeout_s
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: pipe, sock=connection, ssl=self._client, server_hostname=host, ssl_handshake_timeout=longest_s,
            ssl_shutdown_timeout=longest_s,
        )  # fmt: skip
        try:
            if not shows(transport, endpoint.fingerprint):
                raise ConnectionRefusedError(f"the certificate is not the one that {remote} announced")
            stream = FrameStream(remote, pipe, Traffic())
            await stream.send_message(Kind.DIRECT, entry)
            await stream.receive({Kind.DIRECT: 0})
        except BaseException:
            pipe.close()
            raise
        return pipe

    # -- over libp2p -------------------------------------------------------------------------------------------------

    async def _ask(self, remote: str, request: DirectRequest) -> DirectMessage:
        call = self._p2p.call_binary_stream_handler(PeerID.from_base58(remote), DIRECT_NAME)
        _, reader, writer = await asyncio.wait_for(call, self._timing.direct_timeout_s)
        stream = FrameStream(remote, ZeroCopyProtocol.adopt(reader, writer), Traffic())
        try:
            await stream.send_message(Kind.DIRECT, request)
            return await stream.receive_message(Kind.DIRECT, DirectMessage, 2 * self._timing.direct_timeout_s)
        finally:
            stream.close()

    async def answer(self, stream: FrameStream) -> None:
        """Answer one request of another peer: for this endpoint, or to dial back to its own."""
        _, body = await stream.receive({Kind.DIRECT: MAX_MESSAGE_BYTES}, timeout_s=self._timing.direct_timeout_s)
        try:
            request = parse_json(DirectRequest, body)
        except ProtocolError:
            raise ProtocolError("a malformed DirectRequest") from None  # it may hold a token, which must not be logged
        if request.endpoint is None or request.ticket is None:
            endpoint = self.listener.told_to(stream.remote, await seen_at(self._p2p, stream.remote, self._timing))
            await stream.send_message(Kind.DIRECT, DirectMessage(endpoint=endpoint))
            return
        entry = EntryMessage(token=request.endpoint.token, ticket=request.ticket)
        try:
            pipe = await self._through(stream.remote, request.endpoint, entry)
        except (TimeoutError, OSError, EOFError, StreamClosedError) as error:
            log.debug("cannot dial back to %s: %s", stream.remote, in_words(error))
            await stream.send_message(Kind.DIRECT, DirectMessage())
            return
        self._spawn(self._accept(stream.remote, request.name, pipe))
        await stream.send_message(Kind.DIRECT, DirectMessage(came=True))

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)

    async def close(self) -> None:
        """Close the listener and the streams that came through it."""
        await cancel_and_wait(tuple(self._tasks))
