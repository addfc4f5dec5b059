"""An archive: keeps the state of a run beside the bootstrap and serves it, so that the run outlives its peers.

It is a donor that makes no rounds: it follows the chain, replays updates, and hands out snapshots as peers do. Its
state lies in a file that is mapped into memory, so that a node that is killed finds it again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from bootstrap.genesis import Genesis
from peer.errors import UserError
from peer.link.memory import SharedState
from peer.link.messages import ToTrainer
from peer.outer.recipe.plan import RunPlan
from peer.protocol.identity_work import IdentityWork
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.chain_scout import ChainRules
from peer.swarm.catchup.fork_choice import ForkChoice
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_file import load_snapshot
from peer.swarm.state.store import StateStore

log = logging.getLogger(__name__)
FILE_NAME, NICKNAME = "state.bin", "archive"


@dataclass(frozen=True)
class ArchivePlace:
    """Where a node keeps the states of its runs. `push_to`: repository of the hub that gets the model, too, every
    `push_every` rounds.
    """

    folder: Path
    push_to: str | None = None
    push_every: int = 100


def open_archive(folder: Path, genesis: Genesis, plan: RunPlan, node: Node) -> StateStore:
    """The state that an archive holds of a run, or the initial one.

    Args:
        folder: of this run in the archive.

    Raises:
        UserError: a run without one state, or no room on the disk.
    """
    manifest, meta = plan.manifest, genesis.snapshot.meta
    assert manifest.genesis is not None
    if plan.recipe.gossips:
        raise UserError(f"--archive: in run {manifest.name} each peer has a state of its own (gossip)",
                        "leave --archive out, or choose a recipe with one lineage")  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE_NAME).open("a+b")
        memory = SharedState(file.fileno(), sum(meta.fragments), meta.num_buffers, 1)
    except OSError as error:
        raise UserError(f"--archive: {folder} cannot be used: {error.strerror}", "check the disk") from None
    state = plan.outer_state([memory.anchor, *memory.buffers], genesis)
    store = StateStore(memory, state, ChainStore(folder, manifest.genesis), node.timing)
    if memory.head is not None and store.restore([store.history.chain_path]) is not None:
        log.info("the archive holds round %d of run %s", store.position.round, manifest.name)
        return store
    load_snapshot(genesis.snapshot.path, state)
    memory.head = None
    store.restore()
    return store


class _NoTrainer:
    """Receives what a trainer would hear."""

    def tell(self, message: ToTrainer) -> None:
        log.debug("%s", message.kind)


@dataclass
class Archive:
    """Follows a run with its state; implements the host of a `ForkChoice`."""

    node: Node
    directory: Directory
    run_id: str
    store: StateStore
    rules: ChainRules

    async def run(self) -> None:
        """Until it is cancelled."""
        fork_choice = ForkChoice(
            self.node, self.directory, self.run_id, self.rules, self.store, self, _NoTrainer()
        )  # fmt: skip
        self.node.spawn(fork_choice.claims.scout_forever())
        while True:
            if not fork_choice.claims.donors() or not await fork_choice.catch_up():
                await asyncio.sleep(self.node.timing.recheck_s)

    def announce(self, work: IdentityWork) -> None:
        """Newcomers find it as a donor among the peers; it takes part in no round."""

        def record() -> PeerRecord:
            position = self.store.position
            return PeerRecord(
                run_id=self.run_id, nickname=NICKNAME, state="finished", round=position.round,
                lineage_id=position.lineage_id, lineage_weight=position.weight, work=work.nonce,
                addresses=self.node.host_addresses, client=self.node.client, relayed=self.node.relayed,
                expires_at=self.directory.expiry(),
            )  # fmt: skip

        self.directory.announce(record)

    def on_caught_up(self, since: int) -> None:  # noqa: ARG002
        self.directory.announce_soon()

    def on_answer(self, donor: str) -> None:
        """Nothing to do: it meets no peer in rounds."""

    def on_ahead(self) -> None:
        """Nothing to do: it looks by itself."""

    async def on_counted(self) -> None:
        """It contributes nothing."""
