"""How long a peer waits for a round before a chain will do that few of those who were there have signed."""

from __future__ import annotations

from collections import deque
from statistics import median

from peer.protocol.lineage import Position
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock

USUAL_ROUNDS = 8
ABANDONED_ROUNDS = 4
"""A run whose rounds are long is abandoned after so many of the usual length: between two of them no peer is idle."""


class Patience:
    """Counts the time without a round in which a peer looked for others.

    Args:
        position: where the peer stands.
    """

    def __init__(self, timing: Timing, clock: Clock, position: Position) -> None:
        self._timing, self._clock = timing, clock
        self._stood, self._looked_at, self._waited_s = position, clock(), 0.0
        self._rounds_s: deque[float] = deque(maxlen=USUAL_ROUNDS)

    def look(self, position: Position) -> None:
        """The peer looks for others from here; sleep counts little: a peer that wakes has looked at no one yet."""
        now = self._clock()
        self._waited_s += min(now - self._looked_at, self._timing.claim_s)
        self._looked_at = now
        if position != self._stood:
            self._rounds_s.append(self._waited_s)
            self._stood, self._waited_s = position, 0.0

    @property
    def over(self) -> bool:
        """Whether no round has moved the peer for a long time."""
        usual_s = median(self._rounds_s) if self._rounds_s else 0.0
        return self._waited_s >= max(self._timing.abandoned_s, ABANDONED_ROUNDS * usual_s)
