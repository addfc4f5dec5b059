"""How long an exchange may take: from what bytes took lately, within the manifest's cap."""

from __future__ import annotations

FIRST_RATE = 1e6


class DeadlineEstimator:
    """Learns bytes a second from rounds that succeed, and patience from those that do not.

    Args:
        floor_s: for a round of no bytes.
    """

    def __init__(self, cap_s: float, floor_s: float) -> None:
        self._cap_s, self._floor_s, self._rate = cap_s, floor_s, FIRST_RATE

    def seconds(self, wire_bytes: int) -> float:
        """Time for exchange and commit: four times what such bytes took lately, both ways."""
        return min(self._cap_s, self._floor_s + 4.0 * 2.0 * wire_bytes / self._rate)

    def learn(self, wire_bytes: int, seconds: float) -> None:
        """A round has succeeded."""
        rate = 2.0 * wire_bytes / max(seconds, 1e-3)
        self._rate = 0.7 * self._rate + 0.3 * rate if self._rate != FIRST_RATE else rate

    def allow_longer(self, wire_bytes: int) -> None:
        """The deadline was too short for a member: double it, or a slow member would end each round."""
        seconds = 2.0 * self.seconds(wire_bytes) - self._floor_s
        self._rate = min(self._rate, 8.0 * wire_bytes / max(seconds, 1e-3))
