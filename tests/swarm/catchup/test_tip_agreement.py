"""The state that a chain ends at, which no link certifies yet: whom a newcomer believes, and who finds itself wrong."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from peer.outer.record import RoundRecord
from peer.protocol.identity import Identity
from peer.protocol.records import PeerRecord
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm.catchup.claims import MEMBERS_OF
from peer.swarm.catchup.history_client import CatchUpError
from peer.swarm.catchup.history_server import HistoryServer, history_name
from peer.swarm.catchup.tip_agreement import UndecidedError, ask_all, donors_matching_quorum, members_of, most_named
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state.snapshot_cache import SnapshotCache
from peer.system.clock import boot_clock
from tests.swarm.donor import Joiner, ScriptedDonor, assert_same
from tests.swarm.played import rounds_at_genesis
from tests.swarm.runs import RUN, Run


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run", members=4).commit(3)


@pytest.fixture
def joiner(network, tmp_path):
    joiner = Joiner(network, tmp_path / "joiner")
    joiner.valid = False
    return joiner


async def members(network, run, count):
    """So many of the run's members, serving what they hold."""
    return [await ScriptedDonor(network.node(identity), run).start() for identity in run.identities[:count]]


async def test_a_state_that_its_rounds_members_agree_on_is_taken(network, run, joiner, caplog):
    caplog.set_level(logging.INFO)
    donor, *others = await members(network, run, 4)
    assert (await joiner.catch_up(donor, *others)).snapshot_round == 3
    assert_same(joiner, run)
    assert f"4 of the 4 members of round 3 hold what {donor.peer_id} serves" in caplog.text


@pytest.mark.parametrize("in_it", [True, False], ids=["a member", "a stranger"])
async def test_a_poisoned_state_is_refused_where_two_thirds_hold_another(network, run, joiner, in_it):
    """A stranger's word counts nothing, so that fewer are enough against it."""
    donor, *others = await members(network, run, 4)
    if not in_it:
        donor, others = await ScriptedDonor(network.node(), run).start(), others[:1]
    donor.poison()
    with pytest.raises(CatchUpError, match=r"serves another state than the [0-9a-f]{12} that its round's members hold"):
        await joiner.catch_up(donor, *others)
    assert joiner.adopted == 0
    await joiner.catch_up(others[0], donor, *others[1:])
    assert_same(joiner, run)


async def test_members_that_disagree_are_believed_when_a_round_has_certified_what_is_so(network, run, joiner):
    byzantine, honest = await members(network, run, 2)
    byzantine.poison()
    for donor, other in ((byzantine, honest), (honest, byzantine)):
        with pytest.raises(UndecidedError, match="2 members of round 3 name different states after it"):
            await joiner.catch_up(donor, other)
    assert joiner.adopted == 0
    byzantine.chain = honest.chain = run.commit(1).history.chain
    with pytest.raises(CatchUpError, match="serves another state than the certified"):
        await joiner.catch_up(byzantine, honest)
    await joiner.catch_up(honest, byzantine)
    assert joiner.state.digest() == run.states[3]


async def test_where_nobody_of_the_round_is_in_sight_a_donors_word_is_all_there_is(network, run, joiner, caplog):
    donor, same, other = [await ScriptedDonor(network.node(), run).start() for _ in range(3)]
    other.poison()
    await joiner.catch_up(donor, other, same)
    assert_same(joiner, run)
    assert joiner.accused == {}  # who says that it holds another state is not asked for chunks of this one
    assert other.chunks_asked == []
    assert f"no member of round 3 is live: its state rests on {donor.peer_id}'s word only" in caplog.text


async def test_a_state_that_members_did_not_carry_on_is_replaced(network, run, joiner):
    """Of a newcomer that was told a false one, or of a machine whose memory is at fault."""
    (donor,) = await members(network, run, 1)
    await joiner.catch_up(donor)
    joiner.valid = True
    joiner.state.anchor[7] += 1.0
    later = await ScriptedDonor(network.node(run.identities[1]), run.commit(2)).start()
    how = await joiner.catch_up(later)
    assert (how.replayed, how.snapshot_round) == (0, 5)
    assert_same(joiner, run)


@pytest.mark.parametrize("silence", ["says nothing", "has no such state", "says too little", "cannot be reached"])
async def test_who_does_not_say_holds_nobody_up_for_long(network, run, joiner, silence):
    network.retime(state_patience_s=0.5)
    donor, other = await members(network, run, 2)
    await answers(other, silence)
    if silence == "cannot be reached":
        network.cut(other.peer_id)
    await joiner.catch_up(donor, other)
    assert_same(joiner, run)


async def answers(donor, silence):
    """What it says when it is asked for its state."""

    async def answer(stream):
        await stream.receive_message(Kind.REQUEST, HistoryRequest)
        if silence == "says too little":
            await stream.send(Kind.DATA, bytes(31))
        if silence != "says nothing":
            await stream.send(Kind.END)
        await stream.closed()

    await donor.node.serve(history_name(RUN), "history", answer)


