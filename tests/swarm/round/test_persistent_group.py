from __future__ import annotations

import asyncio
import gc
import hashlib
import weakref

import numpy as np
import pytest
import torch

from peer.outer.compress.registry import compressor
from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.round import RoundAborted
from peer.protocol.manifest import RecipeSpec
from peer.protocol.wire import JoinMessage, Kind
from peer.swarm.group.roster import roster_order
from tests.outer.reference import reduced
from tests.swarm.circle import RECIPE, Circle
from tests.swarm.gathering import until
from tests.swarm.virtual_time import now

LAGOON = swarm_recipe(RecipeSpec(name="lagoon"))
CLIPPED = swarm_recipe(RecipeSpec(name="opendiloco", aggregator={"name": "clipped", "factor": 1.0}))


def reference(circle, group, locals_, recipe):
    """The update that this group must arrive at, computed part by part from whole payloads."""
    state = circle.seats[0].state
    by_id = {seat.peer_id: local for seat, local in zip(circle.seats, locals_, strict=True)}
    weights = [member.tokens for member in group.members]
    return reduced(state, [by_id[member.peer_id] for member in group.members], weights, recipe.aggregator)


@pytest.mark.parametrize(
    ("count", "codec", "elements", "recipe"),
    [(2, "int8", None, RECIPE), (3, "int8", 512, RECIPE), (4, "fp32", 100, RECIPE), (3, "int8", 512, CLIPPED)],
    ids=["two", "slices", "many slices", "whole parts"],
)
async def test_rounds_on_the_same_streams_equal_the_reference(network, count, codec, elements, recipe):
    circle = await Circle(network, count, numel=5000, codec=codec, recipe=recipe, elements=elements).start()
    kept = []
    for number in range(4):
        expected_of = circle.seats[0].state
        before = (expected_of.anchor.clone(), expected_of.lineage_id)
        locals_, outcomes = await circle.round()
        group, update = outcomes[0]
        order = [member.peer_id for member in group.members]
        assert order == roster_order(group.join.run_id, order)  # the same every round
        current = expected_of.anchor.clone()
        expected_of.anchor.copy_(before[0])
        assert reference(circle, group, locals_, recipe).payload == update.payload
        expected_of.anchor.copy_(current)
        assert {outcome[1].payload for outcome in outcomes} == {update.payload}
        assert {outcome[0].id for outcome in outcomes} == {group.id}
        assert {seat.state.digest() for seat in circle.seats} == {circle.seats[0].state.digest()}
        assert [member.tokens for member in group.members if member.peer_id == circle.seats[1].peer_id] == [200]
        assert {seat.state.round for seat in circle.seats} == {number + 1}
        kept += [(update, update.payload) for _, update in outcomes]
    assert all(update.payload == payload for update, payload in kept)  # no later round writes where one still lies
    assert [seat.streams for seat in circle.seats] == [count - 1] * count  # opened once, in the first round


async def test_feedback_on_both_legs_is_carried_from_round_to_round(network):
    circle = await Circle(network, 3, numel=3000, codec="int2", recipe=LAGOON, elements=512).start()
    anchor = circle.seats[0].state.anchor.clone()
    locals_, _ = await circle.round()
    for seat, local in zip(circle.seats, locals_, strict=True):
        codec, sent = compressor("int2"), anchor - local
        residual = seat.exchange._strategy._sender.residual
        assert torch.equal(residual.vector, sent - codec.decode(codec.encode(sent), 3000))
    for _ in range(2):
        await circle.round()
    for seat in circle.seats:
        assert seat.exchange._strategy._sender.residual._opened == []  # committed
    assert len({seat.state.digest() for seat in circle.seats}) == 1


