"""The direct listener of one peer: others connect to it with a token that identifies them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from peer.errors import ProtocolError
from peer.protocol.address import parse_host_address
from peer.protocol.wire import DirectEndpoint, EntryMessage, Kind
from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.stream import FrameStream, StreamClosedError, Traffic
from peer.swarm.net.tls import server_side
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.runtime.timing import Timing

log = logging.getLogger(__name__)
MAX_ARRIVING = 64  # unauthenticated connections
MAX_ARRIVING_OF_HOST = 32
MAX_PEERS = 4096  # that hold a token
MAX_HOSTS_OF_PEER = 4
BACKLOG = 64
CONGESTION_CONTROL = b"bbr"  # keeps its sending rate across the idle time between rounds, and after a lost packet
Enter = Callable[[str, EntryMessage, ZeroCopyProtocol], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class DirectListener:
    """Accepts direct connections of authenticated peers; closed until it listens.

    Args:
        enter: (peer id, its entry message, pipe) -> serves the connection.
        spawn: runs a task as long as the peer lives.

    Attributes:
        port: at which others reach it; 0 while it is closed.
    """

    def __init__(self, enter: Enter, spawn: Spawn, timing: Timing) -> None:
        self._enter, self._spawn, self._timing = enter, spawn, timing
        self.port = 0
        self._context, self._fingerprint = server_side()
        self._tokens: BoundedMap[str, str] = BoundedMap(MAX_PEERS)  # by peer id; a token is never replaced, so that
        self._holders: BoundedMap[str, str] = BoundedMap(MAX_PEERS)  # by token, forgets the same peers
        self._hosts: BoundedMap[str, None] = BoundedMap(MAX_PEERS)  # addresses of the peers that know the endpoint
        self._arriving = Admission(MAX_ARRIVING, MAX_ARRIVING_OF_HOST)  # by host

    def listen(self, host_maddrs: Sequence[str], port: int, mapped_port: int = 0) -> None:
        """Accept connections on the hosts of these addresses, at `port`, or any free one if it is 0 or taken.

        Args:
            mapped_port: where others reach `port`; 0: the same port.
        """
        hosts = tuple(dict.fromkeys(parse_host_address(address).host for address in host_maddrs))
        try:
            listeners = _bind(hosts, port)
        except OSError as error:
            log.warning("direct connections: cannot listen on port %d (%s); using any other", port, error.strerror)
            try:
                listeners = _bind(hosts, 0)
            except OSError as trouble:
                log.warning("direct connections: cannot listen at all (%s)", trouble.strerror)
                return
        bound: int = listeners[0].getsockname()[1]
        self.port = mapped_port if mapped_port and bound == port else bound
        for listener in listeners:
            self._spawn(self._listen(listener))

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, (host, *_) = await loop.sock_accept(listener)
                except OSError as error:  # for example, no free descriptor
                    log.warning("direct connections: %s", error)
                    await asyncio.sleep(self._timing.accept_pause_s)
                    continue
                if host in self._hosts and self._arriving.take(host):
                    self._spawn(self._welcome(connection, host))
                else:
                    connection.close()

    async def _welcome(self, connection: socket.socket, host: str) -> None:
        try:
            pipe, remote, entry = await asyncio.wait_for(self._hear(connection), 2 * self._timing.direct_timeout_s)
        except (TimeoutError, ProtocolError, StreamClosedError, OSError) as error:
            log.debug("a direct connection from %s was refused: %s", host, type(error).__name__)  # no token in a log
            connection.close()
            return
        finally:
            self._arriving.release(host)
        await self._enter(remote, entry, pipe)

    async def _hear(self, connection: socket.socket) -> tuple[ZeroCopyProtocol, str, EntryMessage]:
        """Authenticate a connection: (its pipe, the peer id, its entry message)."""
        connection.setblocking(False)
        tune(connection)
        pipe = ZeroCopyProtocol()
        longest_s = self._timing.direct_timeout_s
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: pipe, connection, ssl=self._context, ssl_handshake_timeout=longest_s, ssl_shutdown_timeout=longest_s
        )
        try:
            stream = FrameStream("a direct connection", pipe, Traffic())
            entry = await stream.receive_message(Kind.DIRECT, EntryMessage)
            remote = self._holders.get(entry.token)
            if remote is None:
                raise ProtocolError("an unknown token")
            await stream.send(Kind.DIRECT)
        except BaseException:
            pipe.close()
            raise
        return pipe, remote, entry

    def told_to(self, remote: str, hosts: Sequence[str]) -> DirectEndpoint | None:
        """The endpoint for one peer, with its token; None while the listener is closed.

        Args:
            hosts: addresses of that peer's connections. A connection from any other address costs no handshake.
        """
        if not self.port:
            return None
        for host in hosts[:MAX_HOSTS_OF_PEER]:
            self._hosts[host] = None
        token = self._tokens.get(remote)
        if token is None:
            token = self._tokens[remote] = secrets.token_hex(32)
            self._holders[token] = remote
        return DirectEndpoint(port=self.port, fingerprint=self._fingerprint, token=token)


def _bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listening sockets on the same port of each host; raises OSError where it is taken."""
    made: list[socket.socket] = []
    try:
        for host in hosts:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            made.append(listener)
            if listener.family is socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((host, port))
            listener.listen(BACKLOG)
            port = listener.getsockname()[1]
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return made


def tune(connection: socket.socket) -> None:
    """Set the socket options that both ends need."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(OSError):  # the kernel lacks it, or does not permit it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
