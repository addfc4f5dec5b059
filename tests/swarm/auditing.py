"""What tests of audits do in a circle: let a reducer lie, and audit it."""

from __future__ import annotations

import random

from tests.swarm.tampering import TAMPERINGS


def lies(circle, index, tampering):
    """Let one seat reduce with another aggregator than it says."""
    circle.seats[index].exchange._strategy._aggregator = tampering


def heard(circle, index):
    """What a member was told in the round that has just ended."""
    return circle.seats[index].guard._audit_server._heard


def slices_of(circle, index, reducer):
    return len(heard(circle, index).reduced[circle.seats[reducer].peer_id][1])


async def audit(circle, auditor, reducer, index):
    seat = circle.seats[auditor]
    return await seat.guard._auditor.audit(heard(circle, auditor), circle.seats[reducer].peer_id, index)


async def tampered_rounds(circle, byzantine, count, seed):
    """Rounds of three whose first falsifies one slice each, as `byzantine`; -> (of these found, others accused)."""
    rng, caught, accused = random.Random(seed), 0, 0
    for trial in range(count):
        index = rng.randrange(2)
        byzantine.lies[len(byzantine.calls) + index] = rng.choice(list(TAMPERINGS))
        await circle.round()
        assert slices_of(circle, 1, 0) == 2
        result = await audit(circle, 1 + trial % 2, 0, index)
        caught += result.outcome == "false"
        assert result.found is None or result.found.verdict.culprit == circle.seats[0].peer_id
        others = [(2 - trial % 2, 0, 1 - index), (1, 2, index), (2, 1, index)]
        accused += sum([(await audit(circle, *one)).outcome != "right" for one in others])
    return caught, accused
