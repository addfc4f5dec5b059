"""How fast the line between two peers is: a newcomer sends some bytes, and gets as many back.

No peer sends more than it has received, and each serves few measurements a minute, one at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from peer.errors import ProtocolError
from peer.protocol.wire import Kind
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.expiring import ExpiringSet
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock

log = logging.getLogger(__name__)
SPEED_NAME = "atoll/speed"
SIZES = (1 << 16, 1 << 19, 1 << 22)
SERVED_AT_MOST = 10  # in `speed_pause_s`


@dataclass(frozen=True, kw_only=True)
class LineSpeed:
    """Bits per second, from this peer and to it."""

    up: float
    down: float


class SpeedServer:
    """Returns what it is sent."""

    def __init__(self, timing: Timing, clock: Clock) -> None:
        self._timing, self._places = timing, Admission(1, 1)
        self._served = ExpiringSet[str](clock, timing.speed_pause_s)

    async def answer(self, stream: FrameStream) -> None:
        """Serve one measurement, or say that there were enough of them."""
        with self._places.of(stream.remote) as admitted:
            if not admitted or stream.remote in self._served or len(self._served) >= SERVED_AT_MOST:
                await stream.send(Kind.BUSY, timeout_s=self._timing.first_frame_s)
                return
            self._served.add(stream.remote)
            async with stream.within(self._timing.speed_s, "did not finish its measurement"):
                for size in SIZES:
                    kind, body = await stream.receive({Kind.SPEED: size, Kind.END: 0})
                    if kind == Kind.END:
                        return
                    await stream.send(Kind.SPEED, body)


async def measure_speed(stream: FrameStream, rtt_s: float, timing: Timing, clock: Clock) -> LineSpeed | None:
    """Over a stream to another peer's `SpeedServer`; None when it has no time, or the line breaks.

    Args:
        rtt_s: the round-trip time, which is not counted.
    """
    speed = None
    try:
        async with stream.within(timing.speed_s, "did not finish the measurement"):
            for size in SIZES:
                began = clock()
                await stream.send(Kind.SPEED, bytes(size))
                kind, length = await stream.receive_header({Kind.SPEED: size, Kind.BUSY: 0})
                if kind == Kind.BUSY:
                    return None
                turned = clock()
                await stream.receive_body(memoryview(bytearray(length)))
                ended = clock()
                up_s, down_s = max(1e-4, turned - began - rtt_s), max(1e-4, ended - turned)
                speed = LineSpeed(up=8 * size / up_s, down=8 * size / down_s)
                if ended - began >= timing.speed_enough_s and size != SIZES[-1]:
                    await stream.send(Kind.END)
                    break
    except (StreamClosedError, ProtocolError) as error:
        log.info("the speed of the line was not measured to the end: %s", error)
    return speed