async def test_a_member_that_leaves_ends_the_group_for_all_at_once(network):
    circle = await Circle(network, 3).start()
    await circle.round()
    assert circle.seats[0].exchange.can_continue(circle.seats[0].position) == {seat.peer_id for seat in circle.seats}
    waiting = [asyncio.ensure_future(circle.next_round(index, 30.0)) for index in (0, 1)]
    began = now()
    await circle.seats[2].exchange.dissolve(RoundAborted("match", "this peer leaves"))
    for task in waiting:
        with pytest.raises(RoundAborted) as caught:
            await asyncio.wait_for(task, 10.0)
        assert (caught.value.phase, caught.value.culprit) == ("match", circle.seats[2].peer_id)
    assert now() - began < 5.0
    for seat in circle.seats:
        assert seat.exchange.can_continue(seat.position) == frozenset()
        assert seat.state.round == 1


async def test_whoever_does_not_come_is_named_and_nothing_is_lost(network):
    circle = await Circle(network, 3, numel=3000, codec="int2", recipe=LAGOON, elements=512).start()
    await circle.round()
    before = [seat.exchange._strategy._sender.residual.vector.clone() for seat in circle.seats]
    with pytest.raises(RoundAborted, match="did not come within 0 s") as caught:
        await circle.next_round(0, 0.2)
    assert caught.value.culprit in {circle.seats[1].peer_id, circle.seats[2].peer_id}
    await circle.seats[0].exchange.dissolve(caught.value)
    for seat, residual in zip(circle.seats, before, strict=True):
        assert torch.equal(seat.exchange._strategy._sender.residual.vector, residual)
    assert circle.seats[1].calls == circle.seats[2].calls == 1  # they were told that somebody waits


async def test_who_is_ready_first_does_not_wait_for_the_others_when_a_newcomer_sits_there(network):
    circle = await Circle(network, 3).start()
    await circle.round()
    came = asyncio.Event()
    waiting = asyncio.ensure_future(circle.next_round(0, 30.0, came.wait))
    await asyncio.wait({waiting}, timeout=0.1)
    assert not waiting.done()
    came.set()
    with pytest.raises(RoundAborted, match="others want to take part") as caught:
        await asyncio.wait_for(waiting, 5.0)
    await circle.seats[0].exchange.dissolve(caught.value)
    for index in (1, 2):  # they learn of it when they are ready, or before
        await until(lambda index=index: not circle.seats[index].exchange.can_continue(circle.seats[index].position))


async def test_a_newcomer_that_does_not_come_changes_nothing(network):
    circle = await Circle(network, 3).start()
    await circle.round()
    groups = await asyncio.gather(*(circle.next_round(index, 30.0, asyncio.Event().wait) for index in range(3)))
    assert {len(group.members) for group in groups} == {3}


async def test_a_group_stands_only_where_it_committed(network):
    circle = await Circle(network, 2).start()
    assert circle.seats[0].exchange.can_continue(circle.seats[0].position) == frozenset()
    await circle.round()
    seat = circle.seats[0]
    assert seat.exchange.can_continue(seat.position)
    seat.state.lineage_id = hashlib.sha256(b"caught up elsewhere").hexdigest()
    assert seat.exchange.can_continue(seat.position) == frozenset()


@pytest.mark.parametrize("lie", ["another round", "another parent", "of another member", "garbage"])
async def test_a_false_join_ends_the_group_and_its_sender_is_named(network, lie):
    circle = await Circle(network, 3).start()
    await circle.round()
    byzantine, honest = circle.seats[2], circle.seats[0]
    position = byzantine.position
    if lie == "another round":
        position = type(position)(position.round + 1, position.lineage_id, position.weight)
    elif lie == "another parent":
        position = type(position)(position.round, hashlib.sha256(b"x").hexdigest(), position.weight)
    signer = circle.seats[1] if lie == "of another member" else byzantine
    sealed = b"\0" * 200 if lie == "garbage" else signer.rosters.join(position, 300)[1]
    stream = byzantine.exchange._group.outbound[honest.peer_id]
    waiting = asyncio.ensure_future(circle.next_round(0))
    await stream.send(Kind.JOIN, sealed)
    with pytest.raises(RoundAborted) as caught:
        await asyncio.wait_for(waiting, 10.0)
    assert caught.value.culprit == byzantine.peer_id
    assert honest.exchange.can_continue(honest.position) == frozenset()


