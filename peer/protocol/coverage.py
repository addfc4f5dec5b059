"""How often each part of the leased data was trained on, according to the certified chain."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.errors import ProtocolError
from peer.protocol.data_spec import PARTS_PER_SHARD
from peer.protocol.lineage import Certificate, Link
from peer.protocol.ranges import Range, read_ranges, size_of, within

MAX_RUNS = 1000  # that a document lists
KEPT_EPOCHS = 4  # of a source, in every detail: of earlier ones the sums
Counts = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class EpochSums:
    """Parts of one source in one epoch that were trained on never, once, and more often; and how often again."""

    epoch: int
    never: int
    once: int
    more: int
    again: int

    @property
    def read_twice(self) -> float:
        """Readings that were not the first of their part, as a share of all."""
        readings = self.once + self.more + self.again
        return self.again / readings if readings else 0.0


class EpochCoverage:
    """One source in one epoch.

    Attributes:
        counts: how often each part was trained on; 255 stands for more, too.
        done: of each shard, whether all its parts were.
        again: readings beyond the first of each part.
    """

    def __init__(self, shards: int) -> None:
        self.counts: Counts = np.zeros(shards * PARTS_PER_SHARD, dtype=np.uint8)
        self.done: npt.NDArray[np.bool_] = np.zeros(shards, dtype=np.bool_)
        self.again = self.covered = 0

    def add(self, first: int, end: int) -> int:
        """Parts [first, end) were trained on; -> how many of them had been before."""
        part = self.counts[first:end]
        again = int(np.count_nonzero(part))
        part += part < np.iinfo(np.uint8).max
        self.again, self.covered = self.again + again, self.covered + end - first - again
        shards = slice(first // PARTS_PER_SHARD, -(-end // PARTS_PER_SHARD))
        self.done[shards] = (self.counts.reshape(-1, PARTS_PER_SHARD)[shards] > 0).all(axis=1)
        return again

    def missing(self, shard: int) -> tuple[int, int] | None:
        """The first parts in a row of a shard that were not trained on, as [first, end); None if all were."""
        missing = np.flatnonzero(self.counts[shard * PARTS_PER_SHARD : (shard + 1) * PARTS_PER_SHARD] == 0)
        if not len(missing):
            return None
        gaps = np.flatnonzero(np.diff(missing) > 1)
        last = missing[gaps[0]] if len(gaps) else missing[-1]
        return shard * PARTS_PER_SHARD + int(missing[0]), shard * PARTS_PER_SHARD + int(last) + 1

    def sums(self, epoch: int) -> EpochSums:
        return EpochSums(
            epoch=epoch, never=len(self.counts) - self.covered, once=int(np.count_nonzero(self.counts == 1)),
            more=int(np.count_nonzero(self.counts > 1)), again=self.again,
        )  # fmt: skip


class SourceCoverage:
    """One source. An epoch begins once half of the one before is covered: a claim of a later one is not believed, so
    that no claims make this grow.

    Attributes:
        epochs: the newest ones.
        past: the sums of the others.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.epochs: dict[int, EpochCoverage] = {0: EpochCoverage(shards)}
        self.past: list[EpochSums] = []

    @property
    def newest(self) -> int:
        return max(self.epochs)

    def may_begin(self, epoch: int) -> bool:
        """Whether half of the epoch before is covered."""
        before = self.epochs.get(epoch - 1)
        return before is not None and 2 * before.covered >= len(before.counts)

    def add(self, epoch: int, first: int, end: int) -> int | None:
        """-> how many of these parts had been trained on before in this epoch; None: the claim is not believed."""
        if epoch == self.newest + 1 and self.may_begin(epoch):
            self.epochs[epoch] = EpochCoverage(self.shards)
            if len(self.epochs) > KEPT_EPOCHS:
                oldest = min(self.epochs)
                self.past.append(self.epochs.pop(oldest).sums(oldest))
        return self.epochs[epoch].add(first, end) if epoch in self.epochs else None

    def sums(self) -> list[EpochSums]:
        """Of each epoch, in order."""
        return [*self.past, *(self.epochs[epoch].sums(epoch) for epoch in sorted(self.epochs))]


