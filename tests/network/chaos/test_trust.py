"""Four production peers, one of which trains backwards, sends a thousand times too much, or zeros, in an open run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.network.harness import TestSwarm

pytestmark = pytest.mark.timeout(300)
MakeSwarm = Callable[..., TestSwarm]


@pytest.mark.parametrize("factor", [-1.0, 1000.0, 0.0], ids=["backwards", "a thousand times too much", "zeros"])
def test_an_open_run_tolerates_one_byzantine_peer_of_four_and_names_it(make_swarm: MakeSwarm, factor: float) -> None:
    swarm = make_swarm(steps=5, min_group=4)  # of fewer, nobody can tell who lies
    genesis = swarm.bootstrap().genesis()
    members = swarm.add("alpha", "bravo", "charlie", "byzantine")
    numel = genesis.numel() // 2
    shared, *own = torch.randn(5, numel, generator=torch.Generator().manual_seed(3))
    for member, noise in zip(members, own, strict=True):
        member.push = 1e-4 * (shared + noise)  # cosines of about .5
    honest, byzantine = members[:3], members[3]
    wanted = torch.stack([member.push for member in honest]).mean(dim=0)
    byzantine.push = factor * byzantine.push
    swarm.drive(lambda: all(len(member.committed) >= 8 for member in members), 200.0)

    for member in honest:
        assert "open: aggregator gated, weights up to 3 x the median" in member.log_text()
        for record in member.committed:
            assert {drop.peer_id for drop in record.dropped} == {byzantine.peer_id}, record.dropped
            assert record.dropped[0].slices == record.dropped[0].of
    assert len(swarm.drive_together(members)) == 1
    assert honest[0].sync is not None
    moved = honest[0].sync.memory.anchor - genesis[:numel]
    assert float(torch.nn.functional.cosine_similarity(wanted, moved, dim=0)) > 0.95
