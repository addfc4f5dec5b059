"""Frames over one libp2p stream, with limits, deadlines and byte counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from peer.errors import AtollError, ProtocolError
from peer.protocol.manifest import Spec
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import HEADER_BYTES, MAX_MESSAGE_BYTES, Kind, pack_header, unpack_header
from peer.swarm.net.line import PIECE_BYTES, Line
from peer.swarm.net.pipe import ZeroCopyProtocol

WRITE_BYTES = 256 * 1024
SMALL_BYTES = 4096
SpecT = TypeVar("SpecT", bound=Spec)
Between = Callable[[], Awaitable[None]]  # waited for before a slice


class StreamClosedError(AtollError):
    """The other end closed the stream, died, or cannot be reached."""

    def __init__(self, remote: str, detail: str) -> None:
        super().__init__(f"{remote}: {detail}")
        self.remote = remote


class StreamTimeoutError(StreamClosedError):
    """The other end did not send, or did not read, within the time that it had."""


@dataclass
class Traffic:
    """Bytes over streams of one purpose, frame headers included."""

    sent: int = 0
    received: int = 0


class FrameStream:
    """One bidirectional stream to an authenticated peer.

    What sends and receives takes a `timeout_s`, in seconds for the whole frame, None for as long as it takes. When it
    is over, StreamTimeoutError says so: a StreamClosedError, since a frame that was given up half-way ends the stream.

    Args:
        remote: the other end's peer id; libp2p has verified it in its handshake.
        line: the limits of this machine, if a person has set some.

    Attributes:
        sending: in the middle of a frame; true for ever once a frame was given up half-way.
        spoke, heard: this end, and the other one, has said something.
    """

    def __init__(self, remote: str, pipe: ZeroCopyProtocol, traffic: Traffic, line: Line | None = None) -> None:
        self.remote, self.traffic = remote, traffic
        self._pipe, self._line = pipe, line
        self.sending = self.spoke = self.heard = False

    @property
    def direct(self) -> bool:
        return self._pipe.direct

    @contextlib.asynccontextmanager
    async def within(self, timeout_s: float | None, omission: str = "sent nothing") -> AsyncIterator[None]:
        """Bound what several calls take together; raises StreamTimeoutError with what the other end failed to do."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise StreamTimeoutError(self.remote, f"{omission} for {timeout_s:g} s") from None

    async def send(
        self, kind: Kind, body: bytes | bytearray | memoryview = b"", between: Between | None = None,
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Send one frame, large bodies slice by slice, each waiting for `between`; raises StreamClosedError."""
        async with self.within(timeout_s, "did not read"):
            await self._send(kind, body, between)

    async def _send(self, kind: Kind, body: bytes | bytearray | memoryview, between: Between | None) -> None:
        view, length = memoryview(body), len(body)
        step = WRITE_BYTES if self._line is None else PIECE_BYTES
        self.sending = self.spoke = True
        try:
            header = pack_header(kind, length)
            if self._line is not None:
                await self._line.sending(HEADER_BYTES + min(length, step))
            if length <= SMALL_BYTES:  # one record of TLS
                self._pipe.write(header + view)
            else:  # the header with the first slice: the reader wakes once
                self._pipe.write(header, view[:step])
            await self._pipe.drain()
            for start in range(step, length, step):
                if between is not None:
                    await between()
                if self._line is not None:
                    await self._line.sending(min(step, length - start))
                self._pipe.write(view[start : start + step])
                await self._pipe.drain()
        except (OSError, RuntimeError) as error:
            raise StreamClosedError(self.remote, f"stream broke while sending: {error}") from None
        self.sending = False
        self.traffic.sent += HEADER_BYTES + length

    async def send_message(self, kind: Kind, message: Spec, timeout_s: float | None = None) -> None:
        await self.send(kind, dump_json(message), timeout_s=timeout_s)

    async def receive(
        self, limits: Mapping[Kind, int], exact: bool = False, timeout_s: float | None = None
    ) -> tuple[Kind, bytes]:
        """Receive one frame of an allowed kind.

        Args:
            limits: allowed kinds with the largest body of each in bytes.
            exact: bodies must have exactly that length.

        Raises:
            ProtocolError: another kind or length, before the body is read.
            StreamClosedError: the stream ended.
        """
        async with self.within(timeout_s):
            kind, length = await self.receive_header(limits, exact)
            body = bytearray(length)
            await self.receive_body(memoryview(body))
        return kind, bytes(body)

    async def receive_header(self, limits: Mapping[Kind, int], exact: bool = False) -> tuple[Kind, int]:
        """The next frame's kind and length; its body must be read next. Raises as `receive` does."""
        header = bytearray(HEADER_BYTES)
        await self._read(memoryview(header))
        kind, length = unpack_header(bytes(header))
        limit = limits.get(kind)
        if limit is None:
            expected = " or ".join(allowed.name for allowed in limits)
            raise ProtocolError(f"{self.remote} sent {kind.name}; expected {expected}")
        if length > limit or (exact and length != limit):
            raise ProtocolError(f"{self.remote} announces {length} bytes of {kind.name}; the limit is {limit}")
        return kind, length

    async def receive_body(self, out: memoryview) -> None:
        """The body after `receive_header`, into `out`, which has its length. Raises StreamClosedError."""
        if self._line is None:
            await self._read(out)
        else:
            for start in range(0, len(out), PIECE_BYTES):
                await self._read(out[start : start + PIECE_BYTES])
                await self._line.received(min(PIECE_BYTES, len(out) - start))
        self.traffic.received += HEADER_BYTES + len(out)
        self.heard = True

    async def _read(self, out: memoryview) -> None:
        try:
            await self._pipe.read_into(out)
        except (EOFError, OSError) as error:
            raise StreamClosedError(self.remote, f"stream ended: {error}") from None

    async def receive_message(self, kind: Kind, schema: type[SpecT], timeout_s: float | None = None) -> SpecT:
        """Receive one small message of one kind and parse it strictly."""
        _, body = await self.receive({kind: MAX_MESSAGE_BYTES}, timeout_s=timeout_s)
        return parse_json(schema, body)

    async def closed(self) -> None:
        """Return when the other end has closed its side; raises ProtocolError if it sends anything instead."""
        with contextlib.suppress(OSError):
            if await self._pipe.read_some():
                raise ProtocolError(f"{self.remote} sent data out of turn")

    async def finish(self, timeout_s: float) -> None:
        """Wait until the other end has read everything and closed, then close; it must know which frame is the last.

        The libp2p daemon knows no half of a stream: when either half of its local end is closed it closes the stream,
        and then resets it, both ways. Over QUIC that loses data in flight, and over TCP occasionally data that the
        other end has not read. So the side that sent last does not close first. After the timeout, data in flight, at
        most the windows of a stream, is given up.
        """
        with contextlib.suppress(OSError, StreamTimeoutError):
            async with self.within(timeout_s, "did not close"):
                await self._pipe.ended()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._pipe.close()
