"""Gossip rounds over a `MemoryNetwork`: production `GossipRounds`, whose trainer and directory the test plays."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import torch

from peer.link.memory import SharedState
from peer.link.messages import Anchor, RoundEnded, Snapshot, WantSnapshot
from peer.link.supervisor import create_descriptor
from peer.outer.compress.registry import compressor
from peer.outer.recipe.plan import RunPlan, fragments_of, wire_format
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat
from peer.protocol.identity import Identity
from peer.protocol.manifest import RunManifest
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.history_server import HistoryServer
from peer.swarm.gossip.group_draw import number_of
from peer.swarm.gossip.round_loop import GossipRounds
from peer.swarm.gossip.store import LocalStateStore
from peer.swarm.loop import RunContext
from peer.swarm.state.chain import ChainStore

NOMINAL = 10_000
NOLOCO = {"name": "noloco"}


def plain_groups(size):
    """Plain averaging of parameters in groups: Moshpit SGD."""
    return {"name": "fedavg", "payload": "parameters", "topology": {"name": "groups", "size": size}}


def manifest_of(recipe, genesis, **rounds):
    return RunManifest.model_validate(
        {
            "name": "gossip", "seed": 5, "model": {"architecture": "llama", "config": {}}, "recipe": recipe,
            "trust": {"mode": "private"}, "rounds": {"straggler_wait_s": 1.0, "timeout_s": 20.0, **rounds},
            "genesis": genesis,
        }
    )  # fmt: skip


class PlayedDirectory:
    """The records of all peers of a test, as they are at this moment."""

    def __init__(self, owner):
        self._owner = owner
        self.hidden = set()

    @property
    def peers(self):
        others = (peer for peer in self._owner.all if peer is not self._owner and peer.peer_id not in self.hidden)
        return {peer.peer_id: peer.record() for peer in others if peer.alive}

    @property
    def reachable(self):
        return self.peers

    async def refresh(self):
        pass

    def announce_soon(self):
        pass


class GossipPeer:
    """One peer; `local` is what its trainer holds."""

    def __init__(self, everybody, node, recipe, anchor, folder, elements, sizes=(), **rounds):
        self.all, self.node, self.alive, self.folder = everybody, node, True, folder
        genesis = anchor.clone()
        probe = RunPlan.of(manifest_of(recipe, "0" * 64, **rounds)).recipe
        initial = probe.optimizer.initial_values
        memory = SharedState(create_descriptor(), anchor.numel(), len(initial))
        memory.anchor.copy_(genesis)
        for buffer, value in zip(memory.buffers, initial, strict=True):
            buffer.fill_(value)
        if probe.exchange == "gather":
            wire = wire_format(probe, [(anchor.numel(),)], seed=5)
        else:
            wire = ReduceFormat(anchor.numel(), compressor(probe.compressor), elements)
        if probe.num_fragments > 1:
            wire = fragments_of(probe, [(size,) for size in sizes], sizes, seed=5)
        self.state = OuterState(memory.anchor, memory.buffers, probe.optimizer, wire)
        self.manifest = manifest_of(recipe, self.state.digest(), **rounds)
        self.memory, self.directory = memory, PlayedDirectory(self)
        self.store = LocalStateStore(memory, self.state, ChainStore(folder, self.manifest.genesis))
        self.store.restore()
        self.records, self.wanted = [], 0
        context = RunContext(
            node=node, directory=self.directory, plan=replace(RunPlan.of(self.manifest), nominal_tokens=NOMINAL),
            organiser="organiser", trainer=self, rng=random.Random(0),
        )  # fmt: skip
        self.rounds = GossipRounds(context, self.store)
        self.local, self._sequence = anchor.clone(), 0
        self.recorded = asyncio.Event()

    @property
    def peer_id(self):
        return self.node.peer_id

    @property
    def number(self):
        return number_of(self.manifest.run_id, self.peer_id)

    def record(self):
        position = self.rounds.position()
        return PeerRecord(
            run_id=self.manifest.run_id, nickname="x", state="training" if self.rounds.joined else "joining",
            round=position.round, lineage_id=position.lineage_id, lineage_weight=0, lines=self.rounds.lines,
            expires_at=1e10,
        )  # fmt: skip

    def tell(self, message):
        if isinstance(message, RoundEnded):
            self.records.append(message.record)
            self.recorded.set()
        elif isinstance(message, Anchor):
            if message.contributed is not None or self._sequence == 0:
                own = slice(*self.state.fragments.bounds[message.fragment or 0]) if message.contributed else slice(None)
                self.local[own] = self.memory.anchor[own]  # no step was made meanwhile
            self.rounds.slot.on_merged()
        elif isinstance(message, WantSnapshot):
            self.wanted += 1

    async def start(self):
        await self.rounds.start()
        snapshot_cache = self.store.snapshot_cache
        await HistoryServer(
            self.node, self.manifest.run_id, self.store.history, snapshot_cache, snapshot_cache.priority
        ).start()
        await self.rounds.join(None)
        self.node.spawn(self.rounds.run())

    def contribute(self, tokens=100):
        self._sequence += 1
        part = self.state.part
        self.memory.snapshot[: part.stop - part.start] = self.local[part.start : part.stop]
        self.recorded.clear()
        self.rounds.slot.on_snapshot(Snapshot(sequence=self._sequence, tokens=tokens))

    async def round(self, tokens=100):
        """Contribute, and return what the round came to."""
        self.contribute(tokens)
        await asyncio.wait_for(self.recorded.wait(), 30.0)
        return self.records[-1]


async def gossip(network, folder, recipe, count, *, numel=300, elements=128, **rounds):
    """`count` peers at genesis who see each other, in the order of their numbers."""
    anchor, everybody = torch.sin(torch.arange(numel, dtype=torch.float32)), []
    nodes = [network.node(Identity.generate()) for _ in range(count)]
    for index, node in enumerate(nodes):
        everybody.append(GossipPeer(everybody, node, recipe, anchor, folder / str(index), elements, **rounds))
    everybody.sort(key=lambda peer: peer.number)
    for peer in everybody:
        await peer.start()
    return everybody


def scatter(peers, seed=0):
    """Each trainer moves somewhere else."""
    generator = torch.Generator().manual_seed(seed)
    for peer in peers:
        peer.local += 0.1 * torch.randn(peer.local.numel(), generator=generator)


async def everybody_rounds(peers, tokens=None):
    """A round of all; -> their records."""
    weights = tokens or [100] * len(peers)
    return await asyncio.gather(*(peer.round(own) for peer, own in zip(peers, weights, strict=True)))


def spread(peers):
    """The largest distance of a peer's parameters from the mean."""
    mean = torch.stack([peer.local for peer in peers]).mean(0)
    return max(float((peer.local - mean).norm()) for peer in peers)
