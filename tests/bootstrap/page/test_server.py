"""Where the page listens, and how many connections it bears."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from bootstrap.page import app, server
from bootstrap.page.listening import listen, parse_place, url_of
from bootstrap.page.server import Connections, PageServer
from peer.errors import UserError
from tests.bootstrap.page.boards import Watching

GET = b"GET /api/v1/now HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:81", ("::1", 81)),
        (":8080", ("127.0.0.1", 8080)), ("8080", ("127.0.0.1", 8080)),
    ],
)  # fmt: skip
def test_places(text, place):
    assert parse_place(text) == place


@pytest.mark.parametrize(
    "text", ["", "here", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "example.org:80", "1.2.3.4:-1"]
)
def test_what_is_no_place(text):
    with pytest.raises(UserError, match="no address and port") as caught:
        parse_place(text)
    assert "127.0.0.1:8080" in caught.value.hint


def test_a_port_that_is_taken_is_said_before_anything_starts():
    with contextlib.closing(listen(("127.0.0.1", 0))) as taken:
        host, port = taken.getsockname()
        assert url_of(taken) == f"http://127.0.0.1:{port}/"
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            listen((host, port))


def test_connections_of_one_address_and_of_all_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "MAX_OF_AN_ADDRESS", 3)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)
    connections = Connections()
    assert [connections.admit("203.0.113.9") for _ in range(5)] == [True] * 3 + [False] * 2
    assert [connections.admit("127.0.0.1") for _ in range(4)] == [True] * 3 + [False]
    connections.release("203.0.113.9")
    assert connections.admit("203.0.113.9")


class Served:
    """A page on a free port."""

    def __init__(self, folder):
        self.watching, self.listener = Watching(folder, rounds=1), listen(("127.0.0.1", 0))
        self.server = PageServer(self.watching.board, self.listener)

    async def __aenter__(self):
        self.server.start()
        return self

    async def __aexit__(self, *_):
        async with asyncio.timeout(10.0):
            await self.server.close()

    async def ask(self, request):
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        writer.write(request)
        async with asyncio.timeout(10.0):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        return head, reader, writer


async def test_it_serves_over_a_real_socket_and_names_no_software(tmp_path):
    async with Served(tmp_path) as served:
        head, _, writer = await served.ask(GET)
        assert head.startswith("HTTP/1.1 200 OK\r\n")
        assert "uvicorn" not in head
        writer.close()


async def test_it_ends_at_once_while_browsers_listen(tmp_path):
    async with Served(tmp_path) as served:
        head, reader, _ = await served.ask(b"GET /api/v1/updates HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "text/event-stream" in head
        closing = asyncio.ensure_future(served.server.close())
        async with asyncio.timeout(5.0):
            await closing
            await reader.read()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET])
async def test_a_connection_that_asks_for_nothing_is_closed(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    async with Served(tmp_path) as served:
        reader, writer = await asyncio.open_connection(*served.listener.getsockname())
        writer.write(sent)
        async with asyncio.timeout(5.0):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        assert reader.at_eof() or reader.exception() is not None


async def test_a_head_that_is_too_long_is_refused(tmp_path):
    async with Served(tmp_path) as served:
        head, _, _ = await served.ask(b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000)
        assert head.startswith("HTTP/1.1 400")


async def test_a_browser_that_never_reads_gives_its_place_back(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_S", 0.1)
    monkeypatch.setattr(app, "SEND_S", 0.1)
    monkeypatch.setattr(app, "PING_S", 0.0)
    connections = Connections()
    monkeypatch.setattr(server, "Connections", lambda: connections)
    async with Served(tmp_path) as served:
        monkeypatch.setattr(served.watching.board, "now", lambda: {"x": os.urandom(1 << 18).hex()})
        browser = socket.socket()
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        browser.connect(served.listener.getsockname())
        browser.sendall(b"GET /api/v1/updates HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20.0):
            while not connections.admitted:
                await asyncio.sleep(0.01)
            while connections.admitted:
                await served.watching.look()
                await asyncio.sleep(0.01)
        browser.close()
