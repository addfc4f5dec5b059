"""The bytes of one stream, received straight into the memory where they are wanted.

asyncio's StreamReader copies every byte three times on its way (into a buffer, out of it, into the caller's); at the
rates of an exchange that is most of an agent's processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

STAGING_BYTES = 64 * 1024
DIRECT_BYTES = 16 * 1024  # shorter reads come out of the staging buffer: headers, messages


class _Gone(asyncio.Transport):
    """In place of the transport of a connection that is lost.

    It and the pipe would hold each other, with 400 kB of TLS buffers, until the garbage collector came: seldom, since
    these are few objects. Each reader gets an error of its own: a shared one would keep their frames alive.
    """

    def close(self) -> None:
        """It is."""

    def is_closing(self) -> bool:
        return True

    def is_reading(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """It does not read."""


_GONE = _Gone()


class ZeroCopyProtocol(asyncio.BufferedProtocol):
    """One connected socket: exact reads, writes with back-pressure.

    One reader and one writer at a time. Without a pending read, at most STAGING_BYTES are taken from the socket.

    Args:
        transport: of the connected socket; use `adopt` for one that asyncio's streams have opened. None: the pipe is
            what a connection is made with, which tells it.
        pending: bytes that have been taken from the socket already.
    """

    _transport: asyncio.Transport

    def __init__(self, transport: asyncio.Transport | None = None, pending: bytes = b"", ended: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._direct = False
        if transport is not None:
            self.connection_made(transport)
        self._staging = bytearray(max(STAGING_BYTES, len(pending)))
        self._staging[: len(pending)] = pending
        self._first, self._last = 0, len(pending)
        self._target: memoryview | None = None
        self._filled = 0
        self._arrived: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = False
        self._ended = ended
        self._lost: str | None = None
        self._closed = False
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def adopt(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ZeroCopyProtocol:
        """Take over the socket of a stream pair, with what its reader holds; the pair must not be used any more."""
        transport: Any = writer.transport
        if transport.is_reading():  # uvloop fixes where bytes go when it starts to read
            transport.pause_reading()
        # of a connection that is lost already no transport tells a new protocol
        ended = bool(reader._eof or reader.exception() or transport.is_closing())  # type: ignore[attr-defined]
        pipe = cls(transport, bytes(reader._buffer), ended)  # type: ignore[attr-defined]
        pipe._writer = writer  # some versions of Python close the socket of a writer that is forgotten
        transport.set_protocol(pipe)
        if not pipe._ended and pipe._last < len(pipe._staging):
            pipe._resume()
        return pipe

    @property
    def direct(self) -> bool:
        """It is a connection of its own (TLS), not a stream that libp2p's daemon carries."""
        return self._direct

    async def read_into(self, out: memoryview) -> None:
        """Fill `out`.

        Raises:
            EOFError: the other end has closed before.
            OSError: the connection broke.
        """
        assert self._arrived is None, "one reader at a time"
        done = self._from_staging(out)
        if done == len(out):
            return
        try:
            if len(out) - done >= DIRECT_BYTES:
                self._target, self._filled = out[done:], 0
                while self._filled < len(self._target):
                    await self._more(f"{done + self._filled} of {len(out)} bytes")
            else:
                while done < len(out):
                    await self._more(f"{done} of {len(out)} bytes")
                    done += self._from_staging(out[done:])
        finally:
            self._target = None

    async def read_some(self) -> bool:
        """Wait for a byte, and take it; False at the end of the stream. Raises OSError when the connection broke."""
        try:
            await self.read_into(memoryview(bytearray(1)))
        except EOFError:
            return False
        return True

    async def ended(self) -> None:
        """Drop all input, until the other end closes. Raises OSError when the connection broke."""
        with contextlib.suppress(EOFError):
            while True:
                self._first = self._last
                await self._more("all that was wanted")

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        """Queue bytes, of several buffers in one go; see `drain`."""
        if self._lost is not None:
            raise ConnectionResetError(self._lost)
        transport = self._transport
        if self._closed or transport.is_closing():  # its socket may be gone before `connection_lost` says so
            raise ConnectionResetError("the stream is closed")
        transport.writelines(buffers)
        # asks for `pause_writing`, which writelines of Python 3.12.0 to 3.13.1 forgets (CVE-2024-12254)
        transport.set_write_buffer_limits()

    async def drain(self) -> None:
        """Wait until the socket takes more. Raises OSError when the connection broke."""
        if self._lost is not None:
            raise ConnectionResetError(self._lost)
        if self._write_paused:
            assert self._writable is None, "one writer at a time"
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None

    def close(self) -> None:
        """Close both directions."""
        self._closed = True
        self._transport.close()

    # -- asyncio's side ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """The connection is established."""
        self._transport = transport
        self._direct = transport.get_extra_info("ssl_object") is not None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        if self._target is not None and self._filled < len(self._target):
            return self._target[self._filled :]
        if self._first == self._last:
            self._first = self._last = 0
        return memoryview(self._staging)[self._last :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived there."""
        if self._target is not None and self._filled < len(self._target):
            self._filled += nbytes
            if self._filled < len(self._target):
                return  # no waiter to wake yet
        else:
            self._last += nbytes
            if self._last == len(self._staging):
                self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """The other end has closed its side; this side may write on, except over TLS, which has no half-close."""
        self._ended = True
        self._wake()
        return not self.direct

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._ended = True
        self._lost = str(exc) if isinstance(exc, OSError) else "the stream was closed"
        self._transport, self._writer = _GONE, None
        self._wake()
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(ConnectionResetError(self._lost))

    def pause_writing(self) -> None:
        """The socket is full."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._write_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _from_staging(self, out: memoryview) -> int:
        count = min(len(out), self._last - self._first)
        out[:count] = memoryview(self._staging)[self._first : self._first + count]
        self._first += count
        return count

    async def _more(self, have: str) -> None:
        if self._ended:
            raise EOFError(f"the stream ended after {have}")
        if self._first == self._last:
            self._first = self._last = 0
        self._resume()
        self._arrived = self._loop.create_future()
        try:
            await self._arrived
        finally:
            self._arrived = None

    def _resume(self) -> None:
        if not self._transport.is_reading() and not self._transport.is_closing():
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
