"""Rounds that went on without this peer, and groups that it does not sit down with."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from peer.link.messages import Anchor, RoundEnded
from peer.outer.record import RoundRecord
from peer.outer.round import Due, RoundAborted
from peer.swarm.catchup.history_server import history_name
from peer.swarm.catchup.late_commits import find_continuation
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.donor import ScriptedDonor, two_donors
from tests.swarm.played import rounds_at_genesis
from tests.swarm.runs import RUN, Run


@pytest.mark.parametrize("in_it", [True, False], ids=["with this peer's contribution", "without it"])
async def test_a_round_that_others_committed_is_found_out_before_anything_is_sent_twice(network, tmp_path, in_it):
    run, told = Run(tmp_path / "others"), []
    mine = run.identities[0]
    if not in_it:
        run.identities = run.identities[1:]
    run.commit(2)
    donor = await ScriptedDonor(network.node(run.identities[-1]), run).start()
    run.identities = [mine, *run.identities]
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._fork_choice.missed.sending(rounds.position().lineage_id, 7)
    restored = []
    feedback = SimpleNamespace(restore=lambda: restored.append(rounds.position().round))
    rounds._exchange._strategy.feedbacks = lambda: [feedback]
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="commit", reason="x",
        instead="retry", members=(mine.peer_id, donor.peer_id),
    )  # fmt: skip
    await rounds._retry.of(record)
    assert told == []  # no other snapshot is asked for: the one that was sent must stay
    assert await rounds._fork_choice.catch_up()
    rounds.slot.announce_anchor(rounds._fork_choice.missed.contributed)
    assert rounds.store.state.digest() == run.state.digest()
    (anchor,) = [message for message in told if isinstance(message, Anchor)]
    assert (anchor.round, anchor.contributed) == (2, 7 if in_it else None)
    assert rounds.store.memory.head.contributed == anchor.contributed
    assert restored == ([1] if in_it else [])  # once, as soon as the round that this peer gave up is replayed


async def test_nobody_waits_for_the_answer_of_whom_the_round_failed_through(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    sleeping, called, donor = await two_donors(network, run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="exchange", reason="x",
        instead="retry", members=(run.identities[0].peer_id, sleeping.peer_id, donor.peer_id),
        culprit=sleeping.peer_id,
    )  # fmt: skip
    await asyncio.wait_for(rounds._retry.of(record), STANDARD.ask_timeout_s / 2)
    assert donor.asked == ["chain"]
    assert [type(message).__name__ for message in told] == ["WantSnapshot"]
    called.clear()
    alone = record.model_copy(update={"members": (run.identities[0].peer_id, sleeping.peer_id)})
    asking = asyncio.ensure_future(rounds._retry.of(alone))
    await asyncio.wait_for(called.wait(), 5.0)  # nobody else knows
    await cancel_and_wait([asking])


async def test_who_is_said_to_have_failed_the_round_is_asked_as_well(network, tmp_path):
    """It may be the one honest member that committed, and who says so of it the one that lies."""
    run, told = Run(tmp_path / "others"), []
    mine = run.identities[0]
    run.commit(2)
    committed = await ScriptedDonor(network.node(run.identities[-1]), run).start()
    byzantine = network.node(run.identities[1])

    async def knows_nothing(stream):
        await stream.finish(5.0)

    await byzantine.serve(history_name(RUN), "history", knows_nothing)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="exchange", reason="x",
        instead="retry", members=(mine.peer_id, byzantine.peer_id, committed.peer_id), culprit=committed.peer_id,
    )  # fmt: skip
    await rounds._retry.of(record)
    assert told == []  # no other snapshot: what it has sent is in a round
    assert rounds._fork_choice.claims.donors()[0] == committed.peer_id


async def test_who_wakes_without_a_network_asks_until_somebody_answers(network, tmp_path):
    """Else it sends what the others have committed with its vote once more."""
    network.retime(recheck_s=0.01)
    run, told = Run(tmp_path / "others"), []
    run.commit(1)
    donor = ScriptedDonor(network.node(run.identities[-1]), run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._retry._directory.fresh = False
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="commit", reason="x",
        instead="retry", members=(run.identities[0].peer_id, donor.node.peer_id),
    )  # fmt: skip
    finding_out = asyncio.ensure_future(rounds._retry.of(record))
    await asyncio.wait({finding_out}, timeout=0.5)
    assert (finding_out.done(), told) == (False, [])
    await donor.start()
    await asyncio.wait_for(finding_out, 5.0)
    assert told == []
    assert rounds._fork_choice.claims.donors() == [donor.node.peer_id]


@pytest.mark.parametrize("fresh", [True, False])
async def test_nobody_asks_for_ever_what_became_of_a_round(network, tmp_path, fresh):
    network.retime(recheck_s=0.01)
    network.retime(unheard_s=0.1)
    run, told = Run(tmp_path / "others"), []
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._retry._directory.fresh = fresh
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="exchange", reason="x",
        instead="retry", members=(run.identities[0].peer_id, run.identities[1].peer_id),
    )  # fmt: skip
    await asyncio.wait_for(rounds._retry.of(record), 5.0)
    assert [type(message).__name__ for message in told] == ["WantSnapshot"]


async def test_after_an_abort_for_all_a_fresh_contribution_is_asked_for(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    donor = await ScriptedDonor(network.node(run.identities[-1]), run).start()
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="exchange", reason="x",
        instead="retry", members=(run.identities[0].peer_id, donor.peer_id),
    )  # fmt: skip
    await rounds._retry.of(record)
    assert [type(message).__name__ for message in told] == ["WantSnapshot"]
    assert donor.asked == ["chain"]


async def test_a_claim_that_nobody_has_shown_keeps_no_contribution_back(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds._fork_choice.claims.nudge("stranger", "f" * 64)  # says that it is ahead, and is gone
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="match", reason="x", instead="retry",
    )  # fmt: skip
    await rounds._retry.of(record)
    rounds._retry.settle()
    assert [type(message).__name__ for message in told] == ["WantSnapshot"]


async def test_whether_a_round_went_on_is_known_as_soon_as_one_says_so(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    run.commit(1)
    sleeping, called, donor = await two_donors(network, run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    fork_choice = rounds._fork_choice
    asked = find_continuation(
        fork_choice.fetcher, [sleeping.peer_id, donor.peer_id], fork_choice.local_state, random.Random(1),
        STANDARD.ask_timeout_s,
    )
    found = await asyncio.wait_for(asked, STANDARD.ask_timeout_s / 2)
    assert found is not None
    assert (found[0], found[1][-1].link.id) == (donor.peer_id, run.state.lineage_id)
    assert called.is_set()


async def test_a_donor_that_sleeps_holds_nobody_up(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    run.commit(2)
    sleeping, called, donor = await two_donors(network, run)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    for each in (sleeping, donor):
        rounds._fork_choice.claims.nudge(each.peer_id, run.state.lineage_id)
    assert await asyncio.wait_for(rounds._fork_choice.catch_up(), STANDARD.frame_timeout_s / 2)
    assert called.is_set()  # it was asked first
    assert rounds.store.state.digest() == run.state.digest()
    (caught_up,) = [message.record for message in told if isinstance(message, RoundEnded)]
    assert (caught_up.donor, caught_up.replayed) == (donor.peer_id, 2)


async def test_nobody_sits_down_with_the_banned_and_their_leader_is_told(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    banned, leader = run.identities[1].peer_id, run.identities[2].peer_id
    rounds._guard.bans._bans[banned] = SimpleNamespace(culprit=banned)
    dissolved, met, declined = [], [], []

    async def dissolve(abort):
        dissolved.append(abort.reason)

    async def match(_):
        return SimpleNamespace(id="group", others=(banned, leader), leader=leader)

    rounds._exchange.can_continue = lambda _: frozenset({banned, rounds._node.peer_id})
    rounds._exchange.dissolve, rounds._matchmaker.match = dissolve, match
    rounds._matchmaker.included = lambda _: None
    rounds._guard.meet = met.extend
    rounds._exchange.group_streams.decline = lambda group, abort: declined.append((group.others, abort.culprit))
    with pytest.raises(RoundAborted, match="is banned, and has a seat") as caught:
        await rounds.match(Due(1, 100, rounds.store.memory.snapshot))
    assert caught.value.culprit == banned
    assert dissolved == [f"{banned} is banned"]
    assert declined == [((banned, leader), banned)]
    assert leader in met
    assert rounds._node.refuses(banned)
    assert not rounds._node.refuses(leader)


async def test_a_leader_that_is_never_ahead_is_disbelieved_for_longer_each_time(network, tmp_path, monkeypatch):
    """Six that said so in turn, each for seconds of every half minute, stopped all rounds."""
    network.retime(recheck_s=0.001)
    rounds, said, caught_up = rounds_at_genesis(network, tmp_path, Run(tmp_path / "others"), []), [], False

    async def catch_up(*_):
        return caught_up

    async def refresh():
        """There is nothing new."""

    monkeypatch.setattr(rounds._fork_choice, "catch_up", catch_up)
    monkeypatch.setattr(rounds._retry._directory, "refresh", refresh, raising=False)
    monkeypatch.setattr(rounds._matchmaker.membership, "disbelieve", lambda *claim: said.append(claim))
    record = RoundRecord(
        status="aborted", round=0, lineage_id=rounds.position().lineage_id, phase="match", reason="x",
        instead="catch_up", culprit="liar",
    )  # fmt: skip
    usual = STANDARD.unproven_s
    for _ in range(8):
        await rounds._retry.of(record)
    longest = STANDARD.longest_disbelief_s
    assert said == [("liar", min(longest, usual * 2**times)) for times in range(8)]
    caught_up = True  # of whatever others have made
    await rounds._retry.of(record)
    caught_up = False
    rounds._retry.committed()  # it may well be in the rounds that others lead
    await rounds._retry.of(record)
    rounds._retry.missed(["liar"])
    await rounds._retry.of(record)
    assert said[8:] == [("liar", longest), ("liar", usual)]


async def test_a_leader_that_was_ahead_all_the_time_is_followed_once_this_peer_has_caught_up(network, tmp_path):
    """Where few of those that were there made the round, that takes ten minutes: it was passed over for ten more."""
    network.retime(recheck_s=0.001)
    run = Run(tmp_path / "others").commit(2)
    rounds = rounds_at_genesis(network, tmp_path, run, [])
    leader = await ScriptedDonor(network.node(run.identities[-1]), run).start()
    membership = rounds._matchmaker.membership
    for _ in range(5):
        rounds._retry._disbelieve(leader.peer_id)
        rounds._retry._disbelieve("liar")
    rounds._fork_choice.claims.nudge(leader.peer_id, run.state.lineage_id)
    assert await rounds._fork_choice.catch_up()
    assert not membership.disbelieves(leader.peer_id)
    assert membership.disbelieves("liar")
