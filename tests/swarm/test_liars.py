"""Members with two faces, members that do not read, and what a peer makes of what it saw itself."""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from peer.link.memory import SharedState
from peer.link.messages import Anchor
from peer.outer.compress.registry import compressor
from peer.outer.compress.sliced import Sliced
from peer.outer.optimizer import Nesterov
from peer.outer.record import RoundRecord
from peer.outer.round import Due, RoundAborted
from peer.outer.state import OuterState
from peer.protocol.evidence import Evidence, TwoJoins
from peer.protocol.manifest import DataSpec, InnerSpec, ModelSpec, RecipeSpec, RunManifest
from peer.protocol.records import parse_json, seal
from peer.protocol.statements import Leaves, root_of, seal_reduced
from peer.protocol.wire import AbortMessage, HelloMessage, InviteMessage, Kind, RejectMessage, StatusMessage
from peer.swarm import budget as budget_module
from peer.swarm import exchange as exchange_module
from peer.swarm.conduct import FIRST_REFUSAL_S, LONGEST_REFUSAL_S, STRIKES, Conduct
from peer.swarm.history import History
from peer.swarm.judge import NoEvidenceError
from peer.swarm.keeper import Keeper
from peer.swarm.newcomers import FIRST_WAIT_S, LONGEST_WAIT_S, Newcomers
from peer.swarm.roster import JOIN_DOMAIN
from peer.swarm.rounds import Rounds
from tests.swarm.circle import Circle
from tests.swarm.donor import ScriptedDonor
from tests.swarm.gathering import PARENT, gather, join_of, until
from tests.swarm.runs import RUN, Run
from tests.swarm.table import NAME


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


# -- two faces -------------------------------------------------------------------------------------------------------


async def one_round(circle):
    locals_ = circle.locals()
    jobs = [circle.one_round(index, local, None) for index, local in enumerate(locals_)]
    return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 40.0)


