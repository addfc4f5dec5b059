"""Gather rounds between members in one process: persistent groups, feedback, hostile payloads."""

from __future__ import annotations

import asyncio

import pytest
import torch

from peer.outer.aggregate.gated import Gated
from peer.outer.recipe.plan import wire_format
from peer.outer.recipe.resolve import resolve
from peer.outer.round import RoundAborted
from peer.outer.state import gathered_update as wire_module
from peer.protocol.manifest import RecipeSpec
from peer.protocol.statements import Leaves, root_of, seal_reduced, seal_sent
from peer.protocol.wire import Kind
from tests.outer.reference import gathered
from tests.swarm.circle import Circle
from tests.swarm.gathering import until

NUMEL = 9000
RECIPE = resolve(RecipeSpec(name="sparseloco", aggregator="mean"))
GATED = resolve(RecipeSpec(name="sparseloco", aggregator="gated"))


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(wire_module, "SLICE_BYTES", 50)


def make_circle(network, count, recipe=RECIPE, folder=None):
    written = wire_format(recipe, ((NUMEL,),), 7)
    return Circle(network, count, numel=NUMEL, recipe=recipe, written=written, folder=folder)


def senders_of(circle):
    return [seat.state.wire.sender(RECIPE.feedback) for seat in circle.seats]


def expected_update(circle, senders, group, locals_):
    """What this round must arrive at, with what earlier rounds have left in the senders."""
    state, by_id = circle.seats[0].state, {seat.peer_id: index for index, seat in enumerate(circle.seats)}
    order = [by_id[member.peer_id] for member in group.members]
    weights = [member.tokens for member in group.members]
    return gathered(state, [senders[index] for index in order], [locals_[index] for index in order], weights)


async def test_rounds_of_a_persistent_group_arrive_at_the_reference_with_feedback(network):
    circle = await make_circle(network, 3).start()
    senders = senders_of(circle)
    for number in range(4):
        before = circle.seats[0].state.anchor.clone()
        locals_, outcomes = await circle.round()
        after = [seat.state.anchor.clone() for seat in circle.seats]
        for seat in circle.seats:
            seat.state.anchor.copy_(before)
            seat.state.round -= 1
        expected = expected_update(circle, senders, outcomes[0][0], locals_)
        for seat, anchor in zip(circle.seats, after, strict=True):
            seat.state.anchor.copy_(anchor)
            seat.state.round += 1
        assert {update.digest() for _, update in outcomes} == {expected.digest()}
        assert len({seat.state.digest() for seat in circle.seats}) == 1
        assert all(seat.state.round == number + 1 for seat in circle.seats)
        for _, update in outcomes:
            assert torch.equal(update.decode_range(0, NUMEL), expected.decode_range(0, NUMEL))
    assert [seat.streams for seat in circle.seats] == [2, 2, 2]  # one to each other member, for all rounds


async def test_each_payload_goes_to_each_other_member_once(network):
    circle = await make_circle(network, 4).start()
    await circle.round()
    before = [seat.node.traffic["round"].sent for seat in circle.seats]
    await circle.round()
    size = circle.seats[0].state.wire.wire_bytes
    for seat, sent in zip(circle.seats, before, strict=True):
        moved = seat.node.traffic["round"].sent - sent
        slices = -(-size // wire_module.SLICE_BYTES)
        assert 3 * size < moved < 3 * (size + 16 * slices + 1500)  # headers, join, two signatures, vote


def test_slices_are_all_of_a_payload(network):
    wire = make_circle(network, 2).seats[0].state.wire
    slices = wire.broadcast_bytes(2, 1)
    assert sum(slices) == wire.wire_bytes
    assert set(slices[:-1]) == {50}
    assert 0 < slices[-1] <= 50
    assert (list(wire.slices(2, 0)), wire.contributed_bytes(2, 0)) == ([], [])


async def one_round(circle, locals_=None):
    """What becomes of each member's round; whoever gives up tells the others, as a peer does."""

    async def one(index, local):
        try:
            return await circle.one_round(index, local, None)
        except RoundAborted as abort:
            await circle.seats[index].exchange.dissolve(abort, tell=True)
            return abort

    jobs = [one(index, local) for index, local in enumerate(locals_ or circle.locals())]
    return await asyncio.wait_for(asyncio.gather(*jobs), 40.0)


async def test_an_abandoned_round_takes_nothing_from_the_residuals(network):
    circle = await make_circle(network, 3).start()
    await circle.round()
    residuals = [seat.exchange._strategy.feedbacks()[0].residual.clone() for seat in circle.seats]
    byzantine = circle.seats[0]
    stream = byzantine.exchange._group.outbound[circle.seats[1].peer_id]
    send = stream.send

    async def breaks_off(kind, body=b""):
        if kind is Kind.SEAL_REDUCED:
            stream.close()
        await send(kind, body)

    stream.send = breaks_off
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted), outcomes
    for seat, outcome, before in zip(circle.seats, outcomes, residuals, strict=True):
        kept = torch.equal(seat.exchange._strategy.feedbacks()[0].residual, before)
        assert (kept, seat.state.round) == ((True, 1) if isinstance(outcome, RoundAborted) else (False, 2))


def contributing_garbage(seat):
    """Its payload is garbage, the same to everybody, properly bound and signed."""
    sender, size = seat.exchange._strategy._sender, seat.state.wire.wire_bytes

    def encode(*_):
        sender.received = torch.full((NUMEL,), torch.nan)
        return b"\xff" * size

    sender.encode = encode


