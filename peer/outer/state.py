"""The outer state, which all peers of a run hold bit-identically, and the updates that carry it on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from peer.errors import ProtocolError
from peer.outer.compress.base import Compressor, NonFiniteError, Payload, PayloadError, is_finite
from peer.outer.compress.feedback import Residual
from peer.outer.fragments import partition
from peer.outer.optimizer import OuterOptimizer, Vectors
from peer.protocol import hashing

CHUNK = 1 << 20  # elements; part of the protocol, since the digest is a digest of chunk digests
PIECE = 1 << 18  # elements that are worked on at a time: temporaries of 1 MB stay in the cache, and in the heap
Decode = Callable[[int, int, Tensor], object]
_DIGEST_TAG = b"atoll-state-2"


@dataclass(frozen=True)
class Update:
    """The aggregated, compressed pseudo-gradient D of one round: one payload per part of `partition`.

    An instance is valid: every byte was checked when it was made, so that applying it cannot fail half-way.

    Attributes:
        parts: one payload per part, in order; as many as the round had reducers.
        numel: elements P in all.
        compressor: the codec that wrote every part.

    Raises:
        PayloadError: at construction, for no parts, a part of the wrong length, or a malformed value.
    """

    parts: tuple[Payload, ...]
    numel: int
    compressor: Compressor

    def __post_init__(self) -> None:
        if not self.parts:
            raise PayloadError("an update of 0 parts; it must have at least 1")
        for payload, (start, stop) in zip(self.parts, self.bounds, strict=True):
            self.compressor.check(payload, stop - start)

    @classmethod
    def split(cls, payload: bytes, numel: int, num_parts: int, compressor: Compressor) -> Update:
        """Cut a concatenated payload back into its parts.

        Raises:
            PayloadError: not exactly the length that `num_parts` parts of `numel` elements have, or malformed.
        """
        if num_parts < 1:
            raise PayloadError(f"an update of {num_parts} parts; it must have at least 1")
        lengths = [compressor.wire_bytes(b - a) for a, b in partition(numel, num_parts, compressor.block)]
        if len(payload) != sum(lengths):
            raise PayloadError(f"update of {numel} values is {len(payload)} bytes; it must be {sum(lengths)}")
        parts, position = [], 0
        for length in lengths:
            parts.append(payload[position : position + length])
            position += length
        return cls(tuple(parts), numel, compressor)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each part, in elements."""
        return partition(self.numel, len(self.parts), self.compressor.block)

    @property
    def payload(self) -> bytes:
        """All parts, one after the other: what is stored, served and hashed."""
        return b"".join(self.parts)

    def digest(self) -> str:
        """BLAKE3 of `payload` as 64 hex digits."""
        return hashing.digest(*self.parts).hex()

    def decode_range(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Elements [start, stop) of D as fp32 [stop - start]; both multiples of the block, or stop == numel.

        Payloads were checked at construction, and are not again.

        Args:
            out: where to write them; a new vector by default.
        """
        return decode_parts(self.parts, self.bounds, self.compressor, start, stop, out)


class OuterState:
    """Anchor, outer buffers and the round they stand at.

    Args:
        anchor: fp32 [P] on the CPU; used in place and never reallocated, so that it may live in shared memory.
        buffers: `optimizer.num_buffers` times fp32 [P], likewise.
        optimizer: the outer optimizer.
        compressor: the codec of contributions.
        round: rounds applied since genesis.
        lineage_id: id of the last link of the lineage, 64 hex digits; the digest itself at genesis.
    """

    def __init__(
        self,
        anchor: Tensor,
        buffers: list[Tensor],
        optimizer: OuterOptimizer,
        compressor: Compressor,
        round: int = 0,
        lineage_id: str = "",
    ) -> None:
        assert len(buffers) == optimizer.num_buffers, f"{len(buffers)} buffers; need {optimizer.num_buffers}"
        assert PIECE % compressor.block == 0, f"pieces of {PIECE} do not hold whole blocks of {compressor.block}"
        for tensor in (anchor, *buffers):
            assert tensor.shape == (anchor.numel(),), f"shape {tuple(tensor.shape)}; need ({anchor.numel()},)"
            assert tensor.dtype == torch.float32, f"{tensor.dtype}; need torch.float32"
            assert tensor.device.type == "cpu", f"{tensor.device}; need the CPU"
            assert tensor.is_contiguous(), f"stride {tensor.stride()}; need a contiguous vector"
        self.anchor = anchor
        self.buffers = buffers
        self.optimizer = optimizer
        self.compressor = compressor
        self.round = round
        self.lineage_id = lineage_id

    @property
    def numel(self) -> int:
        """P, the elements of the anchor and of each buffer."""
        return self.anchor.numel()

    def chunk_digests(self) -> list[bytes]:
        """BLAKE3 (32 bytes) of each CHUNK of elements as raw little-endian fp32: the anchor's, then each buffer's."""
        return [
            hashing.digest(_bytes_of(tensor[start:stop]))
            for tensor in (self.anchor, *self.buffers)
            for start, stop in chunks(self.numel, CHUNK)
        ]

    def digest(self) -> str:
        """`state_digest` of this state as it is now."""
        return state_digest(self.chunk_digests(), self.numel, len(self.buffers))

    @property
    def result(self) -> Tensor:
        """What the run yields as it stands: the anchor, or the average of anchors that the optimizer keeps."""
        return self.optimizer.result(self.anchor, self.buffers, self.round)

    def pseudo_gradient(self, local: Tensor, start: int, stop: int) -> Tensor:
        """anchor - local on [start, stop), as a new fp32 vector (arXiv 2311.08105, algorithm 1, line 12)."""
        return self.anchor[start:stop] - local[start:stop]

    def encode_contribution(
        self, local: Tensor, bounds: Sequence[tuple[int, int]], residual: Residual | None = None
    ) -> list[bytes]:
        """One payload per part: the encoded pseudo-gradient of `local` (fp32 [P], CPU).

        Args:
            local: the peer's parameters at the snapshot.
            bounds: `partition(P, number of reducers, compressor.block)`.
            residual: what earlier contributions lost, with error feedback; the caller commits or reverts it.

        Raises:
            NonFiniteError: the local parameters hold NaN or infinity, or lie beyond fp32's range from the anchor.
        """
        assert local.shape == self.anchor.shape, f"local {tuple(local.shape)}, anchor {tuple(self.anchor.shape)}"
        payloads = []
        for start, stop in bounds:
            try:
                payloads.append(self._encode_part(local, start, stop, residual))
            except NonFiniteError:
                raise NonFiniteError(f"local parameters [{start}, {stop}) hold NaN or infinity") from None
        return payloads

    def _encode_part(self, local: Tensor, start: int, stop: int, residual: Residual | None) -> bytes:
        def read(first: int, last: int) -> Tensor:
            return self.pseudo_gradient(local, start + first, start + last)

        if residual is not None:
            return residual.encode(self.compressor, start, stop, read)
        return self.compressor.encode_ranges(stop - start, read)

    def scratch(self) -> list[Tensor]:
        """What `preview_chunk` works in."""
        return [torch.empty(min(PIECE, self.numel)) for _ in range(2 + len(self.buffers))]

    def preview(self, update: Update) -> str:
        """The digest that `apply(update, ...)` would produce, changing nothing; temporaries are a few chunks.

        Raises:
            NonFiniteError: the update would carry the state beyond fp32's range; it must not be committed.
        """
        assert update.numel == self.numel, f"update of {update.numel} values on a state of {self.numel}"
        scratch = self.scratch()
        return self.joined_digest(
            [self.preview_chunk(update.decode_range, *bounds, scratch) for bounds in chunks(self.numel, CHUNK)]
        )

    def joined_digest(self, by_chunk: Sequence[Sequence[bytes]]) -> str:
        """`state_digest` of what `preview_chunk` has yielded for each chunk, in order."""
        by_tensor = zip(*by_chunk, strict=True)
        return state_digest([digest for own in by_tensor for digest in own], self.numel, len(self.buffers))

    def preview_chunk(self, decode: Decode, first: int, last: int, scratch: Sequence[Tensor]) -> list[bytes]:
        """The digests of one chunk, [first, last), of the anchor and of each buffer after an update; see `preview`.

        Args:
            decode: writes elements [start, stop) of the update.
        """
        hashers = [hashing.Hasher() for _ in (self.anchor, *self.buffers)]
        for start, stop in pieces(first, last):
            decoded, anchor, *buffers = (vector[: stop - start] for vector in scratch)
            decode(start, stop, decoded)
            self.optimizer.step(self._vectors(start, stop), decoded, Vectors(anchor, buffers), round=self.round)
            for shadow, hasher in zip((anchor, *buffers), hashers, strict=True):
                if not is_finite(shadow):
                    raise NonFiniteError(f"the update makes values [{start}, {stop}) of the state infinite")
                hasher.update(_bytes_of(shadow))
        return [hasher.digest() for hasher in hashers]

    def apply(self, update: Update, round: int, lineage_id: str) -> None:
        """Take the outer step with `update`, in place, and stand at `round` and `lineage_id`.

        Cannot fail half-way: an `Update` was checked when it was made. `preview` tells the digest beforehand.
        """
        assert update.numel == self.numel, f"update of {update.numel} values on a state of {self.numel}"
        scratch = torch.empty(min(PIECE, self.numel))
        for start, stop in pieces(0, self.numel):
            decoded = update.decode_range(start, stop, scratch[: stop - start])
            self.optimizer.step_(*self._vectors(start, stop), decoded, round=self.round)
        self.round = round
        self.lineage_id = lineage_id

    def _vectors(self, start: int, stop: int) -> Vectors:
        return Vectors(self.anchor[start:stop], [buffer[start:stop] for buffer in self.buffers])


def state_digest(chunk_digests: Sequence[bytes], numel: int, num_buffers: int) -> str:
    """SHA-256 over tag, P (u64 LE), number of buffers (u8) and the chunk digests, as 64 hex digits.

    A joiner checks the list of chunk digests that a donor sent with it, and then each chunk as it arrives.

    Raises:
        ProtocolError: not one 32-byte digest per chunk.
    """
    expected = (1 + num_buffers) * -(-numel // CHUNK)
    if len(chunk_digests) != expected or any(len(digest) != 32 for digest in chunk_digests):
        raise ProtocolError(f"{len(chunk_digests)} chunk digests; must be {expected} of 32 bytes")
    header = _DIGEST_TAG + numel.to_bytes(8, "little") + num_buffers.to_bytes(1, "little")
    return hashlib.sha256(header + b"".join(chunk_digests)).hexdigest()


def decode_parts(
    parts: Sequence[Payload], bounds: Sequence[tuple[int, int]], compressor: Compressor, start: int, stop: int,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Elements [start, stop) of the vector whose parts have these payloads and [start, stop); nothing is checked."""
    decoded = torch.empty(stop - start) if out is None else out
    for payload, (first, last) in zip(parts, bounds, strict=True):
        a, b = max(start, first), min(stop, last)
        if a < b:
            own = decoded[a - start : b - start]
            compressor.decode_range(payload, last - first, a - first, b - first, own, checked=True)
    return decoded


def chunks(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of consecutive chunks of `size` elements; the last may be shorter."""
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop), with `start` a multiple of CHUNK, cut into pieces small enough for the cache."""
    for first in range(start, stop, PIECE):
        yield first, min(first + PIECE, stop)


def _bytes_of(chunk: Tensor) -> memoryview:
    return chunk.detach().numpy().astype("<f4", copy=False).data
