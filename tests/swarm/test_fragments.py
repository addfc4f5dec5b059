"""Runs whose every round is of one fragment: what whole-model runs can do, they can."""

from __future__ import annotations

import pytest

from peer.errors import ProtocolError
from peer.outer.recipe.resolve import swarm_recipe
from peer.protocol.lineage import RosterLimits, check_chain
from peer.protocol.manifest import RecipeSpec
from peer.swarm.state.snapshot_cache import SnapshotCache
from peer.swarm.state.snapshot_file import load_snapshot
from tests.outer.reference import reduced
from tests.swarm.auditing import audit, slices_of, tampered_rounds
from tests.swarm.circle import Circle
from tests.swarm.donor import Joiner, ScriptedDonor, assert_same
from tests.swarm.runs import RUN, Run, contributions, make_state, written
from tests.swarm.shelves import content
from tests.swarm.state.test_live_snapshot import interrupted_shelf
from tests.swarm.tampering import Tampering

SIZES = (2048, 1500, 1024)
LAGOON = swarm_recipe(RecipeSpec(name="lagoon"))
fragment_of = written(SIZES).turns


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "donor", sizes=SIZES).commit(4)


@pytest.fixture
async def donor(network, run):
    return await ScriptedDonor(network.node(), run).start()


@pytest.fixture
def joiner(network, tmp_path):
    return Joiner(network, tmp_path / "joiner", sizes=SIZES)


async def test_missed_rounds_are_replayed_each_on_its_fragment(run, donor, joiner):
    how = await joiner.catch_up(donor)
    assert (how.replayed, how.snapshot_round) == (4, None)
    assert_same(joiner, run)
    assert [one.link.fragment for one in run.history.chain] == [1, 2, 0, 1]


@pytest.mark.usefixtures("small_chunks")
async def test_a_newcomer_takes_a_snapshot_of_all_fragments_and_goes_on(network, tmp_path):
    run = Run(tmp_path / "donor", sizes=SIZES).commit(5)
    donor, joiner = await ScriptedDonor(network.node(), run).start(), Joiner(network, tmp_path / "new", sizes=SIZES)
    joiner.valid = False
    assert (await joiner.catch_up(donor)).snapshot_round == 5
    assert_same(joiner, run)
    assert donor.meta.fragments == SIZES
    joiner.valid = True
    run.commit(3)
    again = await ScriptedDonor(network.node(), run).start()
    assert (await joiner.catch_up(again)).replayed == 3
    assert_same(joiner, run)


async def test_a_link_of_another_fragment_than_the_schedules_is_refused(run, donor, joiner, tmp_path):
    limits = RosterLimits(fragment=lambda round: fragment_of(round).fragment)
    check_chain(run.history.chain, RUN, run.history.genesis, 0, limits)
    other = Run(tmp_path / "other", sizes=SIZES)
    forged = other.certify(_update(other), fragment=2)
    with pytest.raises(ProtocolError, match="round 0 is of fragment 2; not 1"):
        check_chain([forged], RUN, other.history.genesis, 0, limits)
    donor.chain = [forged]
    await joiner.refuses(donor, ProtocolError, "fragment 2; not 1")


def _update(run):
    return reduced(run.state, contributions(run.state, 3, 0), [64] * 3)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("entries", [(), (1,), (2, 3), (0, 1, 2, 3, 4)])
async def test_a_live_snapshot_is_of_one_round_whatever_fragments_change_meanwhile(tmp_path, entries):
    run = Run(tmp_path / "donor", sizes=SIZES).commit(2)
    cache, _ = interrupted_shelf(run, *entries)
    file = await cache.offer(None, 0)
    assert file.path.read_bytes() == content(run.state)
    assert (file.meta.round, file.digest) == (2 + len(entries), run.states[-1])
    loaded = make_state(sizes=SIZES)
    loaded.digest()
    load_snapshot(file.path, loaded)
    assert loaded.digest() == run.states[-1]


@pytest.mark.usefixtures("small_chunks")
async def test_a_snapshot_is_made_of_an_earlier_one(tmp_path):
    run = Run(tmp_path / "donor", sizes=SIZES).commit(1)
    cache = SnapshotCache(run)
    await cache.offer(None, 0)
    run.commit(4)
    expected, wanted = content(run.state), run.state.lineage_id
    run.commit(1)
    made = await cache.get(wanted)
    assert made.path.read_bytes() == expected


async def test_an_update_changes_its_fragment_alone_and_the_digest_is_of_all(run):
    before = [tensor.clone() for tensor in (run.state.anchor, *run.state.buffers)]
    start, stop = run.state.part.start, run.state.part.stop
    run.commit(1)
    for old, new in zip(before, (run.state.anchor, *run.state.buffers), strict=True):
        changed = (old != new).nonzero()
        assert len(changed) > 0
        assert start <= int(changed.min()) <= int(changed.max()) < stop
    fresh = make_state(sizes=SIZES)
    fresh.anchor.copy_(run.state.anchor)
    fresh.buffers[0].copy_(run.state.buffers[0])
    assert fresh.digest() == run.states[0]  # what no update has changed is not read again
    fresh.replaced()
    assert fresh.digest() == run.state.digest() == run.states[-1]
    assert len(set(run.states)) == 6


async def test_reducers_of_fragments_feed_back_and_are_audited(network, tmp_path):
    fragments = written((3000, 2000, 2500), "int2", 512)
    circle = await Circle(network, 4, numel=fragments.numel, recipe=LAGOON, folder=tmp_path, written=fragments).start()
    for _ in range(7):
        await circle.round()
        for auditor in range(4):
            reducer = (auditor + 1) % 4
            for index in range(slices_of(circle, auditor, reducer)):
                assert (await audit(circle, auditor, reducer, index)).outcome == "right"
    chain = circle.seats[0].chain
    assert [one.link.fragment for one in chain] == [1, 2, 0, 1, 2, 0, 1]
    assert all(one.link.residuals for one in chain)
    assert len({seat.state.digest() for seat in circle.seats}) == 1


@pytest.mark.timeout(300)
async def test_a_tampered_slice_of_a_fragment_is_found(network, tmp_path):
    fragments = written((3000, 3000, 3000), "int2", 512)
    circle = await Circle(network, 3, numel=fragments.numel, recipe=LAGOON, folder=tmp_path, written=fragments).start()
    byzantine = Tampering(LAGOON.aggregator)
    for fragment in range(3):
        circle.seats[0].exchange._strategies(fragment)._aggregator = byzantine
    caught, accused = await tampered_rounds(circle, byzantine, 20, seed=6)
    assert (caught, accused) == (20, 0)