async def test_who_answers_at_once_does_not_outvote_those_that_need_a_moment(network, run, joiner):
    """They are about to apply the round, or hash what it led to."""
    network.retime(state_recheck_s=0.02)
    byzantine, *honest = await members(network, run, 4)
    byzantine.poison()
    asked = dict.fromkeys((donor.peer_id for donor in honest), 0)
    for donor in honest:

        async def not_yet(stream, donor=donor, ask=donor._answer):
            request = await stream.receive_message(Kind.REQUEST, HistoryRequest)
            asked[donor.peer_id] += request.what == "state"
            if asked[donor.peer_id] > 4:
                await donor.node.serve(history_name(RUN), "history", ask)
            await stream.send(Kind.END)
            await stream.closed()

        await donor.node.serve(history_name(RUN), "history", not_yet)
    with pytest.raises(CatchUpError, match=r"serves another state than the [0-9a-f]{12} that its round"):
        await joiner.catch_up(byzantine, *honest)
    assert min(asked.values()) > 4
    assert joiner.adopted == 0


@pytest.mark.parametrize(
    ("said", "named", "of_first", "of_second"),
    [("a", ("a", 1), "takes", None), ("aa", ("a", 2), "takes", "takes"), ("ab", ("a", 1), "undecided", "undecided"),
     ("aab", ("a", 2), "undecided", "undecided"), ("aaab", ("a", 3), "takes", "takes"),
     ("abbb", ("b", 3), "refuses", "takes"), ("aabb", ("a", 2), "undecided", "undecided")],
)  # fmt: skip
def test_two_thirds_or_all_who_answer_decide(run, said, named, of_first, of_second):
    link = run.history.chain[-1].link
    ids = [identity.peer_id for identity in run.identities]
    strangers = {Identity.generate().peer_id: "f" * 64 for _ in range(9)}
    statements = {**strangers, **{peer: digest * 64 for peer, digest in zip(ids, said, strict=False)}}
    assert most_named(statements, link) == (named[0] * 64, named[1])
    for donor, outcome in zip(ids, (of_first, of_second), strict=False):
        others = [peer_id for peer_id in (*ids, *strangers) if peer_id != donor]
        if outcome == "takes":
            same = [peer_id for peer_id in others if statements.get(peer_id) == statements[donor]]
            assert donors_matching_quorum([donor, *others], link, statements) == [donor, *same]
        elif outcome is not None:
            with pytest.raises(UndecidedError if outcome == "undecided" else CatchUpError) as caught:
                donors_matching_quorum([donor, *others], link, statements)
            assert isinstance(caught.value, UndecidedError) is (outcome == "undecided")


async def test_two_thirds_are_enough_and_the_rest_have_a_moment_more(run):
    link, ids = run.history.chain[-1].link, [identity.peer_id for identity in run.identities]

    async def ask(peer_id, _):
        if peer_id in ids[:2]:
            return "a" * 64
        await asyncio.Event().wait()

    timing = replace(STANDARD, quorum_grace_s=0.05)
    asking = ask_all(ask, link, ids, 60.0, {ids[3]: "a" * 64}, timing=timing, clock=boot_clock)
    assert await asyncio.wait_for(asking, 5.0) == dict.fromkeys((ids[3], *ids[:2]), "a" * 64)
    assert members_of(link, ["nobody", *ids[:2]]) == ids[:2]


async def test_one_byzantine_member_does_not_convince_where_honest_members_are_in_sight(network, tmp_path):
    """Whatever order a newcomer comes to them in; nobody that it did not believe is missing as a witness."""
    run = Run(tmp_path / "run", members=8).commit(3)
    donors = await members(network, run, 6)
    donors[5].poison()
    for donor in donors:
        donor.updates.clear()  # what can be replayed needs no witness
    rounds = rounds_at_genesis(network, tmp_path, run, [], Identity.generate())
    rounds._directory.peers = rounds._directory.reachable = standing_at(run, [donor.peer_id for donor in donors])
    for _ in range(3):
        assert not await rounds._fork_choice.catch_up()  # five of eight are fewer than two thirds
        rounds._fork_choice.claims._queue.distrusted.clear()
    last = await ScriptedDonor(network.node(run.identities[6]), run).start()
    rounds._directory.reachable.update(standing_at(run, [last.peer_id]))
    assert await rounds._fork_choice.catch_up()
    assert rounds.store.state.digest() == run.states[3]


async def test_a_donor_says_what_its_states_are_as_far_as_it_knows(network, run, joiner):
    server = network.node(run.identities[0])
    snapshot_cache = SnapshotCache(run)
    await HistoryServer(server, RUN, run.history, snapshot_cache).start()

    links = [certificate.link for certificate in run.history.chain]

    async def said(link):
        return await joiner.fetcher.requests.state_digest(server.peer_id, link)

    assert [await said(link) for link in links] == run.states[1:]
    for unknown in (links[1].model_copy(update={"round": 7}), links[1].model_copy(update={"update_digest": "f" * 64})):
        assert await said(unknown) is None
    assert await snapshot_cache.digest(0, run.history.genesis) == run.states[0]
    run.valid = False
    assert [await said(link) for link in links] == [*run.states[1:3], None]


