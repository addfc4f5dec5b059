"""The outer state, which all peers of a run hold bit-identically, and the updates that carry it on."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from peer.errors import ProtocolError
from peer.outer.compress.base import LARGEST_VALUE, NonFiniteError, Payload
from peer.outer.math.source import Source
from peer.outer.math.step import Aggregate, Scaled, clip_factor, step_
from peer.outer.numerics.tiles import tile_ranges
from peer.outer.optim.optimizers import OuterOptimizer, Sgd, Vectors
from peer.outer.state.fragments import Fragments, Part
from peer.outer.state.wire_format import AnyUpdate, WireFormat
from peer.protocol import hashing

CHUNK = 1 << 20  # elements; part of the protocol, since the digest is a digest of chunk digests
MEAN = Sgd(lr=1.0)  # of moments: mean <- mean - mean of (mean - local)
_DIGEST_TAG = b"atoll-state-2"
_FRAGMENTS_TAG = b"atoll-fragments-1"


class OuterState:
    """Anchor, outer buffers and the round they stand at.

    Args:
        anchor: fp32 [P] on the CPU; used in place and never reallocated, so that it may live in shared memory.
        buffers: `optimizer.num_buffers` times fp32 [P], likewise.
        wire: how contributions and updates are written; `Fragments` where rounds are of one of several.
        round: rounds applied since genesis.
        lineage_id: id of the last link of the lineage, 64 hex digits; the digest itself at genesis.
        rate: where peers send the gradient of every step: (rounds applied) -> the learning rate of the step that
            follows. It scales the outer step. None: they send deltas of many steps.
    """

    def __init__(
        self,
        anchor: Tensor,
        buffers: list[Tensor],
        optimizer: OuterOptimizer,
        wire: WireFormat | Fragments,
        round: int = 0,
        lineage_id: str = "",
        rate: Callable[[int], float] | None = None,
    ) -> None:
        assert len(buffers) == optimizer.num_buffers, f"{len(buffers)} buffers; need {optimizer.num_buffers}"
        fragments = Fragments.of(wire)
        assert fragments.numel == anchor.numel(), f"payloads of {fragments.numel} values; anchor of {anchor.numel()}"
        for tensor in (anchor, *buffers):
            assert tensor.shape == (anchor.numel(),), f"shape {tuple(tensor.shape)}; need ({anchor.numel()},)"
            assert tensor.dtype == torch.float32, f"{tensor.dtype}; need torch.float32"
            assert tensor.device.type == "cpu", f"{tensor.device}; need the CPU"
            assert tensor.is_contiguous(), f"stride {tensor.stride()}; need a contiguous vector"
        self.anchor = anchor
        self.buffers = buffers
        self.optimizer = optimizer
        self.fragments = fragments
        self._digests: dict[int, str] = {}  # of fragments; of several, only the one that has changed is hashed
        self.round = round
        self.lineage_id = lineage_id
        self.rate = rate
        self._factor: tuple[weakref.ref[Aggregate], float] | None = None  # of the update that was clipped last

    @property
    def numel(self) -> int:
        """P, the elements of the anchor and of each buffer."""
        return self.anchor.numel()

    @property
    def part(self) -> Part:
        """The fragment that the next round is of."""
        return self.fragments.at(self.round)

    @property
    def wire(self) -> WireFormat:
        """How that round is written."""
        return self.part.wire

    def chunk_digests(self) -> list[bytes]:
        return chunk_digests((self.anchor, *self.buffers), self.fragments.sizes)

    def digest(self) -> str:
        """`state_digest` of this state as it is now.

        With several fragments, those are not read again that no update has changed since the last time.
        """
        if len(self.fragments) == 1:
            return digest_of((self.anchor, *self.buffers))
        for index, (start, stop) in enumerate(self.fragments.bounds):
            if index not in self._digests:
                self._digests[index] = digest_of([tensor[start:stop] for tensor in (self.anchor, *self.buffers)])
        return _combined([self._digests[index] for index in range(len(self.fragments))])

    def replaced(self) -> None:
        """All of the state was written by other means than `apply`."""
        self._digests.clear()

    def changed(self, fragment: int) -> None:
        """That fragment is written by other means than `apply`."""
        self._digests.pop(fragment, None)

    @property
    def moments(self) -> Sequence[Tensor]:
        """The means of the first and the second moments, where peers average them: the last two buffers."""
        return self.buffers[-2:]

    @property
    def result(self) -> Tensor:
        """The result of the run so far: the anchor, or the average of anchors that the optimizer keeps."""
        return self.optimizer.result(self.anchor, self.buffers, self.round)

    def source(self, local: Tensor) -> Source:
        """What a peer contributes whose parameters are `local` (fp32, CPU; its fragment first): the pseudo-gradient.

        In a round of moments `local` is those, and the difference from their last mean is sent. Where peers send
        gradients, `local` is one, and is sent as it is.
        """
        part = self.part
        before = self.moments[part.moments - 1] if part.moments else self.anchor
        anchor = before[part.start : part.stop] if self.rate is None else None
        return Source(local[: part.stop - part.start], anchor)

    def split_update(
        self, payload: Payload, weights: Sequence[int], round: int | None = None, shares: Sequence[int] = ()
    ) -> AnyUpdate:
        """The update that a donor sent, of members with these weights; raises as `WireFormat.split`.

        Args:
            round: rounds of the state that it carried on, if that is not this one as it is.
            shares: of the members, where they did not all do the same.
        """
        part = self.part if round is None else self.fragments.at(round)
        return part.wire.among(shares).split(payload, weights, part.rounds)

    def check(self, update: AnyUpdate) -> None:
        """Refuse an update that must not be committed, since it could carry the state beyond fp32's range.

        Raises:
            NonFiniteError: it may hold values above LARGEST_VALUE.
        """
        self._check_size(update)
        for start, stop in tile_ranges(0, update.numel):
            bound = bound_of(update, start, stop)
            if not bound <= LARGEST_VALUE:  # NaN compares as false
                values = f"values [{start}, {stop}) of the update"
                raise NonFiniteError(f"{values} may reach {bound:.2g}: more than {LARGEST_VALUE:.2g} is not applied")

    def apply(self, update: AnyUpdate, round: int, lineage_id: str) -> None:
        """Take the outer step with `update`, in place, and stand at `round` and `lineage_id`.

        Cannot fail half-way: an `Update` was checked when it was made.
        """
        part = self._check_size(update)
        own = slice(part.start, part.stop)
        vectors = Vectors(self.anchor[own], [buffer[own] for buffer in self.buffers])
        self.changed(part.index)
        self.carry_on(vectors, update, part.start, part.stop, self.round)
        self.round = round
        self.lineage_id = lineage_id

    def carry_on(self, vectors: Vectors, update: Aggregate, start: int, stop: int, round: int) -> None:
        """Take the outer step of elements [start, stop) of the state of `round`, in place.

        Args:
            vectors: these elements and no others, fp32 [stop - start] each: of this state, or of a copy.
            update: the one that carried that state on.
            start: of the update's fragment: a multiple of TILE_ELEMENTS from its start; so is `stop`, unless it is the
                end.
        """
        part, scale = self.fragments.at(round), 1.0 if self.rate is None else self.rate(round)
        first = start - part.start
        if part.moments:
            mean = Vectors(vectors.buffers[part.moments - 3], [])
            step_(MEAN, mean, ((0, stop - start),), update, start=first)
            return
        clipped = self._clipped(update)
        step_(self.optimizer, vectors, ((0, stop - start),), clipped, start=first, round=part.rounds, lr_scale=scale)

    def _clipped(self, update: Aggregate) -> Aggregate:
        """What the optimizer takes of an update."""
        if self.optimizer.max_norm is None:
            return update
        last = self._factor
        if last is None or last[0]() is not update:
            self._factor = last = (weakref.ref(update), clip_factor(update, self.optimizer.max_norm))
        return Scaled(update, last[1])

    def _check_size(self, update: AnyUpdate) -> Part:
        part = self.part
        size = part.stop - part.start
        assert update.numel == size, f"update of {update.numel} values on a fragment of {size}"
        return part


def chunk_digests(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[bytes]:
    """BLAKE3 (32 bytes) of each column as raw little-endian fp32: the anchor's, then each buffer's.

    Args:
        sizes: elements of each fragment.
    """
    return [hashing.digest(_bytes_of(tensor[start:stop])) for tensor in tensors for start, stop in columns(sizes)]


def digest_of(tensors: Sequence[Tensor], sizes: Sequence[int] | None = None) -> str:
    """`state_digest` of an anchor and its buffers, fp32 [P] each on the CPU; `sizes`: of fragments, if it has some."""
    sizes = (tensors[0].numel(),) if sizes is None else sizes
    return state_digest(chunk_digests(tensors, sizes), sizes, len(tensors) - 1)


def state_digest(digests: Sequence[bytes], sizes: Sequence[int], num_buffers: int) -> str:
    """Of a fragment: SHA-256 over tag, P (u64 LE), number of buffers (u8) and its chunk digests, as 64 hex digits.

    Of several fragments it is SHA-256 over another tag, their number (u16 LE) and their digests.
    A joiner checks the list of chunk digests that a donor sent with it, and then each chunk as it arrives.

    Args:
        digests: of the columns, as `chunk_digests` has them.
        sizes: elements of each fragment.

    Raises:
        ProtocolError: not one 32-byte digest per chunk.
    """
    counts = [-(-size // CHUNK) for size in sizes]
    width = sum(counts)
    if len(digests) != (1 + num_buffers) * width or any(len(digest) != 32 for digest in digests):
        raise ProtocolError(f"{len(digests)} chunk digests; must be {(1 + num_buffers) * width} of 32 bytes")
    found, first = [], 0
    for size, count in zip(sizes, counts, strict=True):
        own = (digests[row * width + first :][:count] for row in range(1 + num_buffers))
        header = _DIGEST_TAG + size.to_bytes(8, "little") + num_buffers.to_bytes(1, "little")
        found.append(hashlib.sha256(header + b"".join(itertools.chain(*own))).hexdigest())
        first += count
    return _combined(found)


def _combined(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    header = _FRAGMENTS_TAG + len(digests).to_bytes(2, "little")
    return hashlib.sha256(header + b"".join(map(bytes.fromhex, digests))).hexdigest()


def columns(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) of the chunks of consecutive fragments of these sizes; none holds elements of two."""
    first = 0
    for size in sizes:
        for start, stop in chunks(size, CHUNK):
            yield first + start, first + stop
        first += size


def chunks(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of consecutive chunks of `size` elements; the last may be shorter."""
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def _bytes_of(chunk: Tensor) -> memoryview:
    return chunk.detach().numpy().astype("<f4", copy=False).data


def bound_of(update: AnyUpdate, start: int, stop: int) -> float:
    """What no value of this range of an update exceeds; NaN for NaN."""
    coded = update.coded(start, stop)
    if coded is not None:
        return max(one.bound for one in coded)
    low, high = torch.aminmax(update.decode_range(start, stop))
    return max(-low.item(), high.item())
