"""The simulated swarm that leases: an epoch of a small one, and what hostile peers cost it."""

from __future__ import annotations

import pytest

from benchmarks.leases import HOSTILE, LeaseSwarm, figures_of
from peer.protocol.data_spec import PARTS_PER_SHARD

SHARDS = 600


@pytest.mark.parametrize("kind", ["", *HOSTILE.values()])
def test_an_epoch_is_read_once_whatever_some_peers_do(kind: str) -> None:
    swarm = LeaseSwarm(20, SHARDS, 3, **({kind: 2} if kind else {}))
    swarm.run(lambda _: None)
    sums, totals = swarm.chain.sums()[0], swarm.totals
    assert (sums.never, sums.once + sums.more) == (0, SHARDS * PARTS_PER_SHARD)
    assert sums.read_twice < 0.04
    assert totals.lost < 0.05 * SHARDS * PARTS_PER_SHARD
    assert (totals.claimed_falsely > 0) == (kind == "liars")
    figures = {figure.name: figure for figure in figures_of("x", swarm, of_home=True)}
    assert figures["x: never read"].met
    assert figures["x: leases in a record, largest"].met
