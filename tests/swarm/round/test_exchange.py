from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from peer.outer.compress.registry import COMPRESSORS
from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.round import RoundAborted, link_of
from peer.outer.state.outer_state import CHUNK
from peer.outer.state.reduced_update import Update
from peer.protocol.manifest import RecipeSpec
from peer.protocol.wire import Kind
from peer.swarm.net.stream import FrameStream
from peer.swarm.round.deadline import DeadlineEstimator
from peer.swarm.round.signatures import MalformedError
from peer.swarm.runtime.timing import STANDARD
from tests.outer.reference import reduced
from tests.swarm.runs import contributions
from tests.swarm.table import Table
from tests.swarm.virtual_time import now

GATED = swarm_recipe(RecipeSpec(name="opendiloco", aggregator="gated"))
NAN_SCALE = b"\x00\x00\xc0\x7f"
pytestmark = pytest.mark.usefixtures("arithmetic")


def contribution_of(table, byzantine, to):
    """What an honest `byzantine` would send to `to` for its shard."""
    state = table.states[byzantine]
    return state.source(table.locals[byzantine]).encode(state.wire.codec, *state.wire.bounds(len(table.nodes))[to])


@pytest.mark.parametrize(
    ("count", "codec", "numel"),
    [(2, "int8", 2000), (3, "int8", 2000), (3, "fp32", 10), (5, "int8", 300), (3, "int4", 2 * CHUNK + 77)],
)
async def test_all_members_get_the_same_update_and_it_is_the_reference(network, count, codec, numel):
    table = Table(network, count, codec=codec, numel=numel)
    expected = reduced(table.states[0], table.locals, table.weights)
    outcomes = await table.all()
    assert [outcome.update.payload for outcome in outcomes] == [expected.payload] * count
    assert [outcome.update.digest() for outcome in outcomes] == [expected.digest()] * count
    assert all(outcome.cosine is None or abs(outcome.cosine) <= 1.0 for outcome in outcomes)
    sent = sum(node.traffic["round"].sent for node in table.nodes)
    assert sent == sum(node.traffic["round"].received for node in table.nodes)
    assert sent >= 2 * (count - 1) * len(expected.payload)
    for state in table.states:
        assert state.round == 0
        assert state.digest() == table.states[0].lineage_id


