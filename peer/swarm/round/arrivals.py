"""When the members' frames of a round were there: failed and long rounds are judged from these times."""

from __future__ import annotations

from dataclasses import dataclass, field

from peer.protocol.word import Stage

STAGES: tuple[Stage, ...] = ("contribution", "reduced", "vote")  # of an exchange, each after the one before
Times = dict[str, float]
"""By member, seconds of a monotonic clock."""


def _none_yet() -> dict[Stage, Times]:
    return {stage: {} for stage in STAGES}


@dataclass
class Arrivals:
    """Those of one round, by the clock of this peer.

    Attributes:
        opened: when the second member was ready for the round, of two the first; infinite before.
        began: when the exchange began; 0 before.
        joined: when each other member's join came, after which that member was waited for; none in a group that has
            just been matched.
        sealed: when each other member had signed its contribution, which it does once all have joined it.
        came: when what each member sends at each stage was there; a reduced shard is this peer's own as well.
    """

    opened: float = float("inf")
    began: float = 0.0
    joined: Times = field(default_factory=dict)
    sealed: Times = field(default_factory=dict)
    came: dict[Stage, Times] = field(default_factory=_none_yet)

    @property
    def sent(self) -> Times:
        """When each other member's contribution was there."""
        return self.came["contribution"]

    @property
    def signed(self) -> Times:
        """When the shard that each member reduces was there, this peer's own among them."""
        return self.came["reduced"]