def standing_at(run, peer_ids):
    """Their records: all where the run is."""
    record = PeerRecord(
        run_id=RUN, nickname="x", state="training", round=run.state.round, lineage_id=run.state.lineage_id,
        lineage_weight=run.history.weight, expires_at=1e10,
    )  # fmt: skip
    return dict.fromkeys(peer_ids, record)


@pytest.mark.parametrize("told", ["false", "true"])
async def test_votes_that_differ_make_a_newcomer_that_was_told_a_false_state_take_the_true_one(
    network, run, tmp_path, told
):
    byzantine, *honest = await members(network, run, 4)
    byzantine.updates.clear()  # what can be replayed needs no witness
    if told == "false":
        byzantine.poison()
    rounds = rounds_at_genesis(network, tmp_path, run, [], Identity.generate())
    peers = rounds._directory.peers = rounds._directory.reachable = standing_at(run, [byzantine.peer_id])
    assert await rounds._fork_choice.catch_up()  # nobody else is in sight
    before = rounds.position()
    assert (before.lineage_id, await rounds.store.digest() == run.states[3]) == (run.state.lineage_id, told == "true")
    del peers[byzantine.peer_id]
    peers.update(standing_at(run, [donor.peer_id for donor in honest]))
    record = RoundRecord(
        status="aborted", round=4, lineage_id=before.lineage_id, phase="commit", reason="1 of 3 signed link",
        instead="retry", members=(rounds._node.peer_id, honest[0].peer_id),
    )  # fmt: skip
    await rounds._retry.of(record)
    assert rounds.store.valid is (told == "true")
    assert sorted(rounds._fork_choice.claims.names()) == (sorted(peers) if told == "false" else [])
    if told == "false":
        assert await rounds._fork_choice.catch_up()
    assert (rounds.position(), rounds.store.state.digest()) == (before, run.states[3])


async def test_one_members_word_topples_nobody(network, run, tmp_path, caplog):
    byzantine, honest = await members(network, run, 2)
    honest.updates.clear()
    rounds = rounds_at_genesis(network, tmp_path, run, [], Identity.generate())
    peers = rounds._directory.peers = rounds._directory.reachable = standing_at(run, [honest.peer_id])
    assert await rounds._fork_choice.catch_up()
    byzantine.poison()
    del peers[honest.peer_id]
    peers.update(standing_at(run, [byzantine.peer_id]))
    await rounds._fork_choice.look_at_own_state()
    assert rounds.store.valid
    assert "1 of the 4 members of round 3 hold" in caplog.text
    assert "it is unknown which is right" in caplog.text


async def test_a_peer_without_a_valid_state_makes_no_round(network, run, tmp_path, monkeypatch):
    network.retime(recheck_s=0.0)
    rounds, began = rounds_at_genesis(network, tmp_path, run, []), []

    async def one_round(due):
        began.append(due)
        rounds.leaving = True

    monkeypatch.setattr(rounds, "_one_round", one_round)
    await rounds.store.doubt()
    rounds.slot.due = "a contribution"
    running = asyncio.ensure_future(rounds.run())
    for _ in range(200):  # turns of the loop
        await asyncio.sleep(0)
    assert began == []
    rounds.store.valid = True
    await asyncio.wait_for(running, 5.0)
    assert began == ["a contribution"]


def said_by(introducer, chain):
    async def links(donor, since, count):
        assert (donor, since, count) == (introducer, 0, 2 * MEMBERS_OF)
        return chain

    return links


async def test_what_strangers_claim_keeps_a_newcomer_from_no_donor(network, run, tmp_path):
    """Claims cost nothing: of 40 the heaviest, half of the looks go by lot, and the first to whom a person named."""
    rounds = rounds_at_genesis(network, tmp_path, run, [], Identity.generate())
    honest, named, *crowd = (Identity.generate().peer_id for _ in range(42))
    records = standing_at(run, [honest, named, *crowd])
    for peer_id in crowd:
        records[peer_id] = records[peer_id].model_copy(update={"lineage_weight": 10**9})
    rounds._directory.peers = rounds._directory.reachable = records
    rounds._fork_choice.claims._queue.preferred.add(named)
    tries = [rounds._fork_choice.claims.names() for _ in range(400)]
    assert {one[0] for one in tries} == {named}
    assert {frozenset(one) for one in tries} == {frozenset(records)}
    rounds._fork_choice.fetcher.requests.links = said_by(named, run.history.chain)
    await rounds._fork_choice.claims.ask_who_is_there([named])
    assert rounds._fork_choice.claims._queue.preferred == {named, *run.history.chain[-1].signatures}
    early = sum(honest in one[:11] for one in tries) / len(tries)  # as many as one attempt asks
    assert 0.05 < early < 0.25  # 5 of 42
