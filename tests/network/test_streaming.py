"""Streaming DiLoCo on real swarms: one chain, whose every round is of one fragment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.network.harness import TestSwarm
from tests.network.members import Member

FRAGMENTS, PERIOD = 3, 12
RECIPE = "name: streaming-diloco, schedule: {{num_fragments: {fragments}, overlap_steps: {overlap}}}"


LATE = "name: diloco, compressor: int8, outer_momentum: 0.6, schedule: {steps: 5, overlap_steps: 5}"


@pytest.mark.long
def test_whole_rounds_are_merged_one_round_late(tmp_path: Path) -> None:
    swarm = TestSwarm(tmp_path, steps=5, recipe=LATE, wait=3.0)
    try:
        swarm.bootstrap()
        a, b = swarm.add("a", "b")
        assert len(swarm.drive_together([a, b], lambda: rounds_of([a, b]) >= 6, 90.0)) == 1
        for member in (a, b):
            assert all(record.status == "committed" for record in member.records)
            assert member.sync.step >= 5 * member.round + 5  # what is merged was sent five steps earlier
    finally:
        swarm.close()


def test_a_fragment_is_sent_on_time_however_late_the_one_before_it_is_merged(tmp_path: Path) -> None:
    every = PERIOD // FRAGMENTS
    recipe = RECIPE.format(fragments=FRAGMENTS, overlap=PERIOD)
    swarm = TestSwarm(tmp_path, steps=PERIOD, layers=FRAGMENTS, recipe=recipe, wait=3.0)
    try:
        swarm.bootstrap()
        a, b = swarm.add("a", "b")
        swarm.drive(lambda: rounds_of([a, b]) >= 1, 90.0)
        a.waits = b.waits = True  # for each round, that is, not for the merge of what it is of
        before = [(member.sync.step, member.round) for member in (a, b)]
        assert len(swarm.drive_together([a, b], lambda: rounds_of([a, b]) >= 3 * FRAGMENTS, 90.0)) == 1
        for member, (step, round) in zip((a, b), before, strict=True):
            assert member.sync.step - step <= every * (member.round - round + 1)
    finally:
        swarm.close()


@pytest.fixture(params=[1, 6], ids="overlap {}".format)  # 6: the next fragment is sent before one is merged
def swarm(tmp_path: Path, request: pytest.FixtureRequest):
    recipe = RECIPE.format(fragments=FRAGMENTS, overlap=request.param)
    swarm = TestSwarm(tmp_path, steps=PERIOD, layers=FRAGMENTS, recipe=recipe, wait=3.0)
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
