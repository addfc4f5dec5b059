"""Top-k of stretches or tiles, or of their cosine coefficients: `top64/4096+int2`, `dct64+top32/4096+int8`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peer.outer.compress.base import (
    Payload,
    PayloadError,
    Shapes,
    check_length,
    check_vector,
    empty_payload,
    empty_vector,
    read_bytes,
)
from peer.outer.compress.dct import Cosine
from peer.outer.compress.layout import Section, numel_of, tiled_sections
from peer.outer.compress.records import Records, scatter
from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_elements

_COSINE_TILE_ELEMENTS = 1 << 17  # the inverse transform is in fp64, and several times slower outside the cache


@dataclass(frozen=True)
class TopK:
    """The `records.k` largest magnitudes of every block; the payload is one record per block, tensor by tensor.

    Without `side`, blocks are stretches of `line` consecutive values, and shapes do not matter. With it, matrices are
    cut into tiles of `side` x `side` and 1-D tensors into stretches of `line`; see `layout.tiled_sections` for
    dimensions that do not divide. A block of w <= k values keeps them all. For the error see `Records`.

    With `transform`, a block holds the coefficients of an orthonormal transform (2-D of tiles, 1-D of stretches), and
    its error has the norm of the error of the coefficients, up to 1e-6 of the norm of the block. Finite values whose
    coefficients leave fp32's range are refused like infinite ones.
    """

    records: Records
    line: int
    side: int | None = None
    transform: Cosine | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def name(self) -> str:
        """`top{k}/{block}+{values}`, with a block of `{side}x{side}` for tiles, or after `dct{line}+` of line^2."""
        k, values = self.records.k, self.records.values.name
        if self.transform is None:
            block = f"{self.line}" if self.side is None else f"{self.side}x{self.side}"
            return f"top{k}/{block}+{values}"
        return f"dct{self.line}+top{k}/{self.line if self.side is None else self.side**2}+{values}"

    @property
    def block(self) -> int:
        """Values of a whole block."""
        return self.line if self.side is None else self.side**2

    def keeping(self, k: int) -> TopK:
        """The same, keeping `k` values of each block; raises PayloadError if a block has fewer."""
        if not 1 <= k <= self.block:
            raise PayloadError(f"{k} of {self.block} values of a block; must be in [1, {self.block}]")
        return replace(self, records=replace(self.records, k=k))

    @property
    def fixed_size(self) -> bool:
        """True."""
        return True

    def bind(self, shapes: Shapes) -> TopK:
        return self if self.side is None else replace(self, shapes=tuple(map(tuple, shapes)))

    def seeded(self, seed: int) -> TopK:  # noqa: ARG002
        """Itself: nothing is random."""
        return self

    def encode(self, x: Tensor) -> bytes:
        check_vector(x)
        payload = empty_payload(self.wire_bytes(x.numel()))
        for section, first, last, offset in self._groups(x.numel(), tile_elements(x.device)):
            bands = section.rectangle(x, first, last)
            if self.transform is None:
                tiles = section.tiles(bands)
            else:
                tiles = self.transform.rows(section.tiles(self.transform.columns(bands)))
            records = self.records.pack(tiles.flatten(1)).flatten()
            payload[offset : offset + records.numel()] = records
        return payload.numpy().tobytes()

    def decode(self, payload: Payload, n: int) -> Tensor:
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        decoded = empty_vector(n)
        elements = TILE_ELEMENTS if self.transform is None else _COSINE_TILE_ELEMENTS
        for section, first, last, offset in self._groups(n, elements):
            blocks = (last - first) * section.per_band
            records = read_bytes(view, offset, blocks, self.records.size(section.block))
            places, values = self.records.unpack(records, section.block)
            out = section.rectangle(decoded, first, last)
            if self.transform is not None:
                self.transform.inverse(places, values, section.cut(out))
            elif section.tile_rows == 1:
                scatter(places, values, out.view(blocks, section.block))
            else:
                tiles = torch.empty(blocks, section.block)
                scatter(places, values, tiles)
                section.cut(out).copy_(section.untiled(tiles))
        return decoded

    def wire_bytes(self, n: int) -> int:
        """One record per block: scales, positions and codes, each padded to whole bytes."""
        blocks: Counter[int] = Counter()
        for section in self._sections(n):
            blocks[section.block] += section.num_blocks
        return sum(count * self.records.size(width) for width, count in blocks.items())

    def _sections(self, n: int) -> tuple[Section, ...]:
        shapes = ((n,),) if self.shapes is None else self.shapes
        assert numel_of(shapes) == n, f"bound to {numel_of(shapes)} values, not {n}"
        return tiled_sections(shapes, self.side or 1, self.line)

    def _groups(self, n: int, elements: int) -> Iterator[tuple[Section, int, int, int]]:
        """(section, first band, last band, offset in the payload) of every group, in order."""
        offset = 0
        for section in self._sections(n):
            for first, last in section.bands(elements):
                yield section, first, last, offset
                offset += (last - first) * section.per_band * self.records.size(section.block)