async def test_whoever_joins_with_two_faces_is_named_and_banned_on_the_evidence_of_both_joins(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    await circle.round()
    liar, one, other = circle.seats
    stream = liar.exchange._standing.outbound[one.peer_id]
    send = stream.send

    async def another_join(kind, body=b""):
        if kind is Kind.JOIN:
            group = liar.exchange._standing.identifier
            body = liar.rosters.join(liar.position, liar.tokens + 1, group)[1]
        await send(kind, body)

    stream.send = another_join
    outcomes = await one_round(circle)
    assert all(isinstance(outcome, RoundAborted) for outcome in outcomes), outcomes
    assert liar.peer_id in {outcome.culprit for outcome in outcomes[1:]}
    await until(lambda: one.guard.banned(liar.peer_id) and other.guard.banned(liar.peer_id))
    assert [seat.state.round for seat in circle.seats] == [1, 1, 1]
    for seat in (one, other):
        assert not any(seat.guard.refuses(honest.peer_id) for honest in (one, other))


async def test_joins_that_may_both_stand_show_nothing(network, tmp_path):
    circle = await Circle(network, 2, folder=tmp_path).start()
    honest, other = circle.seats
    judge, place, group = honest.guard._judge, honest.position, "a" * 64
    later = type(place)(place.round + 1, place.lineage_id, place.weight)
    join = honest.rosters.join(place, 5, group)[1].hex()
    pairs = {
        "to two leaders": [honest.rosters.join(place, tokens)[1].hex() for tokens in (5, 6)],
        "twice the same": [join, join],
        "in two groups": [join, honest.rosters.join(place, 6, "b" * 64)[1].hex()],
        "in two rounds": [join, honest.rosters.join(later, 6, group)[1].hex()],
        "of two peers": [join, other.rosters.join(place, 6, group)[1].hex()],
        "not signed": [join, join[:-2] + "00"],
        "no join": [join, seal(honest.node.identity, JOIN_DOMAIN, b"{}").hex()],
        "of another domain": [join, seal(honest.node.identity, "vote", bytes.fromhex(join)[117:]).hex()],
    }
    for name, (first, second) in pairs.items():
        with pytest.raises(NoEvidenceError):
            assert judge.judge(Evidence(finding=TwoJoins(first=first, second=second))) is None, name
    second = honest.rosters.join(place, 6, group)[1].hex()
    verdict = judge.judge(Evidence(finding=TwoJoins(first=join, second=second)))
    assert verdict.culprit == honest.peer_id


def telling_another_result(liar, send):
    """Its stream to one member: another reduced part than to the others, properly signed."""
    leaves = Leaves(whole=False)

    async def tell(kind, body=b""):
        if kind is Kind.REDUCED:
            body = body[:-1] + bytes([6 if body[-1] == 5 else 5])
            leaves.add(body)
        elif kind is Kind.SEAL_REDUCED:
            sitting = liar.exchange._session.sitting.result()
            body = seal_reduced(liar.node.identity, sitting, body[:32], root_of(leaves.digests)).body
        await send(kind, body)

    return tell


async def test_a_reducer_that_tells_two_results_is_banned_when_members_compare_them(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    liar, one, other = circle.seats
    stream = liar.exchange._standing.outbound[one.peer_id]
    stream.send = telling_another_result(liar, stream.send)
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted), outcomes
    await until(lambda: one.guard.banned(liar.peer_id) and other.guard.banned(liar.peer_id))
    assert "told two results in round 2" in one.guard.bans.deed(liar.peer_id)
    assert not one.guard.refuses(other.peer_id)


async def test_whoever_shows_two_results_in_an_audit_is_convicted_too(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    liar, one, _ = circle.seats
    stream = liar.exchange._standing.outbound[one.peer_id]
    stream.send = telling_another_result(liar, stream.send)
    await one_round(circle)
    await until(lambda: one.guard.banned(liar.peer_id))  # it is shown one thing at a time
    heard = one.guard._showing._heard
    found = await one.guard._auditor.audit(heard, liar.peer_id, 0)
    assert (found.outcome, found.found.verdict.culprit) == ("false", liar.peer_id)


async def test_a_contribution_that_is_not_what_was_signed_ends_the_round_and_counts_against_its_sender(
    network, tmp_path
):
    circle = await Circle(network, 3, folder=tmp_path).start()
    await circle.round()
    liar, one, other = circle.seats
    stream = liar.exchange._standing.outbound[one.peer_id]
    send = stream.send

    async def another_seal(kind, body=b""):
        await send(kind, body[:-1] + bytes([body[-1] ^ 1]) if kind is Kind.SEAL_SENT else body)

    stream.send = another_seal
    outcomes = await one_round(circle)
    assert outcomes[1].culprit == liar.peer_id
    assert "its signature is not that of the contribution" in outcomes[1].reason
    assert one.guard.conduct._pasts[liar.peer_id].offences == 1
    assert liar.peer_id not in other.guard.conduct._pasts  # it has only been told


# -- what a peer saw itself ------------------------------------------------------------------------------------------


def test_refusals_grow_and_end():
    clock = Clock()
    conduct = Conduct(clock)
    waits = []
    for _ in range(8):
        for strike in range(STRIKES):
            assert not conduct.refuses("x"), strike
            conduct.saw("x", "a frame that is none")
        began = clock.now
        while conduct.refuses("x"):
            clock.now += 1.0
        waits.append(clock.now - began)
    assert waits[:3] == [FIRST_REFUSAL_S, 2 * FIRST_REFUSAL_S, 4 * FIRST_REFUSAL_S]
    assert waits[-1] == LONGEST_REFUSAL_S
    assert not conduct.refuses("y")


def test_whoever_never_shows_anything_is_refused_and_whoever_does_is_not():
    conduct = Conduct(Clock())
    for turn in range(10):
        conduct.unanswered("often")
        conduct.unanswered("often")
        conduct.answered("often")
        assert not conduct.refuses("often"), turn
        conduct.unanswered("never")
    assert conduct.refuses("never")


def test_no_number_of_offenders_fills_the_memory():
    conduct = Conduct(Clock())
    for number in range(5000):
        conduct.saw(str(number), "x")
    assert len(conduct._pasts) <= 1024


async def test_hearsay_is_not_held_against_anybody(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    liar, one, other = circle.seats
    firsts, locals_ = [circle._first(seat) for seat in circle.seats], circle.locals()
    jobs = [asyncio.ensure_future(circle.one_round(index, locals_[index], firsts[index])) for index in (1, 2)]
    await until(lambda: one.exchange._standing is not None)
    stream = await liar.node.open(one.peer_id, NAME, "round")
    await stream.send_message(Kind.HELLO, HelloMessage(group_id=firsts[0].id))
    await stream.send_message(Kind.ABORT, AbortMessage(reason="it lies", culprit=other.peer_id))
    with pytest.raises(RoundAborted) as caught:
        await asyncio.wait_for(jobs[0], 30.0)
    await one.exchange.release(firsts[1], caught.value)
    with pytest.raises(RoundAborted):
        await asyncio.wait_for(jobs[1], 30.0)
    assert caught.value.culprit == other.peer_id
    assert one.guard.conduct._pasts == {}


async def test_who_is_refused_gets_no_seat_and_does_not_lead(network):
    first, second, third = await gather(network, 3)
    for member in (second, third):
        refused = {first.peer_id}
        member.matchmaker._refuses = member.matchmaker.view._refuses = refused.__contains__
    assert second.matchmaker.view.leader() == second.peer_id
    stream = await first.hand_in(second, join_of(first.node.identity)[0])
    reject = parse_json(RejectMessage, (await stream.receive({Kind.REJECT: 10_000}))[1])
    assert reject.reason == "excluded"
    stream.close()
    groups = await asyncio.gather(second.match(), third.match())
    assert [{member.peer_id for member in group.members} for group in groups] == [{second.peer_id, third.peer_id}] * 2


async def test_nothing_is_taken_from_the_banned(network):
    one, two = network.node(), network.node()
    heard = []

    async def listen(stream):
        heard.append(stream.remote)

    await one.serve("anything", "round", listen)
    one.refuses = {two.peer_id}.__contains__
    stream = await two.open(one.peer_id, "anything", "round")
    await asyncio.wait_for(stream.closed(), 5.0)
    assert heard == []


# -- members that do not read ----------------------------------------------------------------------------------------


async def test_a_member_that_does_not_read_holds_a_certified_round_for_a_bounded_while(network, monkeypatch):
    monkeypatch.setattr(exchange_module, "MIN_SENDING_S", 0.2)
    monkeypatch.setattr(budget_module, "MIN_BUDGET_S", 20.0)
    circle = await Circle(network, 4).start()
    await circle.round()
    seat, slow = circle.seats[0], circle.seats[3]
    stream = seat.exchange._standing.outbound[slow.peer_id]
    send = stream.send

    async def stuck(kind, body=b""):
        if kind is Kind.VOTE:
            stream.sending = True  # its window is full
            await asyncio.Event().wait()
        await send(kind, body)

    stream.send = stuck
    locals_, session = circle.locals(), seat.exchange._standing.session
    await asyncio.gather(
        *(circle.one_round(index, local, None) for index, local in enumerate(locals_)), return_exceptions=True
    )
    assert seat.state.round == 2
    assert session.deadline > time.monotonic()  # committed and applied, and did not wait for its end
    assert seat.exchange.stands(seat.position) == frozenset()


# -- invitations and back-off ----------------------------------------------------------------------------------------


def test_an_invitation_is_honoured_once_in_each_wait():
    clock = Clock()
    newcomers = Newcomers(clock)
    tries = 0
    for _ in range(4 * 1000):  # somebody who invites without end, and with whom no group ever forms
        if newcomers.invited("x") and newcomers.among(["x"]):
            tries += 1
            newcomers.missed(["x"])
        clock.now += 0.25
    quiet = Newcomers(clock)
    tries_without = 0
    for _ in range(4 * 1000):
        if quiet.among(["x"]):
            tries_without += 1
            quiet.missed(["x"])
        clock.now += 0.25
    assert tries_without < tries <= 2 * tries_without + 1
    assert newcomers.invited("y")


async def test_whoever_says_that_it_comes_ends_its_standing_group_and_whoever_does_not_end_it_does_not_say_so(network):
    first, second, third = await gather(network, 3)
    clock = Clock()
    members = frozenset({first.peer_id, second.peer_id})
    matchmaker = second.matchmaker
    matchmaker._me = matchmaker._invitations._me = replace(matchmaker._me, standing=lambda: members)
    matchmaker._newcomers = Newcomers(clock)
    answers = []
    for wait_s in (0.0, 0.0, FIRST_WAIT_S):
        clock.now += wait_s
        stream = await third.node.open(second.peer_id, f"atoll/{RUN[:16]}/invite", "round")
        await stream.send_message(
            Kind.INVITE, InviteMessage(run_id=RUN, round=5, parent=PARENT, weight=100, wait_s=1.0)
        )
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        wanted = bool(matchmaker.newcomers(members))
        answers.append((status.coming, wanted))
        matchmaker._newcomers.missed([third.peer_id])
        stream.close()
    assert answers == [(True, True), (True, True), (False, False)]
    assert LONGEST_WAIT_S > FIRST_WAIT_S


# -- rounds that went on without this peer ---------------------------------------------------------------------------


def rounds_at_genesis(network, folder, run, told):
    """Real rounds of one member of `run`, at genesis; everything around them played."""
    node = network.node(run.identities[0])
    plain = Run(folder / "plain").state
    memory = SharedState(os.memfd_create("state"), plain.numel, 1)
    memory.anchor.copy_(plain.anchor)
    state = OuterState(
        memory.anchor, memory.buffers, Nesterov(lr=0.7, momentum=0.6), Sliced(compressor("int8")), 0, plain.lineage_id
    )
    manifest = RunManifest(
        name="a", model=ModelSpec(architecture="llama"), data=DataSpec(), inner=InnerSpec(),
        recipe=RecipeSpec(name="opendiloco", compressor="int8"), genesis=plain.lineage_id,
    )  # fmt: skip
    keeper = Keeper(memory, state, History(folder / "mine", plain.lineage_id))
    assert keeper.restore([]) is None
    directory = SimpleNamespace(peers={}, refresh=None, announce_soon=lambda: None)
    rounds = Rounds(node, directory, manifest, keeper, node.peer_id, 10_000, told.append, random.Random(1))
    rounds._fetcher._run_id = RUN
    rounds.joined = True
    return rounds


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
    rounds._missed.sending(rounds.position().lineage_id, 7)
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="commit", reason="x",
        instead="retry", members=(mine.peer_id, donor.peer_id),
    )  # fmt: skip
    await rounds._after_abort(record)
    assert told == []  # no other snapshot is asked for: the one that was sent must stay
    assert await rounds.catch_up()
    rounds._announce_anchor(rounds._missed.contributed)
    assert rounds.keeper.state.digest() == run.state.digest()
    (anchor,) = [message for message in told if isinstance(message, Anchor)]
    assert (anchor.round, anchor.contributed) == (2, 7 if in_it else None)
    assert rounds.keeper.memory.head.contributed == anchor.contributed


async def test_after_an_abort_for_all_a_fresh_contribution_is_asked_for(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    donor = await ScriptedDonor(network.node(run.identities[-1]), run).start()
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    record = RoundRecord(
        status="aborted", round=1, lineage_id=rounds.position().lineage_id, phase="exchange", reason="x",
        instead="retry", members=(run.identities[0].peer_id, donor.peer_id),
    )  # fmt: skip
    await rounds._after_abort(record)
    assert [type(message).__name__ for message in told] == ["WantSnapshot"]
    assert donor.asked == ["chain"]


async def test_whoever_says_that_its_joins_differ_and_shows_none_that_do_is_counted(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    await circle.round()
    liar, one, _ = circle.seats
    stream = liar.exchange._standing.outbound[one.peer_id]
    send = stream.send

    async def another_group(kind, body=b""):
        await send(kind, bytes(32) + body[32:] if kind is Kind.SEAL_SENT else body)

    stream.send = another_group
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted)
    assert "has other joins" in outcomes[1].reason
    assert one.guard.conduct._pasts[liar.peer_id].offences == 1
    assert not one.guard.banned(liar.peer_id)


async def test_nobody_sits_down_with_the_banned_and_their_leader_is_told(network, tmp_path):
    run, told = Run(tmp_path / "others"), []
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    banned, leader = run.identities[1].peer_id, run.identities[2].peer_id
    rounds._guard.bans._bans[banned] = SimpleNamespace(culprit=banned)
    dissolved, met = [], []

    async def dissolve(abort):
        dissolved.append(abort.reason)

    async def match(_):
        return SimpleNamespace(others=(banned, leader))

    rounds._exchange.stands = lambda _: frozenset({banned, rounds._node.peer_id})
    rounds._exchange.dissolve, rounds._matchmaker.match = dissolve, match
    rounds._matchmaker.included = lambda _: None
    rounds._guard.meet = met.extend
    with pytest.raises(RoundAborted, match="is banned, and has a seat") as caught:
        await rounds.match(Due(1, 100, rounds.keeper.memory.snapshot))
    assert caught.value.culprit == banned
    assert dissolved == [f"{banned} is banned"]
    assert leader in met
    assert rounds._node.refuses(banned)
    assert not rounds._node.refuses(leader)