async def test_a_weight_beyond_the_nominal_is_capped_in_a_persistent_group_too(network):
    circle = await Circle(network, 2).start()
    await circle.round()
    circle.seats[1].tokens = 10**9
    _, outcomes = await circle.round()
    assert sorted(member.tokens for member in outcomes[0][0].members) == [100, 10_000]
    assert isinstance(outcomes[0][0].join, JoinMessage)


async def test_a_group_does_not_stand_after_a_frame_that_was_given_up_half_way(network):
    network.retime(min_sending_s=0.2, min_exchange_s=20.0)  # the first for whoever does not read after the votes
    circle = await Circle(network, 4).start()
    await circle.round()
    slow = circle.seats[3]
    stream = circle.seats[0].exchange._group.outbound[slow.peer_id]
    send, vote = stream.send, Kind.VOTE

    async def stuck(kind, body=b""):
        if kind is not vote:
            return await send(kind, body)
        stream.sending = True  # the other end reads no more
        await asyncio.Event().wait()

    stream.send = stuck
    locals_, buffers = circle.locals(), circle.seats[0].exchange._group.buffers
    outcomes = await asyncio.gather(
        *(circle.one_round(index, local, None) for index, local in enumerate(locals_)), return_exceptions=True
    )
    assert circle.seats[0].state.round == 2, outcomes  # committed, and applied
    assert buffers.deadline > now()  # no member waited until it had passed
    assert circle.seats[0].exchange.can_continue(circle.seats[0].position) == frozenset()


async def test_a_stream_that_ends_between_rounds_ends_the_group_for_all(network):
    circle = await Circle(network, 3).start()
    await circle.round()
    one, two, byzantine = circle.seats
    byzantine.exchange._group.outbound[one.peer_id].close()  # the other one is not told
    began = now()
    with pytest.raises(RoundAborted) as caught:
        await circle.next_round(1, 8.0)
    assert caught.value.culprit == one.peer_id
    assert now() - began < 4.0
    assert two.exchange.can_continue(two.position) == frozenset()


async def test_nobody_waits_for_joins_to_a_group_that_has_ended(network):
    circle = await Circle(network, 3).start()
    await circle.round()
    one, _, byzantine = circle.seats
    waiting = asyncio.ensure_future(circle.next_round(0, 8.0))
    stream = byzantine.exchange._group.outbound[one.peer_id]
    await stream.send(Kind.JOIN, byzantine.rosters.join(byzantine.position, 300)[1])
    await stream.send(Kind.STATUS)
    began = now()
    with pytest.raises(RoundAborted) as caught:
        await waiting
    assert caught.value.culprit == byzantine.peer_id
    assert now() - began < 4.0


async def test_what_a_round_brought_is_free_once_it_is_applied(network):
    circle = await Circle(network, 3).start()
    await circle.round()
    before = [weakref.ref(seat.exchange._group.buffers) for seat in circle.seats]
    await circle.round()
    await until(lambda: gc.collect() >= 0 and [reference() for reference in before] == [None] * 3)


async def test_rounds_use_the_same_memory_and_give_it_back_when_none_follows(network):
    circle = await Circle(network, 2, numel=5000).start()

    def places(update):
        return {np.frombuffer(part, np.uint8).ctypes.data for part in update.payloads}

    _, outcomes = await circle.round()
    first = [places(update) for _, update in outcomes]
    del outcomes
    _, outcomes = await circle.round()
    assert [places(update) for _, update in outcomes] == first
    own = circle.seats[0].exchange._pool
    assert own.size == sum(map(len, outcomes[0][1].payloads))
    network.retime(buffer_kept_s=0.0)
    await circle.round()
    await until(lambda: own.size == 0)