class Coverage:
    """All sources of a run.

    Args:
        shards: of each source.

    Attributes:
        parts, again: that each peer claimed, and of these the ones that were claimed before in their epoch.
        refused: parts of claims that were not believed, by peer.
    """

    def __init__(self, shards: Sequence[int]) -> None:
        self.sources = [SourceCoverage(count) for count in shards]
        self.parts, self.again, self.refused = Counter[str](), Counter[str](), Counter[str]()
        self._total = PARTS_PER_SHARD * sum(shards)

    def add(self, link: Link) -> None:
        """One more round."""
        for member in link.roster if self._total else ():
            with contextlib.suppress(ProtocolError):  # a chain that is read from a file may say anything
                for one in read_ranges(member.ranges, self._total):
                    self.claim(member.peer_id, one)

    def add_all(self, links: Iterable[Certificate]) -> None:
        """What their members claim."""
        for certificate in links if self._total else ():
            self.add(certificate.link)

    def claim(self, peer_id: str, one: Range) -> None:
        """A peer claims that it has trained on this range, of parts of all sources in a row."""
        start = 0
        for source in self.sources:
            stop = start + source.shards * PARTS_PER_SHARD
            for own in within([one], start, stop):
                again = source.add(*own)
                if again is None:
                    self.refused[peer_id] += own.end - own.first
                else:
                    self.parts[peer_id] += own.end - own.first
                    self.again[peer_id] += again
            start = stop

    def holds(self, text: str) -> tuple[int, int]:
        """(parts of these ranges, those of them that were trained on): of a branch that was given up."""
        parts = held = start = 0
        with contextlib.suppress(ProtocolError):
            ranges = read_ranges(text, self._total)
            parts = size_of(ranges)
            for source in self.sources:
                stop = start + source.shards * PARTS_PER_SHARD
                for one in within(ranges, start, stop):
                    if (epoch := source.epochs.get(one.epoch)) is not None:
                        held += int(np.count_nonzero(epoch.counts[one.first : one.end]))
                start = stop
        return parts, held

    def document(self) -> dict[str, Any]:
        """As JSON types; of each source its epochs, of each peer what it claimed."""
        return {
            "parts_of_a_shard": PARTS_PER_SHARD,
            "sources": [
                {
                    "shards": source.shards,
                    "epochs": [_of_epoch(one) for one in source.sums()],
                    "again": {
                        str(epoch): _runs(np.flatnonzero(source.epochs[epoch].counts > 1))
                        for epoch in sorted(source.epochs)
                    },
                }
                for source in self.sources
            ],
            "peers": {
                peer_id: {"parts": self.parts[peer_id], "again": self.again[peer_id], "refused": self.refused[peer_id]}
                for peer_id in sorted({*self.parts, *self.refused})
            },
        }  # fmt: skip


def _of_epoch(sums: EpochSums) -> dict[str, Any]:
    whole = max(1, sums.never + sums.once + sums.more)
    return {
        "epoch": sums.epoch, "parts_once": sums.once, "parts_twice_or_more": sums.more, "parts_never": sums.never,
        "readings_again": sums.again, "share_covered": 1 - sums.never / whole, "share_read_twice": sums.read_twice,
    }  # fmt: skip


def _runs(places: npt.NDArray[np.int64]) -> list[list[int]]:
    """Numbers in a row as [first, end), at most MAX_RUNS of them."""
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > 1)
    firsts = places[np.concatenate([[0], breaks + 1])]
    ends = places[np.concatenate([breaks, [len(places) - 1]])] + 1
    return [[int(first), int(end)] for first, end in zip(firsts[:MAX_RUNS], ends, strict=False)]
