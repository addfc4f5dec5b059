"""Rounds that begin with a quorum, over real agents: no peer waits for the slowest, whose work counts later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from peer.outer.record import RoundRecord
from tests.network.harness import TestSwarm
from tests.network.members import TOKENS_PER_STEP

MakeSwarm = Callable[..., TestSwarm]
STEPS, WINDOW_S = 8, 30.0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", ["", ", schedule: {name: strided, period: 8, num_fragments: 2}"])
def test_a_quorum_goes_on_without_the_slowest_and_takes_its_work_later(
    make_swarm: MakeSwarm, schedule: str
) -> None:
    recipe = f"name: async-diloco, compressor: int8, straggler: {{grace_s: 0.5}}{schedule}"
    swarm = make_swarm(steps=STEPS, wait=WINDOW_S, recipe=recipe, layers=2)
    swarm.bootstrap()
    a, b, c = swarm.add("a", "b", "c")
    a.pace = b.pace = 10
    c.pace = 1_000_000  # it makes no step
    members = [a, b, c]

    def without_c() -> list[RoundRecord]:
        return [record for record in a.committed if c.peer_id not in record.members]

    swarm.drive(lambda: len(without_c()) >= 3, 90.0)
    pairs = without_c()
    assert max(record.seconds["total"] for record in pairs) < WINDOW_S / 3

    def heaviest() -> int:
        """The most that a contribution of `c` has weighed."""
        weights = [dict(zip(one.members, one.weights, strict=True))[c.peer_id] for one in c.committed]
        return max(weights, default=0)

    assert heaviest() <= 1  # where it had to lead
    c.pace = 10
    swarm.drive(lambda: heaviest() >= 2 * TOKENS_PER_STEP, 90.0)

    b.kill()  # the others are a quorum still
    (d,) = swarm.add("d")
    d.pace, others = 10, [a, c, d]
    goal = a.round + 3
    digests = swarm.drive_together(others, lambda: a.round >= goal and len(d.committed) >= 1, 150.0)
    assert len(digests) == 1
    assert torch.equal(a.sync.memory.anchor, d.sync.memory.anchor)
    assert members[0].round >= goal
