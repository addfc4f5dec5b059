"""Servers of HTTP on loopback, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def send(self, body: bytes, code: int, **headers: str) -> None:
        """An answer; `_` in a header's name is a hyphen."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(body)

    def send_body(self, body: bytes) -> None:
        """All of it, or as much as the other side takes."""
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True

    def first_byte(self) -> int | None:
        """Where the wanted range begins; None if all is wanted."""
        wanted = self.headers.get("Range")
        return int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else None

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def on_loopback(handler: type[QuietHandler], world: Any) -> Iterator[str]:
    """-> the URL of a server whose handlers find `world` at `self.server.world`."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.world = True, world
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
