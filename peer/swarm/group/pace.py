"""How long rounds wait for stragglers: as the recipe says, at the pace of their members and of the rounds so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from peer.outer.policy.straggler import StragglerPolicy
from peer.system.clock import Clock

REMEMBERED = 9  # rounds
FASTEST = 3.0  # times the median: no member counts as faster


class RoundPace:
    """The recipe's straggler policy, paced.

    Args:
        tokens: that a peer trains from one round to the next.
        window_s: the run's straggler window: no quorum waits for longer.
        clock: seconds.
    """

    def __init__(self, policy: StragglerPolicy, tokens: int, window_s: float, clock: Clock) -> None:
        self._policy, self._tokens, self._window_s, self._clock = policy.within(window_s), tokens, window_s, clock
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._formed = clock()

    @property
    def hurries(self) -> bool:
        """Whether a round asks peers for what they have before their contributions are due."""
        return not self._policy.asynchronous

    @property
    def period(self) -> int:
        """See `StragglerPolicy.period`."""
        return self._policy.period

    def formed(self) -> None:
        """A group of this peer's begins its round."""
        self._formed = self._clock()

    def committed(self) -> None:
        """It has made it."""
        self._took.append(self._clock() - self._formed)

    def of(self, rates: Iterable[float]) -> StragglerPolicy:
        """The policy for a round whose members claim to train so many tokens a second. A false claim shortens the
        window by a bounded factor.
        """
        if self.hurries:
            return self._policy
        known = [rate for rate in rates if rate > 0.0]
        fastest = min(max(known), FASTEST * median(known)) if known else 0.0
        spare_s = min(self._window_s, self._tokens / fastest if fastest > 0.0 else 0.0)
        return self._policy.paced(spare_s, median(self._took) if self._took else 0.0)
