"""Text that peers share out: windows of the shards that this peer leases, or that fall to it by its identity."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from peer.data.blocks import ShardBlock, TextBlocks
from peer.data.problems import SourceBusy
from peer.data.seeded import SeededSegments, SeededShards
from peer.link.messages import DataUse, Leased, LivePeers
from peer.protocol.data_spec import MAX_SHARDS, PARTS_PER_SHARD
from peer.protocol.ranges import Range

MAX_OPEN = 8
SHARD_TOKENS, FEWEST_SHARDS = 1 << 20, 64
AHEAD_S = 30.0  # of training that is leased beyond the shard at hand
PREPARED = 3  # blocks that are made before they are needed


class SharedWindows:
    """One source, cut into shards: on all peers the same ones, and in one epoch in one order.

    Args:
        blocks: its text.
        start: the number of its first shard among those of all sources.
        leased: pieces are leased; where there is none at hand, a sixteenth of a shard is read by the seeded rule.

    Attributes:
        used: parts that have been given out entirely, since they were last taken from here.
        unleased: how often no lease was at hand.
    """

    def __init__(
        self, blocks: TextBlocks, weight: float, start: int, seeded: SeededShards, *, leased: bool
    ) -> None:
        self.blocks, self.weight, self.leased = blocks, weight, leased
        self._start, self.seeded, self._run_seed = start, seeded, seeded.run_seed
        self._first_part = start * PARTS_PER_SHARD
        self.queue: deque[Range] = deque()
        self.used: list[Range] = []
        self.unleased = 0
        self._piece: Range | None = None  # at hand
        self._borrowed: deque[Range] = deque()  # of the seeded rule, part by part
        self._block: ShardBlock | None = None  # at hand
        self._order = np.empty(0, dtype=np.int64)
        self._position = self._stop = self._noted = self._resumed = 0

    @property
    def down(self) -> bool:
        """See `WindowSource.down`."""
        return self.blocks.down

    @property
    def over(self) -> bool:
        """See `WindowSource.over`."""
        return self.blocks.over

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, shard and window at hand."""
        return (0, 0, 0) if self._piece is None else (self._piece.epoch, self._piece.shard, self._position)

    @property
    def open(self) -> list[Range]:
        """Leased pieces that are not given out entirely, in parts of the run."""
        return [piece.shifted(self._first_part) for piece in self.queue]

    @property
    def left(self) -> list[Range]:
        """As `open`, without the parts that have been given out."""
        at_hand = self._piece
        pieces = (one._replace(first=self._noted) if one == at_hand else one for one in self.queue)
        return [piece.shifted(self._first_part) for piece in pieces]

    def resume(self, left: Sequence[Range], position: int) -> None:
        """Continue with what was `left`, of its first block from this window on."""
        own = (piece.shifted(-self._first_part) for piece in left)
        self.queue += [piece for piece in own if 0 <= piece.first < piece.end and piece.shard < self.blocks.shards]
        self._resumed = position if self.queue else 0

    def hear(self, taken: Iterable[Range], lost: Iterable[Range]) -> None:
        """Pieces of the run, of which those of this source are meant."""
        for piece in (one.shifted(-self._first_part) for one in lost):
            if piece in self.queue:
                self.queue.remove(piece)
            if piece == self._piece:
                self._piece = self._block = None
                self._resumed = 0
        own = (piece.shifted(-self._first_part) for piece in taken)
        self.queue += [piece for piece in own if 0 <= piece.shard < self.blocks.shards]
        self._prepare()

    def wanted(self, tokens_per_s: float) -> int:
        """Pieces that should be open: the one at hand, and those of the next AHEAD_S, at least one."""
        return min(MAX_OPEN, 2 + int(tokens_per_s * AHEAD_S / max(1.0, self.blocks.shard_tokens)))

    def take(self, count: int) -> list[torch.Tensor]:
        """So many windows; fewer where the next block is not there yet."""
        rows: list[torch.Tensor] = []
        while len(rows) < count:
            if self._piece is None:
                self._piece = self._next()
                self._noted = self._piece.first
            if self.over or not self._ready(self._piece):
                break
            assert self._block is not None
            taken = self._order[self._position : min(self._stop, self._position + count - len(rows))]
            rows += [self._block.windows.window(int(index)) for index in taken]
            self._advance(self._piece, len(taken))
        return rows

    def _next(self) -> Range:
        if self.queue:
            self._borrowed.clear()
            return self.queue[0]
        if not self._borrowed:
            epoch, shard = self.seeded.next()
            first, end = shard * PARTS_PER_SHARD, (shard + 1) * PARTS_PER_SHARD
            step = 1 if self.leased else PARTS_PER_SHARD
            self._borrowed += [Range(epoch, part, part + step) for part in range(first, end, step)]
        self.unleased += self.leased
        return self._borrowed.popleft()

    def _ready(self, piece: Range) -> bool:
        """Whether the block of the next part is open: its windows in their order, and which of them are the piece's."""
        if self._block is not None:
            return True
        number, span = self._noted // self.blocks.span, self.blocks.span
        try:
            self._block = self.blocks.block(number)
        except SourceBusy:
            return False
        first, size = number * span, len(self._block.places)
        seed = [self._run_seed, piece.epoch, number + self._first_part // span]
        self._order = self._block.places[np.random.default_rng(seed).permutation(size)]
        parts = (part - first for part in (self._noted, min(piece.end, first + span)))
        self._position, self._stop = (-(-size * part // span) for part in parts)
        self._position, self._resumed = min(max(self._position, self._resumed), self._stop), 0
        self._prepare()
        return True

    def _prepare(self) -> None:
        """Have the next blocks made before they are needed."""
        pieces = [piece._replace(first=self._noted) if piece == self._piece else piece for piece in self.queue]
        span = self.blocks.span
        needed = [number for one in pieces for number in range(one.first // span, -(-one.end // span))]
        for number in needed[:PREPARED]:
            self.blocks.prepare(number)

    def _advance(self, piece: Range, count: int) -> None:
        """So many windows of the piece at hand are given out: the parts that are now entirely so are used."""
        self._position += count
        span, done = self.blocks.span, self._position >= self._stop
        first = self._noted // span * span
        whole = min(piece.end, first + span) if done else first + self._position * span // len(self._order)
        if whole > self._noted:
            self.used.append(Range(piece.epoch, self._noted, whole).shifted(self._first_part))
            self._noted = whole
        if done:
            self._block = None
        if whole == piece.end:
            if self.queue and self.queue[0] == piece:
                self.queue.popleft()
            self._piece = None


class SharedSources:
    """The sources of a peer that are shared out, as its agent sees them; implements `peer.link.shared_data.DataPort`.

    Args:
        sources: those of them that are cut into shards.
        counts: pieces can be leased of so many sources of the run, these among them.
        seeded: of those whose segments are shared out by the seeded rule.
    """

    def __init__(
        self, sources: Mapping[int, SharedWindows], counts: int, seeded: Iterable[SeededSegments] = ()
    ) -> None:
        self._sources, self._counts, self._heard = sources, counts, 0
        self._seeded: list[SeededShards | SeededSegments] = [one.seeded for one in sources.values()]
        self._seeded += seeded

    @property
    def waits(self) -> bool:
        """Whether no lease is at hand."""
        return any(source.leased and not source.queue for source in self._sources.values())

    def take_used(self) -> list[Range]:
        """Parts that were given out entirely since the last call."""
        found: list[Range] = []
        for source in self._sources.values():
            found, source.used = found + source.used, []
        return found

    def hear(self, message: Leased | LivePeers) -> None:
        """What the agent says."""
        if isinstance(message, LivePeers):
            for rule in self._seeded:
                rule.peers = tuple(message.peers)
            return
        self._heard = message.number
        for source in self._sources.values():
            source.hear(message.taken, message.lost)

    def report(self, pending: Sequence[Range], tokens_per_s: float) -> DataUse | None:
        """How far this peer is; None where it leases nothing."""
        leased = {number: source for number, source in self._sources.items() if source.leased}
        if not leased:
            return None
        wanted = [leased[number].wanted(tokens_per_s) if number in leased else 0 for number in range(self._counts)]
        pieces = [piece for source in leased.values() for piece in source.open]
        return DataUse(open=tuple(pieces), pending=tuple(pending), wanted=tuple(wanted), heard=self._heard)


def shard_count(windows: int, sequence_length: int, shard_sequences: int | None, least_tokens: int) -> int:
    """How many shards a text of so many windows is cut into: `shard_sequences` each, else about a million tokens, or
    fewer where that gives under 64 shards, but at least `least_tokens`.
    """
    usual = max(-(-least_tokens // sequence_length), min(SHARD_TOKENS // sequence_length, windows // FEWEST_SHARDS))
    return max(1, min(MAX_SHARDS, windows // max(1, shard_sequences or usual)))
