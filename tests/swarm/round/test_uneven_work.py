"""Rounds whose members do not all do the same: shards and payloads by what the signed joins say."""

from __future__ import annotations

import asyncio
import math

import pytest

from peer.outer.compress.registry import codec
from peer.outer.recipe.plan import wire_format
from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.round import RoundAborted
from peer.protocol.lineage import shares_of
from peer.protocol.manifest import RecipeSpec
from peer.protocol.wire import Kind
from tests.swarm.auditing import audit, slices_of
from tests.swarm.circle import Circle

NUMEL = 4000
PABA = swarm_recipe(RecipeSpec(name="paba", compressor="fp32", steps_per_round=30))
FED_BACK = swarm_recipe(RecipeSpec(name="paba", compressor="int8", feedback={"decay": 1.0}, steps_per_round=30))


async def make_circle(network, lines, recipe=PABA, folder=None):
    """One member for each claim of a line, in bytes a second."""
    written = wire_format(recipe, ((NUMEL,),), 7)
    circle = await Circle(network, len(lines), numel=NUMEL, recipe=recipe, written=written, folder=folder).start()
    for seat, up in zip(circle.seats, lines, strict=True):
        seat.rosters._allotter._up = up
    return circle


def shares(circle, group):
    places = {member.peer_id: member.share for member in group.members}
    return [places[seat.peer_id] for seat in circle.seats]


async def agreed(circle):
    """The shares of a round in the order of the seats, on which all agree, as on its state."""
    _, outcomes = await circle.round()
    assert len({seat.state.digest() for seat in circle.seats}) == 1
    assert len({tuple(shares(circle, group)) for group, _ in outcomes}) == 1
    link = circle.seats[0].chain[-1].link
    assert shares_of(link.roster) == tuple(member.share for member in outcomes[0][0].members)
    return shares(circle, outcomes[0][0])


@pytest.mark.parametrize("recipe", [PABA, FED_BACK], ids=["dense", "fed back"])
async def test_each_member_reduces_what_its_line_bears_and_all_agree_round_after_round(network, tmp_path, recipe):
    circle = await make_circle(network, [1e5, 1e5, 1e5, 7.5e4], recipe, tmp_path)
    cells = -(-NUMEL // circle.seats[0].state.wire.cell)
    for _ in range(4):
        found = await agreed(circle)
        assert sum(found) == cells
        # P (1 + 2 s) / b is the same for all: (1 + 0.6) / 1 = (1 + 0.2) / 0.75
        assert found == pytest.approx([cells * share for share in (0.3, 0.3, 0.3, 0.1)], abs=1.0)
        for reducer in range(4):
            for index in range(slices_of(circle, (reducer + 1) % 4, reducer)):
                assert (await audit(circle, (reducer + 1) % 4, reducer, index)).outcome == "right"
    chain, state = circle.seats[0].chain, circle.seats[0].state
    assert all(shares_of(certificate.link.roster) for certificate in chain)
    assert state.round == 4


async def test_a_member_that_boasts_moves_no_share_by_more_than_two_and_none_once_it_was_seen(network):
    circle = await make_circle(network, [1e5, 1e5, 1e8, 1e5])
    boasted = await agreed(circle)
    assert max(boasted) == boasted[2]
    assert all(NUMEL / 8 <= share <= NUMEL / 2 for share in boasted)
    await agreed(circle)
    for seat in circle.seats:
        seat.rosters.saw({other.peer_id: 1e5 / 3 for other in circle.seats if other is not seat})
        seat.rosters.saw = lambda _: None
    await agreed(circle)  # whose joins say what was seen
    assert await agreed(circle) == [NUMEL / 4] * 4


def takes(seat, seconds, slow=Kind.CONTRIBUTION, to=None):
    """Let each frame of this kind take so long from this member, as on a slow line; `to`: that member alone."""
    opening = seat.node.open

    async def opened(*arguments, **options):
        stream = await opening(*arguments, **options)
        send = stream.send

        async def sends(kind, *rest, **more):
            if kind is slow and to in (None, stream.remote):
                await asyncio.sleep(seconds)
            await send(kind, *rest, **more)

        stream.send = sends
        return stream

    seat.node.open = opened


async def test_a_round_waits_for_a_line_that_its_joins_call_slow_and_for_no_other(network):
    """16 kB both ways take 1.28 s longer on a line of 20 kB/s than on the usual one of 100 kB/s."""
    network.retime(min_exchange_s=0.3, soft_exchange_s=0.3)
    for line in (2e4, 1e5):
        circle = await make_circle(network, [1e5, 1e5, 1e5, line])
        for seat in circle.seats:
            seat.rosters._allotter._tokens_per_s = lambda seat=seat: seat.tokens / 40.0  # a round of 40 s
        takes(circle.seats[-1], 0.8)
        group = circle._first(circle.seats[0])
        longer_s = {seat.rosters.slow_line_s(group, 0) for seat in circle.seats}
        assert longer_s == ({2 * 4 * NUMEL * (1 / 2e4 - 1 / 1e5)} if line == 2e4 else {0.0})
        if line == 2e4:
            await agreed(circle)
        else:
            with pytest.raises(RoundAborted, match="deadline passed waiting for the"):
                await circle.round()


@pytest.mark.parametrize("line", [2e4, 1e5])
async def test_a_member_on_a_slow_line_has_time_to_read_what_comes_after_the_votes(network, line):
    network.retime(min_sending_s=0.2, min_exchange_s=20.0)
    circle = await make_circle(network, [1e5, 1e5, 1e5, line])
    for seat in circle.seats:
        seat.rosters._allotter._tokens_per_s = lambda seat=seat: seat.tokens / 40.0  # a round of 40 s
    first, *_, slow = circle.seats
    takes(first, 0.6, Kind.VOTE, slow.peer_id)
    work = zip(circle.seats, circle.locals(), strict=True)
    rounds = (circle.one_round(index, local, circle._first(seat)) for index, (seat, local) in enumerate(work))
    await asyncio.wait_for(asyncio.gather(*rounds), 20.0)
    stands = first.exchange.can_continue(first.position)
    assert stands == (frozenset(seat.peer_id for seat in circle.seats) if line == 2e4 else frozenset())


async def test_a_slow_uplink_sends_fewer_values_to_all(network):
    recipe = swarm_recipe(RecipeSpec(
        name="fusionllm-adatopk", aggregator="mean", allocator={"base_ratio": 0.1}, compressor="top410/4096+fp32",
    ))
    circle = await make_circle(network, [1e6, 1e6, 2.5e5], recipe)
    for _ in range(3):
        found = await agreed(circle)
        assert found == [round(4096 * 0.12), round(4096 * 0.12), round(4096 * 0.06)]
    sent = [seat.node.traffic["round"].sent for seat in circle.seats]
    fast, slow = (codec(f"top{k}/4096+fp32").wire_bytes(NUMEL) for k in (found[0], found[2]))
    assert sent[0] - sent[2] == pytest.approx(3 * 2 * (fast - slow), abs=50)  # three payloads to each of two others


def test_the_next_steps_of_each_follow_from_the_tokens_of_all(network):
    circle = Circle(network, 3, numel=NUMEL, recipe=PABA, codec="fp32")
    seat = circle.seats[0]
    first = circle._first(seat)
    steps = seat.rosters.allot(first, 1).steps
    tokens = [join.tokens for join in first.joins]
    assert all(math.isclose(own, 90 * part / sum(tokens), abs_tol=1.0) for own, part in zip(steps, tokens, strict=True))
    assert sum(steps) == 90
