"""Audits of reducers with error feedback, in real exchanges: they show what they carried on from."""

from __future__ import annotations

import asyncio
import logging

import pytest

from peer.outer.recipe.resolve import swarm_recipe
from peer.protocol.manifest import RecipeSpec
from tests.swarm.auditing import audit, heard, lies, slices_of, tampered_rounds
from tests.swarm.circle import Circle
from tests.swarm.gathering import until
from tests.swarm.tampering import Tampering

LAGOON = swarm_recipe(RecipeSpec(name="lagoon"))


async def lagoon(network, tmp_path, count=3):
    """A circle whose reducers feed back what their encodings lose."""
    return await Circle(
        network, count, numel=3000, codec="int2", recipe=LAGOON, elements=512, folder=tmp_path
    ).start()  # fmt: skip


async def test_reducers_with_error_feedback_are_audited_too_and_the_honest_never_accused(network, tmp_path):
    circle, carried = await lagoon(network, tmp_path, 4), 0
    for _ in range(8):
        await circle.round()
        for auditor in range(4):
            reducer = (auditor + 1) % 4
            for index in range(slices_of(circle, auditor, reducer)):
                assert (await audit(circle, auditor, reducer, index)).outcome == "right"
                reduction, payloads = await circle.seats[auditor].guard._auditor._slice_inputs(
                    heard(circle, auditor), circle.seats[reducer].peer_id, index
                )
                carried += bool(reduction.residue.carried) and any(payloads[-2])
    assert carried >= 8
    assert len({one.chain[-1].link.residuals for one in circle.seats}) == 1
    assert all(one.exchange._strategy._lost_in_reducing._since == 0 for one in circle.seats)


@pytest.mark.timeout(600)
async def test_one_tampered_slice_in_each_of_100_rounds_with_error_feedback_is_found(network, tmp_path):
    circle = await lagoon(network, tmp_path)
    byzantine = Tampering(LAGOON.aggregator)
    lies(circle, 0, byzantine)
    caught, accused = await tampered_rounds(circle, byzantine, 100, seed=6)
    assert caught >= 99
    assert accused == 0


async def test_a_reducer_that_cannot_show_what_it_carried_on_from_is_refused_and_never_banned(network, tmp_path):
    circle = await lagoon(network, tmp_path, 2)
    for _ in range(4):
        await circle.round()
    residual, one = circle.seats[0].exchange._strategy._lost_in_reducing._residual, circle.seats[1]
    for _ in range(3):
        assert not one.guard.refuses(circle.seats[0].peer_id)
        residual.vector += 0.5
        await circle.round()
        result = await audit(circle, 1, 0, 0)
        assert (result.outcome, result.detail) == ("not shown", "a residual that the reducer was not left with")
        await one.guard.take(result)
    assert one.guard.refuses(circle.seats[0].peer_id)
    assert not one.guard.banned(circle.seats[0].peer_id)


async def test_who_is_on_another_lineage_by_now_judges_nobody(network, tmp_path):
    circle = await lagoon(network, tmp_path, 2)
    for _ in range(2):
        await circle.round()
    one = circle.seats[1]
    del one.chain[:]
    result = await audit(circle, 1, 0, 0)
    assert result.outcome == "not judged"
    await one.guard.take(result)
    assert one.guard.strikes._pasts.get(circle.seats[0].peer_id) is None
    assert "not judged (round 2 of" in one.guard.notes()[0]


async def test_evidence_against_a_reducer_with_error_feedback_spreads(network, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    circle = await lagoon(network, tmp_path, 4)
    for _ in range(3):
        await circle.round()
    byzantine = Tampering(LAGOON.aggregator, {0: "flipped", 1: "flipped"})
    lies(circle, 0, byzantine)
    await circle.round()
    culprit = circle.seats[0].peer_id
    del circle.seats[3].chain[1:]  # it cannot judge, and blames nobody for it
    await circle.seats[1].guard.take(await audit(circle, 1, 0, 0))
    await until(lambda: circle.seats[2].guard.banned(culprit), 30.0)
    offers = f"{circle.seats[1].peer_id} offers evidence that this peer cannot judge"
    spreading, told = circle.seats[1].guard._evidence_gossip, (circle.seats[3].peer_id, culprit)
    await until(lambda: offers in caplog.text and told not in spreading._told, 30.0)
    assert not circle.seats[3].guard.banned(culprit)
    circle.seats[3].chain[:] = circle.seats[1].chain  # it is told again, once it is there
    await spreading.tell([circle.seats[3].peer_id], [culprit])
    await until(lambda: circle.seats[3].guard.banned(culprit), 30.0)
    assert not any(circle.seats[3].guard.refuses(seat.peer_id) for seat in circle.seats[1:])


async def test_who_has_left_the_lineage_of_an_offence_no_longer_offers_its_evidence(network, tmp_path):
    circle = await lagoon(network, tmp_path)
    for _ in range(2):
        await circle.round()
    lies(circle, 0, Tampering(LAGOON.aggregator, {0: "flipped", 1: "flipped"}))
    await circle.round()
    culprit, _, other = (seat.peer_id for seat in circle.seats)
    guard = circle.seats[1].guard
    found = (await audit(circle, 1, 0, 0)).found
    await asyncio.to_thread(guard.bans.add, found.verdict, found.evidence, found.payloads)
    del circle.seats[1].chain[1:]
    await guard._evidence_gossip.tell([other], [culprit])
    assert (other, culprit) in guard._evidence_gossip._told  # else it would try again in every round
    assert not circle.seats[2].guard.banned(culprit)
