"""A file on the web as a binary stream: range requests, and a new connection where one breaks in the middle."""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from peer.data.problems import FileProblem, SourceBusy

TIMEOUT_S = 30.0
RECONNECTS = 3  # without a byte between them
READ_ON_BYTES = 1 << 18  # a seek forward within them reads on; a longer one connects again
_BUSY = {408, 425, 429, 500, 502, 503, 504}


class WebFile(io.RawIOBase):
    """The body at a URL.

    Args:
        headers: sent to that host, and to no other that it redirects to.
        public: read nothing from an address of this machine or of its network, wherever a server redirects to.

    Attributes:
        size: bytes in all; None if the server does not say.
        ranged: the server starts at any byte that is asked for.

    Raises:
        FileProblem: the server has no such file, or it changed while it was read.
        SourceBusy: no connection, or an answer that asks to come back later.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, public: bool = False) -> None:
        self._url, self._headers = url, dict(headers or {})
        self._opener = urllib.request.build_opener(_PublicOnly()) if public else urllib.request.build_opener()
        if public:
            check_public(url)
        self._position = self._at = 0
        self._response: http.client.HTTPResponse | None = None
        self.size: int | None = None
        self.ranged = False
        self._tag: str | None = None
        self._connect()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.ranged and self.size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size or 0}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self.size is not None and self._position >= self.size:
            return 0
        for _ in range(1 + RECONNECTS):
            try:
                self._reach()
                assert self._response is not None
                count = self._response.readinto(buffer)
            except (OSError, http.client.HTTPException):
                count = 0
            if count or self.size is None:
                self._position = self._at = self._position + count
                return count
            self._drop()  # the connection ended before the file did
        raise SourceBusy(f"{self._url}: the connection breaks at byte {self._position} of {self.size}")

    def close(self) -> None:
        self._drop()
        super().close()

    def _reach(self) -> None:
        """Have a response whose next byte is the one at the position."""
        ahead = self._position - self._at
        if self._response is not None and 0 < ahead <= READ_ON_BYTES:
            while ahead > 0 and (skipped := len(self._response.read(ahead))):
                self._at, ahead = self._at + skipped, ahead - skipped
        if self._response is None or self._at != self._position:
            self._drop()
            self._connect()

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _connect(self) -> None:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._position}-"})
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)
        try:
            response = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            what = f"{self._url}: {error.code} {error.reason}"
            raise SourceBusy(what) if error.code in _BUSY else FileProblem(what) from None
        except (OSError, http.client.HTTPException) as error:
            raise SourceBusy(f"{self._url}: {getattr(error, 'reason', error)}") from None
        self.ranged = response.status == 206
        if self._position and not self.ranged:
            response.close()
            raise FileProblem(f"{self._url}: the server sends files from their first byte only")
        self._note(response)
        self._response, self._at = response, self._position

    def _note(self, response: http.client.HTTPResponse) -> None:
        length = response.headers.get("Content-Length")
        size = self._position + int(length) if length and length.isdecimal() else None
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if self._tag not in (None, tag) or (self.size is not None and size != self.size):
            response.close()
            raise FileProblem(f"{self._url}: the file changed while it was read")
        self.size, self._tag = size, tag


class _PublicOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> urllib.request.Request | None:
        check_public(arguments[-1])
        return super().redirect_request(*arguments)


def check_public(url: str) -> None:
    """Raise FileProblem where `is_public` says no."""
    if not is_public(url):
        raise FileProblem(f"it leads to {url}, which is an address of this machine or of its network")


def is_public(url: str) -> bool:
    """Whether every address of a URL's host is one of the internet, as opposed to this machine or its network.

    Raises:
        SourceBusy: the name cannot be resolved.
    """
    parts = urllib.parse.urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SourceBusy(f"{url}: {error}") from None
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_global for address in found)
