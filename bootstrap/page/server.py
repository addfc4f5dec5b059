"""Serves the page from the bootstrap's own event loop: bounded connections, no signal handlers of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bootstrap.page.app import Page
from bootstrap.page.board import Board

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024
MAX_OF_AN_ADDRESS = 128  # loopback, which is a proxy or this machine's user, may have all
REQUEST_S = 10.0  # of silence, twice that after the first request
IDLE_S = 20


class Connections:
    """How many connections there are, from where."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @property
    def admitted(self) -> int:
        return self._of.total()

    def admit(self, address: str) -> bool:
        """Count one more connection, unless there are too many."""
        local = ipaddress.ip_address(address).is_loopback if address else True
        if self.admitted >= MAX_CONNECTIONS or (not local and self._of[address] >= MAX_OF_AN_ADDRESS):
            return False
        self._of[address] += 1
        return True

    def release(self, address: str) -> None:
        self._of[address] -= 1
        if self._of[address] <= 0:
            del self._of[address]


def bounded(connections: Connections) -> type[H11Protocol]:
    """The protocol of a server that has these connections."""

    class BoundedProtocol(H11Protocol):
        """Refuses connections above the limits, and closes those that ask for nothing."""

        _address: str | None = None
        _seen: object = None  # the request at the last look

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            peer = transport.get_extra_info("peername")
            address = str(peer[0]).partition("%")[0] if peer else ""
            if not connections.admit(address):
                transport.abort()
                return
            self._address = address
            super().connection_made(transport)
            self.loop.call_later(REQUEST_S, self._look)

        def _look(self) -> None:
            """Close a connection without a request since the last look, unless an answer is still being sent."""
            if self._address is None:
                return
            if self.transport.is_closing():  # what is not sent by now is not read at the other end
                self.transport.abort()
                return
            if self.cycle is self._seen and (self.cycle is None or self.cycle.response_complete):
                self.transport.abort()
                return
            self._seen = self.cycle
            self.loop.call_later(REQUEST_S, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._address is not None:
                connections.release(self._address)
                super().connection_lost(exc)
                self._address = None

        def data_received(self, data: bytes) -> None:
            if self._address is not None:
                super().data_received(data)

    return BoundedProtocol


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the bootstrap's."""
        yield


class PageServer:
    """The page of one board, from `start` to `close`."""

    def __init__(self, board: Board, listener: socket.socket) -> None:
        self._page, self._listener = Page(board), listener
        settings: dict[str, Any] = {
            "http": bounded(Connections()), "ws": "none", "lifespan": "off", "log_config": None, "access_log": False,
            "server_header": False, "proxy_headers": False, "timeout_keep_alive": IDLE_S,
            "timeout_graceful_shutdown": 1, "h11_max_incomplete_event_size": 8192,
        }  # fmt: skip
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # strangers' nonsense; our own failures are ours
        self._server = _Server(uvicorn.Config(self._page.app(), **settings))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._listener]))

    async def close(self) -> None:
        """End within about a second, whatever browsers are there."""
        self._page.closing = self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
