"""The limits that a person sets for this machine's line: Mbit/s each way, GB a month, hours of the day.

Every byte of Atoll's own streams passes here, rounds and served state alike. What the DHT and TCP's acknowledgements
take is not counted; headers of TCP and TLS are, by their common share.
"""

from __future__ import annotations

import asyncio
import calendar
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from peer.protocol.line_limits import BITS_PER_MBIT, BYTES_PER_GB, ActiveHours, LineLimits
from peer.system.clock import Clock, boot_clock
from peer.system.output_files import replace_file

log = logging.getLogger(__name__)
Sleep = Callable[[float], Awaitable[None]]
HEADERS = 1.03  # bytes on the wire for each byte of a stream, in full packets
PIECE_BYTES = 64 * 1024  # that pass at once
SHORT_BYTES = 4096  # of a message that others wait for, such as a vote, behind a whole contribution of this peer
AT_ONCE = 0.1  # of a month's traffic may pass at its beginning; the rest in proportion to the time
SAVED_EVERY = 16 << 20
FILE_NAME = "traffic.json"


class Bucket:
    """Lets so many bytes pass in a second, and after a pause at most PIECE_BYTES more."""

    def __init__(self, bytes_s: float, clock: Clock) -> None:
        self._bytes_s, self._clock = bytes_s, clock
        self._free_at = clock()

    def take(self, count: float) -> float:
        """Count bytes; -> seconds until they may pass."""
        now = self._clock()
        self._free_at = max(self._free_at, now - PIECE_BYTES / self._bytes_s) + count / self._bytes_s
        return max(0.0, self._free_at - now)


class Month:
    """Traffic in both directions since the first of the month (UTC), kept in a file.

    Args:
        path: of the file; a folder that cannot be written to loses the count at the end of the process.
        clock: unix seconds.
    """

    def __init__(self, path: Path, limit_bytes: float, clock: Clock = time.time) -> None:
        self._path, self._limit, self._clock = path, limit_bytes, clock
        self._month, self._used, self._saved = "", 0.0, 0.0
        try:
            document = json.loads(path.read_bytes())
            self._month, self._used = str(document["month"]), float(document["bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    @property
    def used(self) -> float:
        """Bytes."""
        return self._used

    def take(self, count: float) -> float:
        """Count bytes; -> seconds until they may pass."""
        month, share, seconds = _month(self._clock())
        if month != self._month:
            self._month, self._used, self._saved = month, 0.0, 0.0
        self._used += count
        if abs(self._used - self._saved) >= SAVED_EVERY:
            self.save()
        allowed = self._limit * (AT_ONCE + (1 - AT_ONCE) * share)
        return max(0.0, self._used - allowed) * seconds / (self._limit * (1 - AT_ONCE))

    def save(self) -> None:
        """Write the count."""
        self._saved = self._used
        try:
            replace_file(self._path, json.dumps({"month": self._month, "bytes": int(self._used)}).encode())
        except OSError as error:
            log.warning("the traffic of this month is not kept in %s: %s", self._path, error.strerror)


class Line:
    """All limits of this machine; without any, nothing waits.

    Args:
        folder: where the month's traffic is kept.
        wall: unix seconds.

    Attributes:
        up_bytes_s: that it may send; 0: without a limit.
    """

    def __init__(
        self, limits: LineLimits, folder: Path, clock: Clock = boot_clock, wall: Clock = time.time,
        sleep: Sleep = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._sleep, self._wall = sleep, wall
        self._hours = ActiveHours.parse(limits.hours) if limits.hours else None
        self.month = Month(folder / FILE_NAME, limits.monthly_gb * BYTES_PER_GB, wall) if limits.monthly_gb else None
        self._up = Bucket(limits.up_mbit * BITS_PER_MBIT / 8, clock) if limits.up_mbit else None
        self.up_bytes_s = limits.up_mbit * BITS_PER_MBIT / 8 if limits.up_mbit else 0.0
        self._down = Bucket(limits.down_mbit * BITS_PER_MBIT / 8, clock) if limits.down_mbit else None

    @property
    def resting(self) -> bool:
        """Whether this peer exchanges nothing now, for the hours that a person has set."""
        return self._hours is not None and not self._hours.now(self._wall)

    async def sending(self, count: int) -> None:
        """Wait until so many bytes may be sent; a short message goes at once, and what follows it waits longer."""
        await self._pass(self._up, count, at_once=count <= SHORT_BYTES)

    async def received(self, count: int) -> None:
        """Wait until so many bytes, which have come, may have come; the other end then waits, too."""
        await self._pass(self._down, count)

    async def _pass(self, bucket: Bucket | None, count: int, at_once: bool = False) -> None:
        on_the_wire = HEADERS * count
        wait_s = bucket.take(on_the_wire) if bucket is not None else 0.0
        if self.month is not None:
            wait_s = max(wait_s, self.month.take(on_the_wire))
        if wait_s > 0.0 and not at_once:
            await self._sleep(wait_s)

    def close(self) -> None:
        """Keep the month's count."""
        if self.month is not None:
            self.month.save()


def _month(now: float) -> tuple[str, float, float]:
    """-> (the month, the share of it that is over, its seconds), in UTC"""
    date = time.gmtime(now)
    seconds = 86_400.0 * calendar.monthrange(date.tm_year, date.tm_mon)[1]
    began = calendar.timegm((date.tm_year, date.tm_mon, 1, 0, 0, 0))
    return f"{date.tm_year}-{date.tm_mon:02d}", (now - began) / seconds, seconds
