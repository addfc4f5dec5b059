"""Which shards of one source a peer trains on next: what is free by the chain and by the leases of others. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

from peer.protocol.coverage import KEPT_EPOCHS, EpochCoverage, SourceCoverage
from peer.protocol.data_spec import PARTS_PER_SHARD
from peer.protocol.ranges import MAX_LEASED, Range

Shard = tuple[int, int]
"""(epoch, shard)."""
Mask = npt.NDArray[np.bool_]


def shards_of(ranges: Iterable[Range]) -> Iterable[Shard]:
    """One by one."""
    return ((one.epoch, shard) for one in ranges for shard in range(one.first, one.end))


class SeenLeases:
    """What the records of peers say, of one source: of each record the first MAX_LEASED shards, whatever it says.

    Args:
        shards: of the source.

    Attributes:
        holders: of each shard that is leased, the peers that say so.
    """

    def __init__(self, shards: int) -> None:
        self._shards, self._said, self._masks = shards, dict[str, list[Range]](), dict[int, Mask]()
        self.holders: dict[Shard, set[str]] = {}

    def hear(self, leases: Mapping[str, list[Range]]) -> None:
        """These are the leases of all peers now, in shards of the source."""
        for peer_id in self._said.keys() - leases.keys():
            self.put(peer_id, [])
        for peer_id, ranges in leases.items():
            self.put(peer_id, ranges)

    def put(self, peer_id: str, ranges: list[Range]) -> None:
        """These are the leases of one peer now; none: it has left, or its record has expired."""
        before = self._said.get(peer_id, [])
        if before == ranges:
            return
        for shard in islice(shards_of(before), MAX_LEASED):
            if others := self.holders.pop(shard) - {peer_id}:
                self.holders[shard] = others
            self._note(shard)
        for shard in islice(shards_of(ranges), MAX_LEASED):
            self.holders.setdefault(shard, set()).add(peer_id)
            self._note(shard)
        self._said[peer_id] = ranges
        if not ranges:
            del self._said[peer_id]

    def _note(self, shard: Shard) -> None:
        if (mask := self._masks.get(shard[0])) is not None:
            mask[shard[1]] = shard in self.holders

    def mask(self, epoch: int) -> Mask:
        """Of each shard, whether a peer holds it; not to be changed."""
        if epoch not in self._masks:
            if len(self._masks) > KEPT_EPOCHS:  # of which there are no more
                self._masks.clear()
            mask = self._masks[epoch] = np.zeros(self._shards, dtype=np.bool_)
            mask[[shard for of, shard in self.holders if of == epoch]] = True
        return self._masks[epoch]


class LeaseBook:
    """The shards that one peer holds. Of two leases of one shard the one with the lower hash stands.

    A peer continues with the next shard as long as that is free, so that what it holds is one range; otherwise it
    draws four of the free ones and takes the one with the most room, so that peers which look at the same moment seldom
    take the same. Where all of an epoch are taken, one that has not advanced for a while is taken over, whatever its
    holder's record says; and the next epoch begins.

    Args:
        patience_s: without a certified part, after which a lease is not believed.
    """

    def __init__(self, run_id: str, own_id: str, patience_s: float) -> None:
        self._run_id, self._own_id, self._patience_s = run_id, own_id, patience_s
        self._given: dict[Shard, tuple[Range, int]] = {}
        self._open: dict[Shard, Range] = {}
        self._pending: set[Shard] = set()
        self._ignored: dict[Shard, frozenset[str]] = {}  # holders of what was taken over
        self._waited: dict[Shard, tuple[float, int]] = {}
        self._last: Shard = (-1, -1)
        self._resumed: set[Shard] = set()  # that this book has not given
        self._draws = 0

    def hear(self, open: Iterable[Range], pending: Iterable[Range], heard: int) -> None:
        """What the trainer says: pieces that it has still to train, parts that no certificate holds, and the number of
        the last answer that it knows.
        """
        known = self._pieces
        self._open = {(piece.epoch, piece.shard): piece for piece in open}
        self._resumed |= self._open.keys() - known.keys()
        self._pending = {
            (one.epoch, shard)
            for one in pending
            for shard in range(one.first // PARTS_PER_SHARD, -(-one.end // PARTS_PER_SHARD))
        }
        self._given = {shard: given for shard, given in self._given.items() if given[1] > heard}

    @property
    def _pieces(self) -> dict[Shard, Range]:
        return self._open | {shard: piece for shard, (piece, _) in self._given.items()}

    @property
    def leases(self) -> list[Range]:
        """What this peer's record says, in shards."""
        return [Range(epoch, shard, shard + 1) for epoch, shard in sorted(self._pending | self._pieces.keys())]

    def update(
        self, source: SourceCoverage, seen: SeenLeases, wanted: int, number: int, now: float
    ) -> tuple[list[Range], list[Range]]:
        """(pieces that are taken now, pieces that are lost), in parts.

        Args:
            source: what of it was trained on, by the chain as it is now.
            seen: of all other peers; what it says of this one is passed over.
            wanted: pieces that should be open.
            number: of the answer that tells the trainer of them.
            now: seconds.
        """
        lost = [piece for shard, piece in self._pieces.items() if self._loses(shard, piece, source, seen)]
        self._resumed = set()
        for shard in [(piece.epoch, piece.shard) for piece in lost]:
            self._open.pop(shard, None)
            self._given.pop(shard, None)
        taken: list[Range] = []
        while len(self._pieces) < wanted and len(self._pieces.keys() | self._pending) < MAX_LEASED:
            if (piece := self._pick(source, seen, now)) is None:
                break
            self._last = (piece.epoch, piece.shard)
            self._given[self._last] = (piece, number)
            taken.append(piece)
        self._ignored = {shard: holders for shard, holders in self._ignored.items() if shard in self._pieces}
        return taken, lost

    def _loses(self, shard: Shard, piece: Range, source: SourceCoverage, seen: SeenLeases) -> bool:
        epoch = source.epochs.get(shard[0])
        if epoch is not None and epoch.done[shard[1]]:
            return True
        if epoch is None and shard[0] < source.newest:
            return True
        if shard in self._resumed and epoch is not None and epoch.counts[piece.first : piece.end].any():
            return True  # it is of before this peer ended: others have read on meanwhile
        passed_over = {self._own_id, *self._ignored.get(shard, ())}
        rivals = [peer_id for peer_id in seen.holders.get(shard, ()) if peer_id not in passed_over]
        own = lease_hash(self._run_id, shard, self._own_id) if rivals else b""
        return any(lease_hash(self._run_id, shard, peer_id) < own for peer_id in rivals)

    def _pick(self, source: SourceCoverage, seen: SeenLeases, now: float) -> Range | None:
        for epoch, covered in (*sorted(source.epochs.items()), (source.newest + 1, None)):
            if covered is None and not source.may_begin(epoch):
                return None
            done = covered.done if covered is not None else np.zeros(source.shards, dtype=np.bool_)
            if done.all():
                continue
            mine = np.zeros(source.shards, dtype=np.bool_)
            mine[[shard for of, shard in self._pieces.keys() | self._pending if of == epoch]] = True
            free = ~(done | seen.mask(epoch) | mine)
            shard = self._place(epoch, free) if free.any() else None
            if shard is None and covered is not None:
                shard = self._overdue(epoch, covered, seen, np.flatnonzero(~(done | mine)), now)
            if shard is not None:
                first, end = (covered.missing(shard) if covered is not None else None) or parts_of(shard)
                return Range(epoch, first, end)
        return None

    def _place(self, epoch: int, free: Mask) -> int:
        after = self._last[1] + 1
        if self._last[0] == epoch and after < len(free) and free[after]:
            return after
        places, self._draws = np.flatnonzero(free), self._draws + 1
        drawn = lease_hash(self._run_id, (epoch, self._draws), self._own_id)
        numbers = (int.from_bytes(drawn[start : start + 8], "big") for start in range(0, len(drawn), 8))
        return max((int(places[number % len(places)]) for number in numbers), key=lambda place: _room(free, place))

    def _overdue(
        self, epoch: int, covered: EpochCoverage, seen: SeenLeases, shards: npt.NDArray[np.int64], now: float
    ) -> int | None:
        """One whose holder has advanced nothing for a while; not the same one for all who look for one."""
        before, overdue = self._waited, []
        self._waited = {key: waited for key, waited in before.items() if key[0] != epoch}
        for shard in map(int, shards):
            key, parts = (epoch, shard), int(np.count_nonzero(covered.counts[slice(*parts_of(shard))]))
            since, then = before.get(key, (now, parts))
            self._waited[key] = (since, then) if then == parts else (now, parts)
            if then == parts and now - since >= self._patience_s:
                overdue.append(key)
        if not overdue:
            return None
        chosen = min(overdue, key=lambda key: lease_hash(self._run_id, key, self._own_id))
        self._ignored[chosen] = frozenset(seen.holders.get(chosen, ()))
        return chosen[1]


def _room(free: Mask, place: int) -> int:
    """Free shards in a row from this one on, as far as a peer may lease them."""
    ahead = free[place : place + MAX_LEASED]
    return len(ahead) if ahead.all() else int(ahead.argmin())


def parts_of(shard: int) -> tuple[int, int]:
    """The parts of a shard, as [first, end)."""
    return shard * PARTS_PER_SHARD, (shard + 1) * PARTS_PER_SHARD


@lru_cache(maxsize=1 << 14)
def lease_hash(run_id: str, shard: Shard, peer_id: str) -> bytes:
    """Of two leases of a shard the lower one stands."""
    return hashlib.sha256(f"atoll-lease-1 {run_id} {shard[0]} {shard[1]} {peer_id}".encode()).digest()
