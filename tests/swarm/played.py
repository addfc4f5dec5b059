"""A peer's rounds without a network: real state, memory and rounds; directory and trainer are played."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace

from peer.link.memory import SharedState
from peer.outer.compress.registry import compressor
from peer.outer.optim.optimizers import Nesterov
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat
from peer.protocol.manifest import DataSpec, InnerSpec, ModelSpec, RecipeSpec, RunManifest
from peer.swarm.lineage.round_loop import LineageRounds
from peer.swarm.loop import RunContext
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.store import StateStore
from tests.swarm.runs import RUN, make_state


def genesis_memory():
    """Shared memory that holds the genesis state of the tests' run."""
    plain = make_state()
    memory = SharedState(os.memfd_create("state"), plain.numel, 1)
    memory.anchor.copy_(plain.anchor)
    return memory


def state_in(memory):
    """The outer state of the tests' run that lies there."""
    wire = ReduceFormat(memory.anchor.numel(), compressor("int8"))
    return OuterState(memory.anchor, memory.buffers, Nesterov(lr=0.7, momentum=0.6), wire)


def rounds_at_genesis(network, folder, run, told, identity=None):
    """Real rounds of one member of `run`, or of somebody else, at genesis; everything around them played."""
    node = network.node(identity or run.identities[0])
    plain, memory = make_state(), genesis_memory()
    state = state_in(memory)
    state.lineage_id = plain.lineage_id
    manifest = RunManifest(
        name="a", model=ModelSpec(architecture="llama"), data=DataSpec(), inner=InnerSpec(),
        recipe=RecipeSpec(name="opendiloco", compressor="int8"), genesis=plain.lineage_id,
    )  # fmt: skip
    store = StateStore(memory, state, ChainStore(folder / "mine", plain.lineage_id))
    assert store.restore([]) is None

    async def refresh():
        """Nobody else is known."""

    directory = SimpleNamespace(
        peers={}, reachable={}, fresh=True, refresh=refresh, announce_soon=lambda: None, gate=None
    )
    directory.record = lambda peer_id: directory.peers.get(peer_id)
    directory.made_within = lambda _: set(directory.peers)
    context = RunContext(
        node=node, directory=directory, plan=replace(RunPlan.of(manifest), nominal_tokens=10_000),
        organiser=node.peer_id, trainer=SimpleNamespace(tell=told.append), rng=random.Random(1),
    )  # fmt: skip
    rounds = LineageRounds(context, store)
    fetcher = rounds._fork_choice.fetcher
    fetcher._run_id = fetcher.requests._run_id = rounds._fork_choice.claims.scout._run_id = RUN
    rounds.joined = True
    return rounds
