"""A peer of production rounds with a played trainer, for whole swarms in one process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from peer.link.messages import Anchor, Progress, RoundEnded, Snapshot, WantSnapshot
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import DataSpec, InnerSpec, ModelSpec, RecipeSpec, RoundSpec, RunManifest
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.history_server import HistoryServer
from peer.swarm.lineage.round_loop import LineageRounds
from peer.swarm.loop import RunContext
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.store import StateStore
from tests.swarm.played import genesis_memory, state_in
from tests.swarm.runs import make_state

TOKENS = 1000  # of a regular contribution


def manifest_of(window_s, timeout_s, min_group=2, max_group=16):
    """Of a run of the tests' state, with these waits."""
    return RunManifest(
        name="a", model=ModelSpec(architecture="llama"), data=DataSpec(), inner=InnerSpec(),
        recipe=RecipeSpec(name="opendiloco", compressor="int8"), genesis=make_state().lineage_id,
        rounds=RoundSpec(straggler_wait_s=window_s, timeout_s=timeout_s, min_group=min_group, max_group=max_group),
    )  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Of a trainer.

    Attributes:
        train_s: from an anchor to a contribution.
        step_s: of a step; asked for what it has, the trainer answers at the end of one.
    """

    train_s: float
    step_s: float


class TrainingPeer:
    """Production rounds; its trainer is played.

    Args:
        number: what it draws, and trains.
        directory: where it sees the others; what the tests play, or the real one.
        memory: the state that an earlier life of it left; None: the genesis.
        heard: called with each record of a round of this peer.
    """

    def __init__(
        self, number: int, node: Any, directory: Any, manifest: RunManifest, folder: Any, pace: Pace,
        *, memory: Any = None, heard: Callable[[Any], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.number, self.node, self.directory, self.pace, self.heard = number, node, directory, pace, heard
        self.silent, self._sequence, self._rng = False, 0, random.Random(number)
        self._training: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()
        self._since = self._marked = self.loop.time()  # from here: not counted; not handed over
        self.memory = memory or genesis_memory()
        history = ChainStore(folder, manifest.genesis)
        self.store = StateStore(self.memory, state_in(self.memory), history, node.timing)
        self._resumed = self.store.restore([history.chain_path])
        context = RunContext(
            node=node, directory=directory, organiser=node.peer_id, trainer=self, rng=random.Random(number),
            plan=replace(RunPlan.of(manifest), nominal_tokens=TOKENS),
        )  # fmt: skip
        self.rounds = LineageRounds(context, self.store)
        self.rounds.slot.reports.clock = node.clock
        self._run_id = manifest.run_id

    def record(self, expires_at):
        """As its directory publishes it."""
        position = self.rounds.position()
        return PeerRecord(
            run_id=self._run_id, nickname="x", state=self.rounds.state, round=position.round,
            lineage_id=position.lineage_id, lineage_weight=position.weight, expires_at=expires_at,
        )  # fmt: skip

    def tell(self, message):
        """What the trainer hears of its agent."""
        if isinstance(message, RoundEnded):
            self.heard(message.record)
        elif isinstance(message, Anchor):
            self.loop.call_soon(self.rounds.slot.on_merged)
            if message.contributed is not None and message.contributed == self._sequence:
                self._since = self._marked  # it counted; what did not is kept
            self._train(max(self._rng.uniform(0.0, self.pace.step_s), self._due_in_s))
        elif isinstance(message, WantSnapshot):
            self._train(self._rng.uniform(0.0, self.pace.step_s))

    @property
    def _due_in_s(self):
        """Seconds until enough is trained for a round."""
        return max(0.0, self.pace.train_s - (self.loop.time() - self._since))

    @property
    def _unsent(self):
        return int(TOKENS * (self.loop.time() - self._since) / self.pace.train_s)

    def _train(self, seconds):
        """Contribute in so many seconds, in place of what was to be contributed before."""
        self.rest()
        self.rounds.slot.on_progress(Progress(
            step=0, tokens=0, tokens_per_s=TOKENS / self.pace.train_s, loss=None, due_in_s=max(seconds, self._due_in_s),
            unsent_tokens=self._unsent, seconds_waiting=0.0,
        ))  # fmt: skip
        self._training = self.loop.call_later(seconds, self._contribute)

    def slept(self, seconds):
        """The machine was asleep, and trained nothing."""
        self._since, self._marked = self._since + seconds, self._marked + seconds

    def rest(self):
        """Contribute nothing more, until asked again."""
        if self._training is not None:
            self._training.cancel()

    def _contribute(self):
        if self.silent:
            return
        self._sequence, self._marked, tokens = self._sequence + 1, self.loop.time(), max(1, self._unsent)
        generator = torch.Generator().manual_seed(100 * self.number + self._sequence)
        anchor = self.memory.anchor
        self.memory.snapshot.copy_(anchor + 0.01 * torch.randn(len(anchor), generator=generator))
        self.rounds.slot.on_snapshot(Snapshot(sequence=self._sequence, tokens=tokens))

    async def start(self):
        """Take streams, as an agent does."""
        await self.rounds.start()
        cache, history = self.store.snapshot_cache, self.store.history
        await HistoryServer(
            self.node, self._run_id, history, cache, cache.priority, self.rounds.on_return
        ).start()

    async def run(self):
        """Join, and make rounds."""
        await self.rounds.join(self._resumed)
        await self.rounds.run()
