"""Gather rounds over real processes: sparse payloads to all, error feedback, kills, sleepers and newcomers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

from peer.outer.recipe.plan import wire_format
from peer.outer.recipe.resolve import resolve
from peer.outer.record import RoundRecord
from peer.outer.state.outer_state import OuterState
from peer.protocol.manifest import RecipeSpec
from tests.network.harness import TestSwarm
from tests.outer.reference import gathered

pytestmark = pytest.mark.timeout(300)
MakeSwarm = Callable[..., TestSwarm]
SPARSELOCO = "name: sparseloco, aggregator: {name: mean, normalise: members}"


def check_first_round(
    genesis: torch.Tensor, record: RoundRecord, following: RoundRecord, snapshots: dict[str, torch.Tensor]
) -> None:
    """It equals the reference, bit for bit; the round that follows names the state that it led to."""
    recipe = resolve(RecipeSpec(name="sparseloco"))
    written = wire_format(recipe, ((genesis.numel(),),), 3)
    state = OuterState(genesis.clone(), [], recipe.optimizer, written)
    senders = [written.sender(recipe.feedback) for _ in record.members]
    update = gathered(state, senders, [snapshots[peer_id] for peer_id in record.members], record.weights)
    assert record.update_digest == update.digest()
    state.apply(update, 1, record.lineage_id)
    assert following.state_digest == state.digest()
    changed = float((state.anchor != genesis).float().mean())
    assert 0.0 < changed <= len(senders) * 64 / 4096 + 0.01  # each member sends one value in 64, mostly the same ones


def test_sparse_rounds_equal_the_reference_and_stay_equal_when_peers_die_sleep_and_come(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5, wait=2.0, recipe=SPARSELOCO)
    genesis = swarm.bootstrap().genesis()
    members = swarm.add("a", "b", "c", "d")
    snapshots: dict[str, torch.Tensor] = {}

    def first_snapshots_then_rounds() -> bool:
        for member in members:
            assert member.sync is not None
            if member.round == 0:
                snapshots[member.peer_id] = member.sync.memory.snapshot.clone()
        return all(member.round >= 3 for member in members)

    swarm.drive(first_snapshots_then_rounds, 90.0)
    first, following = (
        next(record for member in members for record in member.committed if record.round == number) for number in (1, 2)
    )
    check_first_round(genesis, first, following, snapshots)  # of those that were in it: who came late was not
    members[3].kill()
    sleeper, others = members[2], members[:2]
    assert sleeper.agent.pid is not None
    sleeper.frozen = True
    os.kill(sleeper.agent.pid, signal.SIGSTOP)
    at = max(member.round for member in members)
    swarm.drive(lambda: all(member.round >= at + 3 for member in others), 90.0)
    os.kill(sleeper.agent.pid, signal.SIGCONT)
    sleeper.frozen = False
    # it replays, or, if it was the only one to hear the last vote before it fell asleep, yields that round for theirs;
    # a newcomer that came before that could make rounds with it, and then the others would yield
    swarm.drive(lambda: any(record.status == "caught_up" for record in sleeper.records), 90.0)
    (late,) = swarm.add("late")
    everybody = [*others, sleeper, late]
    assert len(swarm.drive_together(everybody, lambda: all(member.round >= at + 8 for member in everybody), 120.0)) == 1
    assert "caught up to round" in late.log_text()  # before its first anchor, up to which the test reads no record
    swarm.drive(lambda: bool(late.committed) and len(late.committed[-1].members) == 4, 60.0, pace_s=0.2)
