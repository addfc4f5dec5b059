"""The limits that a person sets for a machine: of its line, and of its hours."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from peer.protocol.manifest import Spec
from peer.system.clock import Clock

BITS_PER_MBIT, BYTES_PER_GB = 1e6, 1e9
MINUTES_A_DAY = 24 * 60
_HOURS = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?-([0-9]{1,2})(?::([0-5][0-9]))?")


class LineLimits(Spec):
    """Mbit/s up and down, and GB a month both ways together; None: no limit. `hours`: see `ActiveHours`."""

    up_mbit: Annotated[float, Field(ge=1.0)] | None = None
    down_mbit: Annotated[float, Field(ge=1.0)] | None = None
    monthly_gb: Annotated[float, Field(ge=1.0)] | None = None
    hours: str | None = None


@dataclass(frozen=True, kw_only=True)
class ActiveHours:
    """Part of each day, in minutes since midnight of local time; it may pass midnight."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> ActiveHours:
        """`22-8`, `8:30-17`.

        Raises:
            ValueError: anything else.
        """
        match = _HOURS.fullmatch(text.strip())
        if match is None:
            raise ValueError("must be two times of day such as 22-8 or 8:30-17")
        begin, end = (60 * int(match[k]) + int(match[k + 1] or 0) for k in (1, 3))
        if begin >= MINUTES_A_DAY or end > MINUTES_A_DAY or begin == end:
            raise ValueError("must be two different times of day, from 0 to 24")
        return cls(begin=begin, end=end % MINUTES_A_DAY)

    def hold(self, minute: float) -> bool:
        """Whether a minute of the day is among them."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def now(self, clock: Clock = time.time) -> bool:
        """Whether this moment is among them, by this machine's time zone; `clock`: unix seconds."""
        local = time.localtime(clock())
        return self.hold(60 * local.tm_hour + local.tm_min)

    @property
    def hours(self) -> float:
        """Of each day."""
        return ((self.end - self.begin) % MINUTES_A_DAY or MINUTES_A_DAY) / 60
