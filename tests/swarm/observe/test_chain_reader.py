"""Whose chain a visitor counts: of the first peer that shows one which follows the rules of the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from peer.errors import UserError
from peer.protocol.data_spec import SharedData
from peer.protocol.lineage import Link, Member, RosterLimits
from peer.protocol.ranges import ClaimRule
from peer.protocol.weights import WeightRule
from peer.swarm.observe import chain_reader
from peer.swarm.observe.chain_reader import coverage_of_run
from tests.protocol.test_lineage import GENESIS, PEERS, RUN, certificate
from tests.swarm import runs

CUT = SharedData(digest="a" * 64, shards=(4,), shard_tokens=64)
ROUNDS = 3
assert runs.RUN == RUN  # whose chain is served


def chain_of(*claims: str, signers=PEERS):
    """One round for each claim, of the first member."""
    chain, parent = [], GENESIS
    for round, ranges in enumerate(claims):
        roster = tuple(Member(peer_id=one.peer_id, tokens=100, ranges="" if place else ranges)
                       for place, one in enumerate(PEERS))  # fmt: skip
        digests = {"update_digest": "2" * 64, "state_digest": "3" * 64}
        link = Link(run_id=RUN, round=round, parent=parent, roster=roster, **digests)
        chain.append(certificate(link, signers))
        parent = link.id
    return chain


HONEST = ("0:0-8", "0:8-12", "0:4-8")


async def visit(monkeypatch, **donors):
    class Requests:
        def __init__(self, *_):
            pass

        async def links(self, donor, first, count):
            return donors[donor][first : first + count]

    limits = RosterLimits(2, 8, WeightRule(), lambda _: 0, ClaimRule(CUT.shards, 8))
    monkeypatch.setattr(chain_reader, "DonorRequests", Requests)
    monkeypatch.setattr(chain_reader.RunPlan, "of", lambda _: SimpleNamespace(roster_limits=limits))
    manifest = SimpleNamespace(
        name="test", run_id=RUN, genesis=GENESIS, data=SimpleNamespace(shared=CUT),
        trust=SimpleNamespace(invited=False),
    )  # fmt: skip
    weights = {name: SimpleNamespace(lineage_weight=-place) for place, name in enumerate(donors)}

    async def refresh():
        pass

    directory = SimpleNamespace(peers=weights, refresh=refresh)
    return await coverage_of_run(SimpleNamespace(introducers=[]), manifest, ROUNDS, directory)


async def test_a_run_of_invited_peers_says_so_and_asks_nobody():
    manifest = SimpleNamespace(name="ours", trust=SimpleNamespace(invited=True))
    with pytest.raises(UserError, match="run ours is for invited peers") as refused:
        await coverage_of_run(SimpleNamespace(), manifest, None, SimpleNamespace())
    assert "output folder of a peer" in refused.value.hint


async def test_an_honest_chain_is_counted(monkeypatch):
    rounds, coverage = await visit(monkeypatch, one=chain_of(*HONEST))
    sums = coverage.sources[0].sums()[0]
    assert (rounds, sums.once, sums.more, sums.never) == (ROUNDS, 8, 4, 64 - 12)
    assert coverage.again[PEERS[0].peer_id] == 4


LIES = {
    "claims more than a contribution can be of": chain_of("0:0-9"),
    "claims a shard that is not there": chain_of("0:60-65"),
    "is signed by too few": chain_of("0:0-8", signers=PEERS[:2]),
    "begins in the middle": chain_of(*HONEST)[1:],
    "is longer than the run": chain_of(*HONEST, "0:12-16"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_donor_whose_chain_breaks_the_rules_is_passed_over(monkeypatch, lie):
    rounds, coverage = await visit(monkeypatch, liar=LIES[lie], one=chain_of(*HONEST[:2]))
    assert (rounds, coverage.sources[0].sums()[0].once) == (2, 12)
    with pytest.raises(UserError, match="no peer of the run shows its chain"):
        await visit(monkeypatch, liar=LIES[lie])