def garbled(seat, to, *, bound, when=lambda: True):
    """What it sends to `to` is garbage, signed; and bound to, if `bound`. The last signature goes out `when`."""
    stream = seat.exchange._group.outbound[to]
    send, leaves = stream.send, Leaves()

    async def tell(kind, body=b""):
        buffers = seat.exchange._buffers
        if kind is Kind.SEAL_SENT and bound:
            garbage = Leaves()
            for size in buffers.broadcast_bytes(buffers.me):
                garbage.add(b"\xff" * size)
            body = seal_sent(seat.node.identity, buffers.sitting.result(), to, root_of(garbage.digests)).body
        elif kind is Kind.REDUCED:
            body = b"\xff" * len(body)
            leaves.add(body)
        elif kind is Kind.SEAL_REDUCED:
            await until(when, 10.0)
            sitting = buffers.sitting.result()
            body = seal_reduced(seat.node.identity, sitting, body[:32], root_of(leaves.digests)).body
        await send(kind, body)

    stream.send = tell


async def test_whoever_sends_a_malformed_payload_is_named(network, tmp_path):
    circle = await make_circle(network, 3, folder=tmp_path).start()
    await circle.round()
    byzantine, *_ = circle.seats
    contributing_garbage(byzantine)
    outcomes = await one_round(circle)
    assert all(isinstance(outcome, RoundAborted) for outcome in outcomes), outcomes
    named = [outcome for outcome in outcomes[1:] if "malformed contribution: " in outcome.reason]
    assert named
    assert {outcome.culprit for outcome in named} == {byzantine.peer_id}
    assert [seat.state.round for seat in circle.seats] == [1, 1, 1]


async def test_gates_leave_out_a_malformed_payload_and_the_round_goes_on_without_it(network, tmp_path):
    circle = await make_circle(network, 4, GATED, tmp_path).start()
    await circle.round()
    byzantine, *_ = circle.seats
    contributing_garbage(byzantine)
    outcomes = await one_round(circle)
    assert not any(isinstance(outcome, RoundAborted) for outcome in outcomes), outcomes
    group, update = outcomes[0]
    place = [member.peer_id for member in group.members].index(byzantine.peer_id)
    assert update.aggregation.reasons == {place: "holds NaN or infinity"}
    assert len({seat.state.digest() for seat in circle.seats}) == 1
    assert {seat.state.round for seat in circle.seats} == {2}


@pytest.mark.parametrize("recipe", [RECIPE, GATED], ids=["mean", "gated"])
async def test_whoever_sends_two_payloads_is_banned_when_members_compare_them(network, tmp_path, recipe):
    circle = await make_circle(network, 3, recipe, tmp_path).start()
    await circle.round()
    byzantine, one, other = circle.seats
    garbled(byzantine, one.peer_id, bound=True, when=lambda: other.exchange._buffers.heard is not None)
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted), outcomes
    await until(lambda: one.guard.banned(byzantine.peer_id) and other.guard.banned(byzantine.peer_id), 30.0)
    assert "signed two results in round 2" in one.guard.bans.offence(byzantine.peer_id)
    assert not one.guard.refuses(other.peer_id)


async def test_whoever_sends_another_payload_than_it_is_bound_to_is_named_and_counted(network, tmp_path):
    circle = await make_circle(network, 3, folder=tmp_path).start()
    await circle.round()
    byzantine, one, _ = circle.seats
    garbled(byzantine, one.peer_id, bound=False)
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted), outcomes
    assert outcomes[1].culprit == byzantine.peer_id
    assert outcomes[1].reason == "it sent another payload than it had bound itself to"
    assert one.guard.strikes._pasts[byzantine.peer_id].offences == 1


async def test_nobody_sees_a_payload_before_it_is_bound_to_its_own(network):
    circle = await make_circle(network, 3).start()
    await circle.round()
    copier, one, other = circle.seats
    seen = []
    for seat in (one, other):
        stream = copier.exchange._group.outbound[seat.peer_id]
        hold(stream, copier, seen)
    outcomes = await one_round(circle)
    assert not any(isinstance(outcome, RoundAborted) for outcome in outcomes), outcomes
    assert len(seen) == 2
    assert {count for counts in seen for count in counts} == {0}


def hold(stream, copier, seen):
    """Its signature over what it is bound to goes out late; what it has heard of the others' payloads by then."""
    send = stream.send

    async def late(kind, body=b""):
        if kind is Kind.SEAL_SENT:
            inboxes = copier.exchange._buffers.inboxes.values()
            await asyncio.wait([inbox.sent for inbox in inboxes])  # the others are bound, and wait for this one
            for _ in range(50):
                await asyncio.sleep(0)
            seen.append([inbox.counts[Kind.REDUCED] for inbox in inboxes])
        await send(kind, body)

    stream.send = late


async def test_a_group_of_which_everybody_is_dropped_has_no_aggregate(network, monkeypatch):
    circle = await make_circle(network, 2, GATED).start()
    monkeypatch.setattr(Gated, "judged", refuse)
    with pytest.raises(RoundAborted, match="no aggregate: all 2 contributions were dropped"):
        await circle.round()


def refuse(*_):
    raise ValueError("all 2 contributions were dropped; the first: of a test")


async def test_a_diverged_member_says_so(network):
    circle = await make_circle(network, 2).start()
    await circle.round()
    locals_ = circle.locals()
    locals_[0][3] = torch.nan
    outcomes = await one_round(circle, locals_)
    assert all(isinstance(outcome, RoundAborted) for outcome in outcomes)
    assert "own contribution: local parameters hold NaN or infinity" in outcomes[0].reason
