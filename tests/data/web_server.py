"""A server of files on loopback, which misbehaves as told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.data.loopback import QuietHandler, on_loopback


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


class _Handler(QuietHandler):
    server: Any

    def do_GET(self) -> None:
        web, path = self.server.world, self.path.lstrip("/")
        web.requests.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        if web.answers.get(path):
            self.send(b"", web.answers[path].pop(0))
        elif path in web.redirects:
            self.send(b"", 302, Location=web.redirects[path])
        elif path not in web.files:
            self.send(b"", 404)
        else:
            self._send_file(web, path)

    def _send_file(self, web: WebServer, path: str) -> None:
        data, start = web.files[path], self.first_byte() if web.ranged else None
        headers = {"ETag": web.tag}
        if start is not None:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._breaks = web.breaks.get(path, 0) > 0
        if self._breaks:
            web.breaks[path] -= 1
        self.send(data[start or 0 :], 200 if start is None else 206, **headers)

    def send_body(self, body: bytes) -> None:
        if getattr(self, "_breaks", False):
            body, self.close_connection, self._breaks = body[: len(body) // 2], True, False
        super().send_body(body)


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[WebServer]:
    web = WebServer(dict(files))
    with on_loopback(_Handler, web) as web.url:
        yield web
