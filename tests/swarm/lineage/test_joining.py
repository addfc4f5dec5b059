"""Where a newcomer begins, and with whom a round begins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peer.outer.round import Due, RoundAborted
from peer.protocol.checkpoints import Checkpoint
from tests.swarm.donor import ScriptedDonor
from tests.swarm.gathering import until
from tests.swarm.played import rounds_at_genesis
from tests.swarm.runs import RUN, Run


@pytest.mark.parametrize("introduced", [False, True], ids=["by a checkpoint", "by its introducer"])
async def test_a_newcomer_begins_no_run_anew_that_was_further(network, tmp_path, caplog, introduced):
    """All that hold the state may have died: those who come then must not train on the genesis as if it were a run."""
    network.retime(recheck_s=0.01, refresh_period_s=0.01)
    run, told = Run(tmp_path / "others"), []
    run.commit(3)
    rounds = rounds_at_genesis(network, tmp_path, run, told)
    rounds.joined = False
    tip = Checkpoint(run_id=RUN, round=3, lineage_id=run.state.lineage_id, serial=1, signed_at=0.0)
    rounds.checkpoints.introduced, rounds.checkpoints.newest = (tip, None) if introduced else (None, tip)
    joining = asyncio.ensure_future(rounds.join(None))
    await until(lambda: "the run was at round 3, and no peer in sight shows a chain that leads there" in caplog.text)
    assert (rounds.joined, joining.done(), told) == (False, False, [])
    with pytest.raises(RoundAborted, match="the run was at round 3") as caught:
        await rounds.match(Due(1, 100, rounds.store.memory.snapshot))
    assert caught.value.behind
    donor = await ScriptedDonor(network.node(), run).start()
    rounds._fork_choice.claims.nudge(donor.peer_id, run.state.lineage_id)
    await asyncio.wait_for(joining, 5.0)
    assert (rounds.joined, rounds.position().round) == (True, 3)


async def test_a_group_whose_roster_came_too_late_makes_no_round(network, tmp_path):
    run = Run(tmp_path / "others")
    rounds = rounds_at_genesis(network, tmp_path, run, [])
    group, declined = SimpleNamespace(id="late", others=("x", "y"), leader="x"), []

    async def match(_):
        return group

    rounds._matchmaker.match, rounds._matchmaker.included = match, lambda _: None
    due = Due(1, 100, rounds.store.memory.snapshot)
    assert await rounds.match(due) is group
    rounds._exchange.group_streams.decline = lambda group, _: declined.append(group.id)
    rounds._exchange.group_streams._told["late", "x"] = None  # its leader alone, before it sent the roster
    assert await rounds.match(due) is group
    rounds._exchange.group_streams._told["late", "y"] = None
    with pytest.raises(RoundAborted, match="the roster came too late"):
        await rounds.match(due)
    assert declined == ["late"]


@pytest.mark.parametrize("joined", [True, False])
async def test_a_group_re_forms_for_a_newcomer_unless_most_others_have_joined(network, tmp_path, joined):
    rounds = rounds_at_genesis(network, tmp_path, Run(tmp_path / "others"), [])
    stays, forms = SimpleNamespace(others=()), SimpleNamespace(id="new", others=(), leader="")

    async def next_round(*_):
        return stays

    async def match(_):
        return forms

    rounds._exchange.can_continue, rounds._exchange.next_round = lambda _: frozenset("abc"), next_round
    rounds._exchange.most_wait = lambda: joined
    rounds._matchmaker.newcomers, rounds._matchmaker.match = lambda _: ["x"], match
    rounds._matchmaker.included = lambda _: None
    assert await rounds.match(Due(1, 100, rounds.store.memory.snapshot)) is (stays if joined else forms)


async def test_few_who_have_waited_for_the_others_in_vain_wait_once(network, tmp_path):
    run = Run(tmp_path / "others")
    rounds = rounds_at_genesis(network, tmp_path, run, [])
    me, due = rounds._node.peer_id, Due(1, 100, rounds.store.memory.snapshot)
    rounds._fork_choice.claims.scout.followed = lambda members: "many" in members
    rounds._matchmaker.included = lambda _: None

    async def match_with(*others):
        async def match(_):
            return SimpleNamespace(id="group", others=others, leader="")

        rounds._matchmaker.match = match
        await rounds.match(due)

    assert not rounds.followed({me, "b"})
    await match_with("b")
    assert rounds.followed({me, "b"})
    assert rounds.followed({me, "b", "c"})
    assert not rounds.followed({me, "c"})
    await match_with("b", "many")  # they are back
    assert not rounds.followed({me, "b"})
