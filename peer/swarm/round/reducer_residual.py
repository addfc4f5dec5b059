"""The residual of a reducer, tied to the chain: all peers know the digest of each reducer's residual.

With error feedback a reducer adds what its last encodings have lost. No other peer has that vector; but after each
round the reducer signs the cells of its shard, and the certificate holds what it signed. So it must start from its
residual of when it last had a cell, and an auditor that is shown that can recompute the reduction. A reducer without
such a residual restarts at zero, and signs since when: it has just joined, lost its memory, is on another lineage, or
cannot know which of its attempts at a round the others have committed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from peer.outer.compress.base import Compressor, Read
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.residual import Residual
from peer.outer.state.wire_format import WireFormat
from peer.protocol.evidence import Residue
from peer.protocol.lineage import Certificate, Link
from peer.protocol.statements import DIGEST_BYTES, leaf_of, path_of, residual_of, root_of

log = logging.getLogger(__name__)
Chain = Callable[[], Sequence[Certificate]]
ShardOf = Callable[[Link, int], tuple[int, int]]


class Origin(NamedTuple):
    """Elements [start, stop) that a reducer was left with together, in this round; None: in none, they are zero."""

    start: int
    stop: int
    link: Link | None


def origins(
    chain: Sequence[Certificate], reducer: str, since: int, start: int, stop: int, shard: ShardOf, fragment: int = 0
) -> list[Origin]:
    """Where a reducer has its residual of [start, stop) from, in order.

    Args:
        chain: what was committed before the round in question.
        since: the round before which it was zero.
        shard: (link, place) -> [start, stop) of what that member reduced; whole cells, as start and stop are.
        fragment: that all of this is within.
    """
    found: list[Origin] = []
    missing = [(start, stop)] if start < stop else []
    for certificate in itertools.islice(reversed(chain), max(0, len(chain) - since)):
        if not missing:
            break
        link = certificate.link
        place = link.place(reducer)
        if place is None or link.fragment != fragment:
            continue
        first, last = shard(link, place)
        left = []
        for a, b in missing:
            low, high = max(a, first), min(b, last)
            if low < high:
                found.append(Origin(low, high, link))
                left += [gap for gap in ((a, low), (high, b)) if gap[0] < gap[1]]
            else:
                left.append((a, b))
        missing = left
    return sorted([*found, *(Origin(a, b, None) for a, b in missing)], key=lambda origin: origin.start)


def leaves_of(values: Tensor, cell: int) -> list[bytes]:
    """The digest of each cell of fp32 [n], the last of which may be shorter."""
    numbers = values.numpy().astype("<f4", copy=False)
    return [leaf_of(numbers[first : first + cell].data) for first in range(0, len(numbers), cell)]


@dataclass(frozen=True)
class SignedResidual:
    """What a reducer was left with in one round: the first element of its shard, the digests of its cells."""

    start: int
    leaves: Sequence[bytes]


@dataclass
class Attempt:
    """One reduction of one shard.

    Attributes:
        round, since: where it happened, and since when the residual has been kept.
        start, stop: the shard, in elements.
        earlier: for each cell of the shard, the round that had left it; None: it was zero.
        leaves: of each cell, afterwards.
        before: the residual of each slice before it, fp32; none if no auditor may ask.
    """

    round: int
    since: int
    start: int
    stop: int
    cell: int
    earlier: Sequence[SignedResidual | None]
    leaves: list[bytes] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    applied: bool = False

    @cached_property
    def digest(self) -> bytes:
        """What the reducer signs, once all slices are reduced."""
        return residual_of(self.since, (self.start, self.stop), root_of(self.leaves))

    @property
    def nbytes(self) -> int:
        """Bytes of `before`."""
        return sum(values.nbytes for values in self.before)

    def residue(self, index: int) -> Residue:
        """What shows of one slice that the reducer carried on from what it had signed; with `payloads`."""
        first, stop = self._cells(index)
        carried, at = [], first
        for _, cells in itertools.groupby(self.earlier[first:stop], key=id):
            left, *more = cells
            if left is not None:
                offset = at + (self.start - left.start) // self.cell
                carried.append(_hex(path_of(left.leaves, offset, offset + 1 + len(more))))
            at += 1 + len(more)
        root, path = root_of(self.leaves).hex(), _hex(path_of(self.leaves, first, stop))
        return Residue(since=self.since, root=root, path=path, carried=tuple(carried))

    def payloads(self, index: int) -> list[memoryview]:
        """The residual of a slice before the round, and the digests of its cells after it."""
        first, stop = self._cells(index)
        return [self.before[index].numpy().view("u1").data, memoryview(b"".join(self.leaves[first:stop]))]

    def _cells(self, index: int) -> tuple[int, int]:
        """[first, stop) of a slice's cells among those of the shard."""
        start = sum(values.numel() for values in self.before[:index])
        return start // self.cell, -(-(start + self.before[index].numel()) // self.cell)


