"""The peers that read answers of a donor. Where all places are taken, the one that reads slowest makes room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from peer.protocol.wire import Kind
from peer.swarm.net.stream import Between, FrameStream
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock

BUFFERED_BYTES = 1 << 20  # that are sent at once, whether or not the other end reads
LEAST_RATE = 1 << 17  # bytes a second: slower than that, a reader makes room
LEAST_BULK_RATE = 1 << 14  # honest ones share the line of a slow donor


@dataclass
class Reader:
    """One answer under way.

    Attributes:
        sent: bytes so far.
        asked: when the other end was last waited for; None while the donor has something to do for it.
    """

    stream: FrameStream
    began: float
    timeout_s: float
    sent: int = 0
    asked: float | None = None

    async def send(self, kind: Kind, body: bytes = b"", between: Between | None = None) -> None:
        """See `FrameStream.send`."""
        await self.stream.send(kind, body, between, self.timeout_s)
        self.sent += len(body)

    def bytes_s(self, now: float) -> float:
        """How fast the other end reads."""
        return max(0, self.sent - BUFFERED_BYTES) / max(1e-9, now - self.began)


class Readers:
    """Those of one kind of answer. Strangers that read slowly, or not at all, would else keep out all others.

    Args:
        total, per_peer: places in all, and of one peer.
        timing, clock: as of `Node`.
        bulk: what they read takes minutes.
    """

    def __init__(self, total: int, per_peer: int, timing: Timing, clock: Clock, *, bulk: bool = False) -> None:
        self._total, self._per_peer, self._timing, self._clock = total, per_peer, timing, clock
        self._bulk = bulk
        self._readers: list[Reader] = []

    @contextlib.contextmanager
    def of(self, stream: FrameStream) -> Iterator[Reader | None]:
        """-> a place for the answer on this stream; None where there is none."""
        own = sum(each.stream.remote == stream.remote for each in self._readers)
        if own >= self._per_peer or (len(self._readers) >= self._total and not self._make_room()):
            yield None
            return
        reader = Reader(stream, self._clock(), self._timing.frame_timeout_s)
        self._readers.append(reader)
        try:
            yield reader
        finally:
            self._leave(reader)

    def _make_room(self) -> bool:
        now, timing = self._clock(), self._timing
        idle = [each for each in self._readers if each.asked is not None and now - each.asked >= timing.reader_idle_s]
        spared_s, least = timing.reader_spared_s, LEAST_RATE
        if self._bulk:
            spared_s, least = timing.bulk_reader_spared_s, LEAST_BULK_RATE
        waited = [each for each in self._readers if each.stream.sending or each.asked is not None]
        slow = [each for each in waited if now - each.began >= spared_s]
        slow = sorted((each for each in slow if each.bytes_s(now) < least), key=lambda each: each.bytes_s(now))
        for reader in [*idle, *slow][:1]:
            reader.stream.close()
            self._leave(reader)
            return True
        return False

    def _leave(self, reader: Reader) -> None:
        self._readers = [each for each in self._readers if each is not reader]
