"""Audits of reducers in real exchanges: who lies is convicted, and nobody else ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from peer.outer.compose import swarm_recipe
from peer.protocol.evidence import Evidence
from peer.protocol.manifest import RecipeSpec
from peer.protocol.records import dump_json, parse_json
from peer.swarm.judge import Judge, NoEvidenceError
from tests.swarm.circle import RECIPE, Circle
from tests.swarm.gathering import until
from tests.swarm.liars import TAMPERINGS, Tampering
from tests.swarm.runs import RUN


def lies(circle, index, tampering):
    """Let one seat reduce with another aggregator than it says."""
    circle.seats[index].exchange._work._aggregator = tampering


def heard(circle, index):
    """What a member was told in the round that has just ended."""
    return circle.seats[index].guard._showing._heard


def units_of(circle, index, reducer):
    return len(heard(circle, index).reduced[circle.seats[reducer].peer_id][1])


async def audit(circle, auditor, reducer, unit):
    seat = circle.seats[auditor]
    return await seat.guard._auditor.audit(heard(circle, auditor), circle.seats[reducer].peer_id, unit)


async def test_one_tampered_unit_in_each_of_200_rounds_is_found_by_whoever_audits_it(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    liar = Tampering(RECIPE.aggregator)
    lies(circle, 0, liar)
    rng, caught, accused = random.Random(5), 0, 0
    for trial in range(200):
        unit = rng.randrange(2)
        liar.lies[len(liar.calls) + unit] = rng.choice(list(TAMPERINGS))
        await circle.round()
        assert units_of(circle, 1, 0) == 2
        result = await audit(circle, 1 + trial % 2, 0, unit)
        caught += result.outcome == "false"
        assert result.found is None or result.found.verdict.culprit == circle.seats[0].peer_id
        others = [(2 - trial % 2, 0, 1 - unit), (1, 2, unit), (2, 1, unit)]
        accused += sum([(await audit(circle, *one)).outcome != "right" for one in others])
    assert caught >= 198
    assert accused == 0
