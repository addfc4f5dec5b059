"""Leaving in order: a peer that is asked to stop, and has the time, makes the round that is near first."""

from __future__ import annotations

import time
from typing import Protocol

from peer.system.clock import Clock
from peer.system.spot_notice import SpotNotice

SAVING_S = 15.0  # of a notice, for the last checkpoint and the end


class NearRound(Protocol):
    """What a drain asks of a `SwarmSync`."""

    rounds_contributed: int

    @property
    def round_in_s(self) -> float: ...


class StopRequest(Protocol):
    """Whether a signal asks this peer to stop. `draining`: it trains, so that a signal asks and does not interrupt."""

    draining: bool

    @property
    def requested(self) -> bool: ...


class Drain:
    """Whether a peer leaves now.

    Args:
        seconds: after a signal, at most; 0: it leaves at once.
        notice: of the cloud; None: none is looked for.
    """

    def __init__(
        self, stop: StopRequest, seconds: float, notice: SpotNotice | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.stop, self._seconds, self._notice, self._clock = stop, seconds, notice, clock
        self._until: float | None = None
        self._made = 0
        self.sync: NearRound | None = None

    def leaves(self) -> bool:
        """Whether it is asked to leave and does not make another round; to be called after each step."""
        noticed = self._notice is not None and self._notice.noticed
        if not (self.stop.requested or noticed):
            return False
        if self.sync is None:
            return True
        now = self._clock()
        if self._until is None:
            seconds = self._seconds
            if noticed and self._notice is not None:
                seconds = max(seconds, self._notice.notice_s - SAVING_S)
            self._until, self._made = now + seconds, self.sync.rounds_contributed
        left = self._until - now
        return left <= 0.0 or self.sync.rounds_contributed > self._made or self.sync.round_in_s > left
