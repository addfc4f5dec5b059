"""How long an exchange may take: from what bytes took lately, within the manifest's cap."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median, median_low

FIRST_RATE = 1e6
REMEMBERED = 9  # rounds
ENOUGH = 3  # of them are known
MULTIPLE = 4.0


class DeadlineEstimator:
    """Learns bytes a second from rounds that succeed, and patience from those that do not.

    Args:
        floor_s: for a round of no bytes.
        soft_s: for a round of no bytes once it is known what rounds take; None for `floor_s`.
    """

    def __init__(self, cap_s: float, floor_s: float, soft_s: float | None = None) -> None:
        self._cap_s, self._floor_s = cap_s, floor_s
        self._soft_s = floor_s if soft_s is None else min(floor_s, soft_s)
        self._took: deque[float] = deque(maxlen=REMEMBERED)  # seconds a byte
        self._patience = 1.0

    def seconds(self, wire_bytes: int, slow_line_s: float = 0.0) -> float:
        """Time for exchange and commit: four times what such bytes took most members lately, both ways.

        Args:
            slow_line_s: that it may take longer, since the line of one is slow.
        """
        took_s = wire_bytes * (median(self._took) if self._took else 2.0 / FIRST_RATE)
        floor_s = self._soft_s if len(self._took) >= ENOUGH else self._floor_s
        return min(self._cap_s, self._patience * (floor_s + MULTIPLE * took_s) + slow_line_s)

    def learn(self, wire_bytes: int, seconds: float) -> None:
        """A round has succeeded, and its exchange took most members so long."""
        self._took.append(max(seconds, 1e-3) / max(wire_bytes, 1))
        self._patience = max(1.0, self._patience / 2.0)

    def allow_longer(self, wire_bytes: int) -> None:
        """The deadline was too short for most: double it, or slow members would end each round."""
        if self.seconds(wire_bytes) < self._cap_s:
            self._patience *= 2.0


def usual_duration(began: float, sent: Mapping[str, float], signed: Mapping[str, float]) -> float:
    """Seconds that an exchange took most of its members, whatever one of them did to be late.

    Args:
        began: when it began.
        sent: when each other member's contribution was there.
        signed: when the shard that each member reduces was there. Those wait for all contributions, so that their time
            counts from the last of these.
    """
    middle = median_low if len(sent) > 1 else max  # of two members, none can say that only the other was slow
    last = max([began, *sent.values()])
    return max(0.0, middle([began, *sent.values()]) - began) + max(0.0, middle(signed.values()) - last)