async def test_contributions_go_before_reduced_slices(network, monkeypatch):
    sent, send = {}, FrameStream.send

    async def noted(stream, kind, body=b"", **options):
        sent.setdefault(stream, []).append(kind)
        await send(stream, kind, body, **options)

    monkeypatch.setattr(FrameStream, "send", noted)
    await Table(network, 2, codec="int8", numel=4 * CHUNK).all()
    orders = [[kind for kind in kinds if kind in (Kind.CONTRIBUTION, Kind.REDUCED)] for kinds in sent.values()]
    orders = [order for order in orders if order]
    assert len(orders) == 2
    for order in orders:
        assert order == [Kind.CONTRIBUTION] * (len(order) // 2) + [Kind.REDUCED] * (len(order) // 2)
        assert len(order) >= 8


@pytest.mark.parametrize("value", [3e38, 2.0**48])
async def test_who_sends_values_that_cannot_be_applied_is_named(network, value):
    """Else each honest member would give the round up, and blame no member for it."""
    table = Table(network, 3, codec="fp32", numel=12)
    table.locals[1] = torch.full((12,), -value)
    outcomes = await table.all()
    assert {type(outcomes[index]) for index in (0, 2)} == {MalformedError}
    assert {outcomes[index].culprit for index in (0, 2)} == {table.nodes[1].peer_id}
    assert "more than 1.4e+14 is not applied" in str(outcomes[0])


async def test_who_reduces_to_values_that_cannot_be_applied_is_named(network):
    table = Table(network, 3, codec="fp32", numel=12)
    outcomes, codec = await table.all(), COMPRESSORS["fp32"]
    for index, place in ((0, 1), (2, 1), (0, 2)):
        payloads = [codec.encode(torch.full((4,), 4e14 if shard == place else 1.0)) for shard in range(3)]
        lie = replace(outcomes[index], update=Update(tuple(payloads), 12, codec))
        with pytest.raises(RoundAborted, match=r"values \[0, 12\) of the update may reach 4e\+14") as caught:
            await link_of(table.groups[index], lie, table.states[index], table.states[index].digest())
        assert caught.value.culprit == table.groups[index].members[place].peer_id


async def test_the_weights_are_the_rosters(network):
    table = Table(network, 2)
    table.locals[0] = table.states[0].anchor - 3.0
    table.locals[1] = table.states[0].anchor.clone()
    (one, _) = await table.all()
    mean = one.update.decode_range(0, table.states[0].numel)
    torch.testing.assert_close(mean, torch.full_like(mean, 3.0 * 100 / 300), rtol=0.01, atol=0.0)


async def test_a_member_may_start_late_and_rounds_follow_each_other(network):
    table = Table(network, 3)
    await table.exchanges[2].start()
    early = [asyncio.ensure_future(work) for work in (table.all([0]), table.all([1]))]
    await asyncio.wait(early, timeout=0.05)
    outcomes = [*await table.all([2]), *(await early[0]), *(await early[1])]
    assert len({outcome.update.payload for outcome in outcomes}) == 1
    for exchange, group in zip(table.exchanges, table.groups, strict=True):
        await exchange.release(group, None)
    again = await table.all()
    assert again[0].update.payload == outcomes[0].update.payload


async def aborts(table, honest):
    outcomes = await table.all(honest)
    assert all(isinstance(outcome, RoundAborted) for outcome in outcomes), outcomes
    for index in honest:
        assert table.states[index].digest() == table.states[index].lineage_id
    return outcomes


@pytest.mark.parametrize(
    ("body", "reason"),
    [(lambda n: NAN_SCALE * (n // 4) + bytes(n % 4), "malformed contribution"), (lambda n: bytes(n - 1), "must be"),
     (lambda n: bytes(n + 1), "the limit is"), (lambda _: b"", "must be")],
    ids=["nan", "short", "long", "empty"],
)  # fmt: skip
async def test_a_bad_contribution_aborts_the_round_and_is_named(network, body, reason):
    table = Table(network, 3)
    await table.absorb(2)
    for exchange in table.exchanges[:2]:
        await exchange.start()
    work = asyncio.ensure_future(aborts(table, [0, 1]))
    streams = [await table.speak(2, to, (Kind.CONTRIBUTION, body(table.contribution_bytes(to)))) for to in (0, 1)]
    for abort in await work:
        assert (abort.phase, abort.culprit) == ("exchange", table.nodes[2].peer_id)
        assert reason in abort.reason
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("reduced", ["bad scale", "short"])
async def test_a_bad_mean_aborts_the_round_and_its_reducer_is_named(network, reduced):
    table = Table(network, 3)
    await table.absorb(2)
    for exchange in table.exchanges[:2]:
        await exchange.start()
    work = asyncio.ensure_future(aborts(table, [0, 1]))
    size = table.contribution_bytes(2)
    body = b"\xff" * size if reduced == "bad scale" else bytes(size - 4)
    for to in (0, 1):
        await table.speak(2, to, (Kind.CONTRIBUTION, contribution_of(table, 2, to)), (Kind.REDUCED, body))
    for abort in await work:
        assert (abort.phase, abort.culprit) == ("exchange", table.nodes[2].peer_id)


@pytest.mark.parametrize("stage", ["nothing", "hello", "contribution"])
async def test_a_silent_member_ends_the_round_at_its_deadline_and_is_named(network, stage):
    table = Table(network, 3, timeout_s=0.4)
    await table.absorb(2)
    for exchange in table.exchanges[:2]:
        await exchange.start()
    began = now()
    work = asyncio.ensure_future(aborts(table, [0, 1]))
    for to in (0, 1) if stage != "nothing" else ():
        said = [(Kind.CONTRIBUTION, contribution_of(table, 2, to))] if stage == "contribution" else []
        await table.speak(2, to, *said)
    for abort in await work:
        assert "deadline passed waiting for the" in abort.reason
        assert abort.culprit == table.nodes[2].peer_id
    assert 0.4 <= now() - began < 3.0


async def test_a_member_that_cannot_be_reached_or_leaves_is_named_at_once(network):
    table = Table(network, 3, timeout_s=30.0)
    network.cut(table.nodes[2].peer_id)
    for abort in await aborts(table, [0, 1]):
        assert (abort.phase, abort.culprit) == ("exchange", table.nodes[2].peer_id)
    table = Table(network, 2, timeout_s=30.0)
    await table.absorb(1)
    await table.exchanges[0].start()
    work = asyncio.ensure_future(aborts(table, [0]))
    (await table.speak(1, 0)).close()
    (abort,) = await work
    assert abort.culprit == table.nodes[1].peer_id
    assert "stream ended" in abort.reason


async def test_a_member_that_has_diverged_names_itself(network):
    table = Table(network, 2, timeout_s=1.0)
    table.locals[0][7] = float("nan")
    outcomes = await table.all()
    assert "own contribution" in outcomes[0].reason
    assert outcomes[0].culprit == table.nodes[0].peer_id


async def test_an_abort_reaches_the_others_at_once_with_its_culprit(network):
    table = Table(network, 3, timeout_s=30.0)
    await table.absorb(2)
    for exchange in table.exchanges[:2]:
        await exchange.start()
    began = now()
    first, second = (asyncio.ensure_future(table.exchange(index)) for index in (0, 1))
    # to the first alone; the second waits
    await table.speak(2, 0, (Kind.CONTRIBUTION, b"\xff" * table.contribution_bytes(0)))
    with pytest.raises(RoundAborted, match="malformed contribution") as caught:
        await first
    await table.exchanges[0].release(table.groups[0], caught.value)
    with pytest.raises(RoundAborted, match="gave up: malformed contribution") as told:
        await second
    assert told.value.culprit == table.nodes[2].peer_id
    assert now() - began < 5.0


def test_the_budget_follows_what_bytes_took_within_the_cap():
    budget = DeadlineEstimator(100.0, STANDARD.min_exchange_s)
    assert budget.seconds(10_000_000) == STANDARD.min_exchange_s + 80.0
    budget.learn(10_000_000, 2.0)
    assert budget.seconds(10_000_000) == STANDARD.min_exchange_s + 8.0
    assert budget.seconds(10**12) == 100.0


async def test_a_deadline_that_was_too_short_for_a_slow_member_grows(network):
    network.retime(min_exchange_s=0.1)
    table = Table(network, 2, timeout_s=0.5)
    await table.absorb(1)
    exchange, budgets = table.exchanges[0], []
    for _ in range(4):
        with pytest.raises(RoundAborted, match="deadline passed") as caught:
            await table.exchange(0)
        budgets.append(exchange._budget.seconds(exchange._buffers.wire_bytes))
        await exchange.release(table.groups[0], caught.value)
    assert budgets == sorted(budgets)
    assert (budgets[0] > 0.15, budgets[-1]) == (True, 0.5)


async def test_gates_drop_a_malformed_slice_and_the_round_goes_on_with_the_reason_on_record(network):
    table = Table(network, 4, recipe=GATED, timeout_s=5.0)
    byzantine = table.nodes[3].peer_id
    bounds = table.states[3].wire.bounds(4)
    own = [contribution_of(table, 3, to) for to in range(4)]

    async def malformed(start, stop, leaves):
        piece = own[bounds.index((start, stop))]
        sent = NAN_SCALE * (len(piece) // 4) + bytes(len(piece) % 4) if start == 0 else piece
        leaves.add(sent)
        return sent

    table.exchanges[3]._strategy.contribution = lambda *_: malformed
    outcomes = await table.all()
    assert len({outcome.update.payload for outcome in outcomes}) == 1
    assert [(drop.peer_id, drop.slices, drop.of, drop.reason) for drop in outcomes[0].dropped] == [
        (byzantine, 1, 1, "holds NaN or infinity")
    ]
    assert all(not outcome.dropped for outcome in outcomes[1:])


async def test_who_sends_a_thousand_times_too_much_is_left_out_everywhere(network):
    table = Table(network, 4, recipe=GATED)
    state = table.states[0]
    shared = torch.randn(state.numel, generator=torch.Generator().manual_seed(7))
    table.locals = [local - 0.01 * shared for local in contributions(state, 4, seed=1)]  # cosines of about .5
    honest = list(table.locals)
    table.locals[2] = state.anchor + 1000.0 * (table.locals[2] - state.anchor)
    outcomes = await table.all()
    for outcome in outcomes:
        assert [drop.peer_id for drop in outcome.dropped] == [table.nodes[2].peer_id]
        assert "is above 3 x the median" in outcome.dropped[0].reason
    weights = [weight for index, weight in enumerate(table.weights) if index != 2]
    kept = [state.anchor - honest[index] for index in (0, 1, 3)]
    mean = sum(weight * delta for weight, delta in zip(weights, kept, strict=True)) / sum(weights)
    update = outcomes[0].update.decode_range(0, state.numel)
    assert float(torch.nn.functional.cosine_similarity(update, mean, dim=0)) > 0.995
