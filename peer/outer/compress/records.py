"""The k largest magnitudes of each block as a record of fixed size: scales, positions, codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peer.outer.compress.base import PayloadError
from peer.outer.compress.bits import INDEX_BITS, pack_indices, packed_bytes, unpack_indices
from peer.outer.compress.select import largest_places
from peer.outer.compress.values import Values

MAX_BLOCK = 1 << INDEX_BITS[-1]


@dataclass(frozen=True)
class Records:
    """Top-k of blocks; a block of w values keeps min(k, w) of them, and needs no positions when it keeps all.

    Positions are strictly increasing, of 8, 12 or 16 bits, whichever is enough for w. The error is |x| for a value
    that is not kept, and otherwise that of `values` with the kept values of the block as its row.
    """

    k: int
    values: Values

    def kept(self, width: int) -> int:
        """Values kept of a block of `width`."""
        return min(self.k, width)

    def index_bits(self, width: int) -> int:
        """Bits of a position within a block of `width`; 0 if all are kept."""
        if self.kept(width) == width:
            return 0
        return next(bits for bits in INDEX_BITS if width <= 1 << bits)

    def size(self, width: int) -> int:
        """Bytes of the record of a block of `width` values."""
        return sum(self._parts(width))

    def _parts(self, width: int) -> list[int]:
        kept = self.kept(width)
        indices = packed_bytes(kept, self.index_bits(width))
        return [self.values.scale_bytes, indices, packed_bytes(kept, self.values.bits)]

    def pack(self, blocks: Tensor) -> Tensor:
        """Fp32 [t, w] -> uint8 [t, size(w)].

        Raises:
            NonFiniteError: NaN or infinity anywhere (they count as the largest and so are always kept).
        """
        bits = self.index_bits(blocks.shape[1])
        if bits == 0:
            return torch.cat(self.values.quantize(blocks), dim=1)
        indices = largest_places(blocks, self.k)
        scales, codes = self.values.quantize(blocks.gather(1, indices))
        return torch.cat((scales, pack_indices(indices, bits), codes), dim=1)

    def unpack(self, records: Tensor, width: int) -> tuple[Tensor | None, Tensor]:
        """Uint8 [t, size(w)] -> positions int64 [t, kept] (None if all are kept), values fp32 [t, kept].

        Raises:
            PayloadError: positions that do not increase or lie outside the block; see `Values.check`.
        """
        # Copies, since values are read through wider views, which must be aligned.
        parts = torch.split(records, self._parts(width), dim=1)
        scales, packed, codes = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        kept = torch.empty(records.shape[0], self.kept(width))
        self.values.check(scales.numpy(), codes.numpy(), kept.shape[1])
        self.values.dequantize(scales.numpy(), codes.numpy(), kept)
        bits = self.index_bits(width)
        if bits == 0:
            return None, kept
        indices = unpack_indices(packed, self.k, bits)
        if bool((indices[:, -1] >= width).any()) or bool((indices[:, 1:] <= indices[:, :-1]).any()):
            raise PayloadError(f"positions within a block must increase and be below {width}")
        return indices, kept


def scatter(indices: Tensor | None, values: Tensor, out: Tensor) -> None:
    """What `unpack` gave into `out` [t, w], contiguous and of the dtype of `values`; everything else becomes 0."""
    if indices is None:
        out.copy_(values)
        return
    out.zero_().scatter_(1, indices, values)
