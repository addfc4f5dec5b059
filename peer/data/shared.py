"""Text that peers share out: windows of the shards that this peer leases, or that fall to it by its identity."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from peer.data.packing import PackedTokens
from peer.link.messages import DataUse, Leased, LivePeers
from peer.protocol.data_spec import MAX_SHARDS, PARTS_PER_SHARD
from peer.protocol.ranges import Range

POINTS = 8  # of a peer on the circle of shards
MAX_OPEN = 8
SHARD_TOKENS, FEWEST_SHARDS = 1 << 20, 64
AHEAD_S = 30.0  # of training that is leased beyond the shard at hand


class SeededShards:
    """The shards that fall to a peer by its identity: each peer has points on the circle of shards, which differ from
    epoch to epoch, and the shards from each of them up to the next point of any peer. Peers that see the same others
    read different shards; one that leaves or joins changes only its own.

    Args:
        run_seed: of the manifest.
        peer_id: of this peer.
    """

    def __init__(self, run_seed: int, peer_id: str, shards: int) -> None:
        self.run_seed, self._peer_id, self._shards = run_seed, peer_id, shards
        self.peers: tuple[str, ...] = (peer_id,)
        self._epoch, self._read = 0, set[int]()
        self._own: tuple[tuple[str, ...], int, list[int]] = ((), -1, [])

    def next(self) -> tuple[int, int]:
        """(epoch, shard): the next one of this peer; of its next epoch once it has read all of its own."""
        while True:
            for shard in self._arcs():
                if shard not in self._read:
                    self._read.add(shard)
                    return self._epoch, shard
            self._epoch, self._read = self._epoch + 1, set()

    def _arcs(self) -> list[int]:
        peers = tuple(sorted({*self.peers, self._peer_id}))
        if self._own[:2] != (peers, self._epoch):
            self._own = (peers, self._epoch, self._computed(peers))
        return self._own[2]

    def _computed(self, peers: Sequence[str]) -> list[int]:
        points = sorted((self._point(peer_id, number), peer_id) for peer_id in peers for number in range(POINTS))
        places = [place for place, _ in points]
        owner = [points[bisect_right(places, shard) - 1][1] for shard in range(self._shards)]
        mine = [shard for shard, peer_id in enumerate(owner) if peer_id == self._peer_id]
        return mine or [self._point(self._peer_id, 0)]  # more peers than shards: some read the same

    def _point(self, peer_id: str, number: int) -> int:
        text = f"atoll-seeded-1 {self.run_seed} {self._epoch} {number} {peer_id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % self._shards


class SharedWindows:
    """One source in memory, cut into shards of windows from everywhere in it: on all peers the same ones, and in one
    epoch in one order.

    Args:
        shards: of the source.
        start: the number of its first one among the shards of all sources.
        leased: pieces are leased; where there is none at hand, a sixteenth of a shard is read by the seeded rule.

    Attributes:
        scattered: windows in the order in which shards are cut of them.
        used: parts that have been given out entirely, since they were last taken from here.
        unleased: how often no lease was at hand.
    """

    over = down = False

    def __init__(
        self, windows: PackedTokens, weight: float, shards: int, start: int, seeded: SeededShards, *, leased: bool
    ) -> None:
        self.windows, self.weight, self.shards, self.leased = windows, weight, shards, leased
        self._start, self.seeded, self._run_seed = start, seeded, seeded.run_seed
        self._first_part = start * PARTS_PER_SHARD
        # neighbours in a text are alike: a shard has windows from everywhere, or a peer would learn one place by heart
        self.scattered = np.random.default_rng([seeded.run_seed, start]).permutation(len(windows))
        self.queue: deque[Range] = deque()
        self.used: list[Range] = []
        self.unleased = 0
        self._piece: Range | None = None  # at hand
        self._borrowed: deque[Range] = deque()  # of the seeded rule, part by part
        self._order = np.empty(0, dtype=np.int64)
        self._position = self._stop = self._noted = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, shard and window at hand."""
        return (0, 0, 0) if self._piece is None else (self._piece.epoch, self._piece.shard, self._position)

    @property
    def open(self) -> list[Range]:
        """Leased pieces that are not given out entirely, in parts of the run."""
        return [piece.shifted(self._first_part) for piece in self.queue]

    def hear(self, taken: Iterable[Range], lost: Iterable[Range]) -> None:
        """Pieces of the run, of which those of this source are meant."""
        for piece in (one.shifted(-self._first_part) for one in lost):
            if piece in self.queue:
                self.queue.remove(piece)
            if piece == self._piece:
                self._piece = None
        own = (piece.shifted(-self._first_part) for piece in taken)
        self.queue += [piece for piece in own if 0 <= piece.shard < self.shards]

    def wanted(self, tokens_per_s: float) -> int:
        """Pieces that should be open: the one at hand, and those of the next AHEAD_S, at least one."""
        return min(MAX_OPEN, 2 + int(tokens_per_s * AHEAD_S * self.shards / max(1, len(self.windows.tokens))))

    def take(self, count: int) -> list[torch.Tensor]:
        """So many windows."""
        rows: list[torch.Tensor] = []
        while len(rows) < count:
            piece = self._piece or self._begin(self._next())
            taken = self._order[self._position : min(self._stop, self._position + count - len(rows))]
            rows += [self.windows.window(int(index)) for index in taken]
            self._advance(piece, len(taken))
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

    def _begin(self, piece: Range) -> Range:
        """Open a piece: its windows in their order, and which of them are its own."""
        first, end = (len(self.windows) * shard // self.shards for shard in (piece.shard, piece.shard + 1))
        seed = [self._run_seed, piece.epoch, piece.shard + self._start]
        self._order = self.scattered[first + np.random.default_rng(seed).permutation(end - first)]
        parts = (part - piece.shard * PARTS_PER_SHARD for part in piece[1:])
        self._position, self._stop = (-(-(end - first) * part // PARTS_PER_SHARD) for part in parts)
        self._piece, self._noted = piece, piece.first
        return piece

    def _advance(self, piece: Range, count: int) -> None:
        """So many windows of the piece at hand are given out: the parts that are now entirely so are used."""
        self._position += count
        done = self._position >= self._stop
        parts = self._position * PARTS_PER_SHARD // len(self._order)
        whole = piece.end if done else piece.shard * PARTS_PER_SHARD + parts
        if whole > self._noted:
            self.used.append(Range(piece.epoch, self._noted, whole).shifted(self._first_part))
            self._noted = whole
        if done:
            if self.queue and self.queue[0] == piece:
                self.queue.popleft()
            self._piece = None


class SharedSources:
    """The sources of a peer that are shared out, as its agent sees them; implements `peer.link.shared_data.DataPort`.

    Args:
        sources: those of them that are held in memory.
        counts: pieces can be leased of so many sources of the run, these among them.
    """

    def __init__(self, sources: Mapping[int, SharedWindows], counts: int) -> None:
        self._sources, self._counts, self._heard = sources, counts, 0

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
        if isinstance(message, Leased):
            self._heard = message.number
        for source in self._sources.values():
            if isinstance(message, LivePeers):
                source.seeded.peers = tuple(message.peers)
            else:
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
