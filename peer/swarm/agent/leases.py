"""The leases of this peer: what its trainer asks for, what its record says, and what the records of others say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from peer.errors import ProtocolError
from peer.link.channel import TrainerLink
from peer.link.messages import DataUse, Leased
from peer.protocol.manifest import PARTS
from peer.protocol.ranges import Range, read_ranges, write_ranges
from peer.protocol.records import PeerRecord
from peer.swarm.agent.lease_book import LeaseBook, SeenLeases
from peer.swarm.state.chain import ChainStore
from peer.system.clock import Clock


class PublishedRecords(Protocol):
    """The directory of a run."""

    @property
    def peers(self) -> Mapping[str, PeerRecord]: ...
    def announce_soon(self) -> None: ...


class DataLeases:
    """Shares out the data of one run, source by source.

    Args:
        books: of each source.
        history: the chain as it is now.
        directory: the records of other peers, and who publishes this peer's.
        clock: monotonic seconds.
    """

    def __init__(
        self, books: Sequence[LeaseBook], history: ChainStore, directory: PublishedRecords, trainer: TrainerLink,
        clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self._books, self._history, self._directory, self._trainer = books, history, directory, trainer
        self._clock, self._shards = clock, [source.shards for source in history.coverage.sources]
        self._starts = [0, *accumulate(self._shards)]
        self._use: DataUse | None = None
        self._number = 0

    @property
    def text(self) -> str:
        """What this peer's record says: where it holds more ranges than a record may list, the newest are left out."""
        held = [
            Range(one.epoch, one.first + start, one.end + start)
            for book, start in zip(self._books, self._starts, strict=False) for one in book.leases
        ]  # fmt: skip
        return write_ranges(held)

    def hear(self, use: DataUse) -> None:
        """The trainer says how far it is; it is answered at once if anything changes."""
        self._use = use
        for index, book in enumerate(self._books):
            book.hear(self._within(use.open, index, PARTS), self._within(use.pending, index, PARTS), use.heard)
        self.update()

    async def run(self, period_s: float) -> None:
        """Until it is cancelled."""
        while True:
            self.update()
            await asyncio.sleep(period_s)

    def update(self) -> None:
        """Take, and give up, what the chain and the records of others ask for."""
        if self._use is None:
            return
        taken: list[Range] = []
        lost: list[Range] = []
        leases = self._leases_of_others()
        for index, (book, wanted) in enumerate(zip(self._books, self._use.wanted, strict=False)):
            if not self._shards[index]:
                continue
            own = {peer_id: self._within(ranges, index, 1) for peer_id, ranges in leases.items()}
            seen = SeenLeases(self._shards[index], own)
            changes = book.update(self._history.coverage.sources[index], seen, wanted, self._number + 1, self._clock())
            for found, pieces in zip((taken, lost), changes, strict=True):
                by = self._starts[index] * PARTS
                found += [Range(piece.epoch, piece.first + by, piece.end + by) for piece in pieces]
        if taken or lost:
            self._number += 1
            self._trainer.tell(Leased(number=self._number, taken=tuple(taken), lost=tuple(lost)))
            self._directory.announce_soon()

    def _leases_of_others(self) -> dict[str, list[Range]]:
        found = {}
        for peer_id, record in self._directory.peers.items():
            with contextlib.suppress(ProtocolError):
                if record.leases:
                    found[peer_id] = read_ranges(record.leases, self._starts[-1])
        return found

    def _within(self, ranges: Sequence[Range], index: int, unit: int) -> list[Range]:
        """What of these ranges is of one source, counted from its start."""
        start, stop = self._starts[index] * unit, self._starts[index + 1] * unit
        return [
            Range(one.epoch, max(one.first, start) - start, min(one.end, stop) - start)
            for one in ranges if one.first < stop and one.end > start
        ]  # fmt: skip
