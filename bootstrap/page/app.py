"""The web application: one page, its files, a JSON API, server-sent events and `/metrics`. It only ever reads."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Part

from bootstrap.page.board import Board
from bootstrap.page.openapi import API, MAX_CREDIT, MAX_POINTS, MAX_ROUNDS, STATUSES, openapi_document
from bootstrap.page.prometheus import render_metrics
from peer.printable import printable

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", "": "text/plain; charset=utf-8",
}  # fmt: skip
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MAX_LISTENERS = 512
SEND_S = 20.0  # for one update to one browser
PING_S = 15.0
MIN_GZIP_BYTES = 512
CACHE_S, MAX_CACHED = 2.0, 64
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"


class Guarded:
    """Adds the same headers to every answer, and gives up browsers that do not read theirs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Part) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in SECURITY.items())]
            async with asyncio.timeout(SEND_S):
                await send(message)

        try:
            await self._app(scope, receive, with_headers)
        except TimeoutError:
            log.debug("a browser does not read its answer")
        except Exception:  # root of a request: a bug in one answer ends no other
            log.exception("a request failed: %s", printable(str(scope.get("path"))))


@dataclass(frozen=True)
class Body:
    """One answer, as it is and compressed; made once for all who ask."""

    plain: bytes
    packed: bytes
    media_type: str
    tag: str

    @classmethod
    def of(cls, plain: bytes, media_type: str) -> Body:
        tag = f'"{hashlib.sha256(plain).hexdigest()[:20]}"'
        return cls(plain, gzip.compress(plain, 6) if len(plain) >= MIN_GZIP_BYTES else plain, media_type, tag)

    def answer(self, request: Request) -> Response:
        """As this browser wants it; without a body if it has it already."""
        headers = {"cache-control": "no-cache", "etag": self.tag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", "") and self.packed is not self.plain:
            return Response(self.packed, headers={**headers, "content-encoding": "gzip"}, media_type=self.media_type)
        return Response(self.plain, headers=headers, media_type=self.media_type)


@dataclass(frozen=True)
class Message:
    """One part of a stream, as it is and compressed; the compressed form refers to nothing before it, so that it is
    made once for all browsers.
    """

    plain: bytes
    packed: bytes

    @classmethod
    def of(cls, plain: bytes) -> Message:
        packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        return cls(plain, packer.compress(plain) + packer.flush(zlib.Z_FULL_FLUSH))


class Page:
    """The routes over one board.

    Attributes:
        listeners: browsers that receive updates now.
    """

    def __init__(self, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._files = {
            f"/{path.relative_to(STATIC).as_posix()}": Body.of(path.read_bytes(), TYPES[path.suffix])
            for path in STATIC.rglob("*")
            if path.is_file()
        }
        self._cached: dict[str, tuple[float, Body]] = {}
        self._making = asyncio.Lock()
        self._update = (-1, Message.of(b""))
        self.listeners = 0
        self.closing = False

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [Route(path, self._file) for path in self._files] + [Route("/", self._file)]
        routes += [
            Route("/api/v1/state", self._json(lambda _: self._board.state())),
            Route("/api/v1/run", self._json(lambda _: self._board.card.document)),
            Route("/api/v1/now", self._json(lambda _: self._board.now())),
            Route("/api/v1/peers", self._json(lambda _: self._board.peers())),
            Route("/api/v1/rounds", self._json(self._rounds)),
            Route("/api/v1/credit", self._json(self._credit)),
            Route("/api/v1/curve", self._json(self._curve)),
            Route("/api/v1/updates", self._updates),
            Route("/openapi.json", self._json(lambda _: openapi_document())),
            Route("/metrics", self._made(lambda _: render_metrics(self._board), METRICS_TYPE)),
        ]
        assert {route.path for route in routes} >= API.keys()
        return Guarded(Starlette(routes=routes, exception_handlers={HTTPException: _problem}))

    async def _file(self, request: Request) -> Response:
        path = request.url.path
        return self._files["/index.html" if path == "/" else path].answer(request)

    def _made(self, make: Callable[[Request], bytes], media_type: str) -> Callable[[Request], Any]:
        """An answer that is made in a thread, one at a time, and once for all who ask until the board looks again."""

        async def answer(request: Request) -> Response:
            known = {parameter["name"] for parameter in API.get(request.url.path, {}).get("parameters", ())}
            if unknown := set(request.query_params) - known:
                raise HTTPException(400, f"unknown parameter {min(unknown)[:40]!r}; known: {sorted(known) or 'none'}")
            key = f"{self._board.version} {request.url.path}?{request.url.query}"
            if (body := self._fresh(key)) is not None:
                return body.answer(request)
            async with self._making:
                if (body := self._fresh(key)) is None:
                    body = await asyncio.to_thread(lambda: Body.of(make(request), media_type))
                    if len(self._cached) < MAX_CACHED:
                        self._cached[key] = self._clock(), body
            return body.answer(request)

        return answer

    def _json(self, document: Callable[[Request], Any]) -> Callable[[Request], Any]:
        return self._made(lambda request: _dump(document(request)), "application/json")

    def _fresh(self, key: str) -> Body | None:
        now = self._clock()
        self._cached = {k: (at, body) for k, (at, body) in self._cached.items() if at + CACHE_S > now}
        return self._cached[key][1] if key in self._cached else None

    def _rounds(self, request: Request) -> list[dict[str, Any]]:
        status = request.query_params.get("status")
        if status not in (None, *STATUSES):
            raise HTTPException(400, f"status must be one of {', '.join(STATUSES)}")
        before = _number(request, "before", None, 1, 2**53)
        limit = _number(request, "limit", 50, 1, MAX_ROUNDS)
        assert limit is not None
        return self._board.rounds(limit, before, status)

    def _credit(self, request: Request) -> list[dict[str, Any]]:
        limit = _number(request, "limit", 50, 1, MAX_CREDIT)
        assert limit is not None
        return self._board.credit(limit)

    def _curve(self, request: Request) -> dict[str, list[Any]]:
        points = _number(request, "points", MAX_POINTS, 2, MAX_POINTS)
        since = _number(request, "since", 0, 0, 2**53)
        assert points is not None
        return self._board.history.curve(points, float(since or 0))

    async def _updates(self, request: Request) -> Response:
        if self.listeners >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} browsers are served already; ask /api/v1/state instead")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "vary": "accept-encoding"}
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if packed:
            headers["content-encoding"] = "gzip"
        return _Updates(self, self._stream(packed), media_type="text/event-stream", headers=headers)

    async def _stream(self, packed: bool) -> AsyncIterator[bytes]:
        """Updates as they come; a browser that missed some sees it by their versions, and reads the state again."""
        if packed:
            yield GZIP_HEADER
        begin, ping = Message.of(b"retry: 3000\n\n"), Message.of(b": ping\n\n")
        yield begin.packed if packed else begin.plain
        sent = self._board.version
        while not self.closing:
            message = ping
            if await self._board.newer_than(sent, PING_S):
                sent, message = self._board.version, self._newest()
            yield message.packed if packed else message.plain

    def _newest(self) -> Message:
        version, message = self._update
        if version != self._board.newest.version:
            message = Message.of(b"event: update\ndata: " + _dump(self._board.newest.document) + b"\n\n")
            self._update = self._board.newest.version, message
        return message


class _Updates(StreamingResponse):
    """A stream that is counted for as long as it is sent."""

    def __init__(self, page: Page, content: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(content, **options)
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._page.listeners += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._page.listeners -= 1


def _number(request: Request, name: str, default: int | None, least: int, most: int) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and least <= int(text) <= most):
        raise HTTPException(400, f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _dump(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


async def _problem(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, HTTPException)
    body = _dump({"error": error.detail})
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")
