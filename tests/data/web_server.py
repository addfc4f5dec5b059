"""A server of files on loopback, which misbehaves as told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class WebServer:
    """Files by path, and faults.

    Attributes:
        ranged: serves ranges of bytes.
        breaks: path -> how many connections end in the middle of what they send.
        answers: path -> codes for the next requests, first to last.
        redirects: path -> URL.
        tag: of all files; another one says that they changed.
        requests: (path, header Range, header Authorization) of each.
    """

    files: dict[str, bytes]
    url: str = ""
    ranged: bool = True
    breaks: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    tag: str = '"one"'
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def of(self, path: str) -> str:
        return f"{self.url}/{path}"


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[WebServer]:
    server = WebServer(dict(files))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, wanted = self.path.lstrip("/"), self.headers.get("Range")
            server.requests.append((path, wanted, self.headers.get("Authorization")))
            if server.answers.get(path):
                self._empty(server.answers[path].pop(0))
            elif path in server.redirects:
                self._empty(302, server.redirects[path])
            elif path not in server.files:
                self._empty(404)
            else:
                self._send(path, wanted if server.ranged else None)

        def _empty(self, code: int, location: str | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def _send(self, path: str, wanted: str | None) -> None:
            data, start = server.files[path], 0
            if wanted:
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
            body = data[start:]
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", server.tag)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if server.breaks.get(path, 0) > 0:
                server.breaks[path] -= 1
                body = body[: len(body) // 2]
                self.close_connection = True
            try:
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
