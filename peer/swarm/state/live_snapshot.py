"""Live snapshots: a donor writes its state while rounds continue; none waits for more than the copy of one column."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from peer.outer.numerics.offload import run_offloaded
from peer.outer.state.outer_state import CHUNK
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol import hashing
from peer.protocol.lineage import Certificate, shares_of
from peer.swarm.runtime.round_priority import IoSlot, RoundPriority
from peer.swarm.state.chain import KEPT_UPDATES
from peer.swarm.state.owned_state import OwnedState
from peer.swarm.state.snapshot_file import SnapshotFile, SnapshotWriter

log = logging.getLogger(__name__)
Turns = Callable[[], AbstractAsyncContextManager[IoSlot]]
PATIENT_ROUNDS = 8  # rounds have priority while columns are copied: each adds updates to replay
PATIENT_CARRYING = KEPT_UPDATES // 4  # and while updates are replayed
BYTES_PER_TURN = 4 << 20  # of an update, in one turn


class Updates(Protocol):
    """Where the updates of a lineage are kept."""

    async def update(self, digest: str) -> Path | None:
        """The file of that update, if it is kept."""


class ReplayPlan(NamedTuple):
    """How the columns of a file become those of one round.

    Attributes:
        lineage_id: of the state then.
        chain: the rounds from the earliest column's on.
    """

    lineage_id: str
    chain: Sequence[Certificate]


class LiveSnapshotter:
    """Makes snapshot files, one at a time, in the folder of the history.

    Args:
        owned: the state; it is held still for the copy of one column at a time.
    """

    def __init__(self, owned: OwnedState, updates: Updates, priority: RoundPriority) -> None:
        self._owned, self._updates, self._priority = owned, updates, priority
        self._history, self._state, self._stopped = owned.history, owned.state, False
        self.spare = owned.history.folder / "snapshot.tmp"

    def stop(self) -> None:
        """Abandon the snapshot under way at its next column."""
        self._stopped = True

    async def of_state(self) -> SnapshotFile | None:
        """A snapshot of the state as it is by then; None where it leaves its lineage, is not whole, or an update is
        gone.

        Raises:
            OSError: the disk is full, or fails.
        """
        self._stopped = False
        with SnapshotWriter(self.spare, self._state) as writer:
            way = await (self._copy(writer) if self._state.optimizer.elementwise else self._copy_still(writer))
            turns = partial(self._turn, writer, PATIENT_CARRYING)
            return None if way is None else await self._finish(writer, way, turns)

    async def of_file(self, file: SnapshotFile, chain: Sequence[Certificate]) -> SnapshotFile | None:
        """What these rounds, which follow that of a file that is here, make of it; None where an update is gone,
        or an outer step is of the whole state.

        Raises:
            OSError: the disk is full, or fails; or the file is not what it was.
        """
        self._stopped = False
        if not self._state.optimizer.elementwise:
            return None
        with SnapshotWriter(self.spare, self._state) as writer, file.path.open("rb", buffering=0) as source:
            for column in writer.columns:
                if self._stopped:
                    return None
                async with self._priority.turn() as turn:
                    await asyncio.to_thread(writer.copy_from, column, source, file)
                    await asyncio.to_thread(partial(writer.put, column, aside=turn.aside))
            return await self._finish(writer, ReplayPlan(chain[-1].link.id, chain), self._priority.turn)

    async def _copy(self, writer: SnapshotWriter) -> ReplayPlan | None:
        """Copy the state column by column, between rounds or in them."""
        state, history, began = self._state, self._history, (self._state.round, self._state.lineage_id)
        way: ReplayPlan | None = None
        for column in writer.columns:
            async with self._turn(writer, PATIENT_ROUNDS) as turn:
                async with self._owned.still():
                    if self._stopped or not self._owned.valid or not history.leads_through(*began):
                        return None
                    await run_offloaded(CHUNK * (1 + len(state.buffers)), writer.copy, column)
                    way = ReplayPlan(state.lineage_id, list(history.chain[min(writer.rounds.values()) : state.round]))
                await asyncio.to_thread(partial(writer.put, column, aside=turn.aside))
        return way

    async def _copy_still(self, writer: SnapshotWriter) -> ReplayPlan | None:
        """Copy all columns of one round, where those of a later one do not follow column by column."""
        state = self._state
        async with self._owned.still():
            for column in writer.columns:
                if self._stopped or not self._owned.valid:
                    return None
                await run_offloaded(CHUNK * (1 + len(state.buffers)), writer.copy, column)
                await asyncio.to_thread(writer.put, column)
            return ReplayPlan(state.lineage_id, [])

    async def _finish(self, writer: SnapshotWriter, way: ReplayPlan, turns: Turns) -> SnapshotFile | None:
        """Replay updates on columns until all are of the last round, and hash them."""
        for certificate in way.chain:
            path = await self._updates.update(certificate.link.update_digest)
            update = None if path is None else await self._read(path, certificate, turns)
            if update is None:
                log.info("no snapshot: the update of round %d is not kept any more", certificate.link.round + 1)
                return None
            for column in (one for one, at in writer.rounds.items() if at == certificate.link.round):
                if self._stopped:
                    return None
                async with turns() as turn:
                    final = certificate is way.chain[-1]
                    await asyncio.to_thread(partial(writer.carry_on, column, update, final=final, aside=turn.aside))
            del update  # before there is another one
        for column in writer.unsealed:
            async with turns() as turn:
                await asyncio.to_thread(writer.seal, column, turn.aside)
        return writer.finish(self._history.folder / f"snapshot-{way.lineage_id[:16]}.bin", way.lineage_id)

    async def _read(self, path: Path, certificate: Certificate, turns: Turns) -> AnyUpdate | None:
        """The update of a round; None where its file is gone meanwhile, or damaged."""
        link, hasher = certificate.link, hashing.Hasher()
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            payload = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8).numpy().data

            def read(start: int) -> None:
                file.readinto(content := payload[start : start + BYTES_PER_TURN])
                hasher.update(content)

            for start in range(0, len(payload), BYTES_PER_TURN):
                async with turns():
                    await asyncio.to_thread(read, start)
            if hasher.digest().hex() != link.update_digest:
                self._history.drop_damaged(link.update_digest)
                return None
            async with turns():
                weights = [member.tokens for member in link.roster]
                shares = shares_of(link.roster)
                return await asyncio.to_thread(self._state.split_update, payload, weights, link.round, shares)
        return None

    def _turn(self, writer: SnapshotWriter, patience: int) -> AbstractAsyncContextManager[IoSlot]:
        """A slot after rounds, unless there have been more than `patience` since the earliest column."""
        late = self._state.round - min(writer.rounds.values(), default=self._state.round) > patience
        return contextlib.nullcontext(IoSlot()) if late else self._priority.turn()