class ReducerResidual:
    """The residual of one peer's reductions. One thread at a time.

    Args:
        wire: how shards are cut.
        chain: -> what has been committed, to the state that the next round starts from.
        fragment: that `wire` writes.
    """

    def __init__(
        self, feedback: ErrorFeedback, wire: WireFormat, own_id: str, chain: Chain, fragment: int = 0
    ) -> None:
        self._residual, self._own_id, self._chain = Residual(feedback, wire.numel), own_id, chain
        self._fragment = fragment
        self._cell = wire.cell
        self._left: list[SignedResidual | None] = [None] * -(-wire.numel // self._cell)
        self._since = -1
        self._known = 0, ""  # the round and lineage id up to which the chain is known to agree with the residual
        self._attempt: Attempt | None = None
        self._keep = False

    def begin(self, start: int, stop: int, keep: bool) -> Attempt:
        """The reduction of [start, stop) in the round that follows the chain.

        Args:
            keep: hold what it was before, for audits.
        """
        chain = self._chain()
        if self._since < 0 or not self._agrees(chain):
            self._restart(len(chain))
        self._residual.commit()  # nothing of earlier attempts can count any more
        self._known = len(chain), chain[-1].link.id if chain else ""
        earlier = tuple(self._left[self._cells(start, stop)])
        self._attempt = Attempt(len(chain), self._since, start, stop, self._cell, earlier)
        self._keep = keep
        return self._attempt

    def encode(self, codec: Compressor, start: int, stop: int, read: Read) -> bytes:
        """One slice, in order; see `Residual.encode`."""
        attempt = self._attempt
        assert attempt is not None, "no reduction has begun"
        payload = self._residual.encode(codec, start, stop, read)
        attempt.leaves += leaves_of(self._residual.vector[start:stop], self._cell)
        if self._keep:
            attempt.before.append(self._residual.opened[-1][1])
        return payload

    def commit(self) -> None:
        """The round was applied."""
        self._residual.commit()
        self._apply()

    def revert(self) -> None:
        """The round was abandoned: the residual is as it was before."""
        self._residual.revert()

    def restore(self) -> None:
        """Others have committed what this peer abandoned: the chain tells whether it is this, when it begins again."""

    def _apply(self) -> None:
        attempt = self._attempt
        if attempt is not None and not attempt.applied:
            attempt.applied = True
            first = attempt.start // self._cell
            left = SignedResidual(attempt.start, attempt.leaves)
            self._left[first : first + len(attempt.leaves)] = [left] * len(attempt.leaves)

    def _agrees(self, chain: Sequence[Certificate]) -> bool:
        """Whether the residual is what this chain says; an attempt that was abandoned is taken up if it was committed
        after all.
        """
        round, lineage_id = self._known
        if len(chain) < round or (round and chain[round - 1].link.id != lineage_id):
            return False
        attempt, seen = self._attempt, False
        for certificate in itertools.islice(chain, round, None):
            link = certificate.link
            place = link.place(self._own_id)
            if place is None or link.fragment != self._fragment:
                continue
            mine = attempt is not None and attempt.round == link.round
            if attempt is None or not mine or attempt.digest.hex() not in link.residuals[place : place + 1]:
                return False
            if not attempt.applied:
                self._residual.restore()
                self._apply()
            seen = True
        return seen or attempt is None or not attempt.applied

    def _restart(self, round: int) -> None:
        if any(left is not None for left in self._left):
            log.info("round %d: the residual of this peer's shard is of another lineage; it restarts at 0", round + 1)
        self._residual.clear()
        self._left = [None] * len(self._left)
        self._since = round

    def _cells(self, start: int, stop: int) -> slice:
        return slice(start // self._cell, -(-stop // self._cell))


def _hex(digests: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(digest.hex() for digest in digests)


def split(leaves: bytes | bytearray | memoryview) -> Iterator[bytes]:
    """The digests that lie in a row."""
    return (bytes(leaves[start : start + DIGEST_BYTES]) for start in range(0, len(leaves), DIGEST_BYTES))
