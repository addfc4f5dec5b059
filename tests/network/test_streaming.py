"""Streaming DiLoCo on real swarms: one chain, whose every round is of one fragment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.network.harness import TestSwarm
from tests.network.members import Member

FRAGMENTS, PERIOD = 3, 12
RECIPE = f"name: streaming-diloco, schedule: {{num_fragments: {FRAGMENTS}}}"


@pytest.fixture
def swarm(tmp_path: Path):
    swarm = TestSwarm(tmp_path, steps=PERIOD, layers=FRAGMENTS, recipe=RECIPE, wait=3.0)
    yield swarm
    swarm.close()


def rounds_of(members: list[Member]) -> int:
    return min(member.round for member in members)


def test_three_peers_stream_a_fragment_a_round_through_a_kill_and_a_late_join(swarm: TestSwarm) -> None:
    swarm.bootstrap()
    a, b, c = swarm.add("a", "b", "c")
    swarm.drive(lambda: rounds_of([a, b, c]) >= 2 * FRAGMENTS, 120.0)
    c.kill()
    (d,) = swarm.add("d")
    others = [a, b, d]
    enough = lambda: rounds_of(others) >= 5 * FRAGMENTS and len(d.committed) >= FRAGMENTS  # noqa: E731
    digests = swarm.drive_together(others, enough, 180.0)
    assert len(digests) == 1
    anchors = [member.sync.memory.anchor for member in others]
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors)
