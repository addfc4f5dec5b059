"""A machine that has slept looks for those ahead: at its last group first, whatever the directory still shows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peer.outer.round import Due, RoundAborted
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.donor import ScriptedDonor, two_donors
from tests.swarm.gathering import until
from tests.swarm.played import rounds_at_genesis
from tests.swarm.runs import Run


@pytest.mark.parametrize("fresh", [True, False], ids=["a moment only", "for long"])
async def test_who_has_slept_asks_its_last_group_whether_that_went_on(network, tmp_path, fresh):
    """Records of before are still there, and where the directory's nodes sleep it is read for seconds."""
    run, told, matched = Run(tmp_path / "others"), [], []
    run.commit(2)
    sleeping, called, donor = await two_donors(network, run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    old = SimpleNamespace(lineage_id=rounds.position().lineage_id, lineage_weight=0, state="training")
    rounds._directory.peers = {sleeping.peer_id: old}
    rounds._directory.fresh = fresh
    rounds._matchmaker.membership.company = (sleeping.peer_id, donor.peer_id)

    async def match(_):
        matched.append(True)
        raise RoundAborted("match", "nobody is there")

    rounds._matchmaker.match = match
    round = rounds.match(Due(1, 100, rounds.store.memory.snapshot))
    with pytest.raises(RoundAborted) as caught:
        await asyncio.wait_for(round, STANDARD.ask_timeout_s / 2)
    assert (caught.value.behind, caught.value.culprit) == ((False, None) if fresh else (True, donor.peer_id))
    assert (bool(matched), called.is_set()) == (fresh, not fresh)


async def test_who_has_just_caught_up_asks_nobody_where_the_others_are(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    run.commit(2)
    sleeping, called, donor = await two_donors(network, run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._directory.fresh, rounds._matchmaker.membership.company = False, (sleeping.peer_id,)
    rounds._fork_choice.claims.nudge(donor.peer_id, run.state.lineage_id)
    rounds._matchmaker.membership.avoid(donor.peer_id)  # it had been out of reach a moment before
    assert await rounds._fork_choice.catch_up()
    rounds._matchmaker.membership.expect(donor.peer_id)
    assert rounds._matchmaker.membership.expected() == [donor.peer_id]
    await rounds._lookout.look_around()
    assert not called.is_set()
    rounds._fork_choice.caught_up_at -= STANDARD.caught_up_s
    await rounds._lookout.look_around()
    assert called.is_set()


async def test_who_has_slept_and_has_nothing_to_send_asks_its_last_group_too(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    donor = await ScriptedDonor(network.node(run.identities[2]), run).start()
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._matchmaker.membership.company = (donor.peer_id,)

    async def looks(asked):
        """Once more round the loop of a peer that waits, whatever it waits for."""
        waiting = asyncio.ensure_future(rounds._wait_for_work())
        await until(lambda: donor.asked == asked)
        await asyncio.wait({waiting}, timeout=0.1)
        await cancel_and_wait([waiting])
        assert donor.asked == asked

    await looks([])
    rounds._directory.fresh = False
    await looks(["chain"])  # the donor is where this peer is
    await looks(["chain"])  # nobody is asked for ever
    rounds._directory.fresh = True
    await looks(["chain"])
    rounds._directory.fresh = False
    run.commit(2)
    donor.chain.extend(run.history.chain)
    await asyncio.wait_for(rounds._wait_for_work(), 5.0)
    assert rounds._fork_choice.claims.donors() == [donor.peer_id]


async def test_a_group_forms_anew_for_who_asks_what_it_has_missed(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    away, members = run.identities[1].peer_id, frozenset({rounds._node.peer_id, run.identities[2].peer_id})
    matchmaker = rounds._matchmaker
    matchmaker.membership.avoid(away)  # it took no invitation
    for _ in range(3):
        matchmaker._regrouping.missed([away])  # group after group has formed without it
    assert matchmaker.newcomers(members) == []
    rounds.on_return(away)
    assert matchmaker.newcomers(members) == [away]


async def test_who_has_slept_looks_for_those_ahead_before_it_waits_for_anybody(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    run.commit(2)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    ahead = (await ScriptedDonor(network.node(run.identities[1]), run).start()).peer_id
    record = SimpleNamespace(
        round=2, lineage_id=run.state.lineage_id, lineage_weight=run.history.weight, state="training"
    )

    async def refresh():
        """Until now all records have expired."""
        rounds._directory.reachable = rounds._directory.peers = {ahead: record}

    rounds._directory.refresh = refresh
    with pytest.raises(RoundAborted, match=f"{ahead} is on a heavier lineage") as caught:
        await rounds.match(Due(1, 100, rounds.store.memory.snapshot))
    assert (caught.value.instead, caught.value.culprit) == ("catch_up", ahead)


@pytest.mark.parametrize("listed", [False, True], ids=["nobody", "who sleeps as well"])
async def test_who_has_slept_goes_on_with_its_last_group_whatever_the_directory_still_shows(network, tmp_path, listed):
    run, told, expected = Run(tmp_path / "others"), [], []
    sleeping, _, donor = await two_donors(network, run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._matchmaker.membership.company = (sleeping.peer_id, donor.peer_id)
    if listed:
        old = SimpleNamespace(lineage_id=rounds.position().lineage_id, lineage_weight=0, state="training")
        rounds._directory.peers, rounds._directory.fresh = {sleeping.peer_id: old}, False
    reads, reading = [], asyncio.Event()

    async def refresh():
        """One of the DHT's nodes sleeps."""
        reads.append(True)
        reading.set()
        await asyncio.Event().wait()

    async def match(_):
        expected.append(rounds._matchmaker.membership.expected())
        raise RoundAborted("match", "nobody is there")

    rounds._matchmaker.match, rounds._directory.refresh = match, refresh
    for _ in range(2):
        rounds._fork_choice.caught_up_at = rounds._node.clock()
        with pytest.raises(RoundAborted, match="nobody is there"):
            await asyncio.wait_for(rounds.match(Due(1, 100, rounds.store.memory.snapshot)), STANDARD.ask_timeout_s / 2)
        await asyncio.wait_for(reading.wait(), 5.0)
    assert expected == [[sleeping.peer_id, donor.peer_id]] * 2
    assert reads == [True]  # beside that, and not one beside the other
