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
from peer.protocol.data_spec import PARTS_PER_SHARD
from peer.protocol.ranges import Range, read_ranges, within, write_ranges
from peer.protocol.records import PeerRecord
from peer.swarm.agent.lease_book import LeaseBook, SeenLeases
from peer.swarm.state.chain import ChainStore
from peer.system.clock import Clock

MOST_BEHIND = 10  # rounds of a peer whose leases count


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

    Attributes:
        seen: the leases of other peers that this one respects, by source.
    """

    def __init__(
        self, books: Sequence[LeaseBook], history: ChainStore, directory: PublishedRecords, trainer: TrainerLink,
        clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self._books, self._history, self._directory, self._trainer = books, history, directory, trainer
        self._clock, self._shards = clock, [source.shards for source in history.coverage.sources]
        self._starts = [0, *accumulate(self._shards)]
        self.seen = [SeenLeases(shards) for shards in self._shards]
        self._use: DataUse | None = None
        self._number = 0

    @property
    def text(self) -> str:
        """What this peer's record says: where it holds more ranges than a record may list, the newest are left out."""
        held = [
            one.shifted(start) for book, start in zip(self._books, self._starts, strict=False) for one in book.leases
        ]
        return write_ranges(held)

    def hear(self, use: DataUse) -> None:
        """The trainer says how far it is; it is answered at once if anything changes."""
        self._use = use
        for index, book in enumerate(self._books):
            of_source = self._of_source(index, PARTS_PER_SHARD)
            book.hear(within(use.open, *of_source), within(use.pending, *of_source), use.heard)
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
            seen = self.seen[index]
            seen.hear({peer_id: within(ranges, *self._of_source(index)) for peer_id, ranges in leases.items()})
            changes = book.update(self._history.coverage.sources[index], seen, wanted, self._number + 1, self._clock())
            for found, pieces in zip((taken, lost), changes, strict=True):
                found += [piece.shifted(self._starts[index] * PARTS_PER_SHARD) for piece in pieces]
        if taken or lost:
            self._number += 1
            self._trainer.tell(Leased(number=self._number, taken=tuple(taken), lost=tuple(lost)))
            self._directory.announce_soon()

    def _leases_of_others(self) -> dict[str, list[Range]]:
        """What is believed of their records: of a peer that was in no round one shard, of one that fell behind none."""
        found, least_round = {}, len(self._history.chain) - MOST_BEHIND
        for peer_id, record in self._directory.peers.items():
            if not record.leases or record.round < least_round:
                continue
            with contextlib.suppress(ProtocolError):
                ranges = read_ranges(record.leases, self._starts[-1])
                first = ranges[0]._replace(end=ranges[0].first + 1)
                found[peer_id] = ranges if self._history.seen[peer_id] else [first]
        return found

    def _of_source(self, index: int, unit: int = 1) -> tuple[int, int]:
        """Start and end of one source among all of them, in shards or in a unit of which a shard has several."""
        return self._starts[index] * unit, self._starts[index + 1] * unit
