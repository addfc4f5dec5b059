"""Seeded random coordinates, or one seeded stretch: positions that both sides know, and that no payload carries.

The generator is SplitMix64 as a hash of (seed, counter), in unsigned 64-bit integers: part of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError, Payload, Shapes, check_length, check_vector, is_finite
from peer.outer.compress.threshold import number, share
from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_ranges

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RandomK:
    """k = ceil(ratio n) coordinates that change with the seed, coded by `values` as one vector; the others decode to 0.

    Scattered: the vector is cut into k stretches whose lengths differ by at most one, one coordinate of each is taken,
    and all are rotated together. `contiguous`: k consecutive ones. Either way, each coordinate is as likely as any
    other, and the ends of the vector meet. Values are not scaled by 1 / ratio: use error feedback. The error of a
    value is |x|, or that of `values`.
    """

    ratio: float
    values: Compressor
    contiguous: bool = False
    seed: int | None = None

    @property
    def name(self) -> str:
        """`random{ratio}+{values}` or `randomblock{ratio}+{values}`."""
        return f"random{'block' if self.contiguous else ''}{number(self.ratio)}+{self.values.name}"

    @property
    def fixed_size(self) -> bool:
        """True."""
        return True

    def bind(self, shapes: Shapes) -> RandomK:  # noqa: ARG002
        """Itself: shapes do not matter."""
        return self

    def seeded(self, seed: int) -> RandomK:
        """See `Codec.seeded`; seeds are taken modulo 2^64."""
        return replace(self, seed=seed & _MASK)

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`; needs a seed."""
        check_vector(x)
        if not is_finite(x):
            raise NonFiniteError(f"cannot encode {x.numel()} values: some are NaN or infinite")

        def read(start: int, stop: int) -> Tensor:
            return x[torch.from_numpy(self.positions(x.numel(), start, stop)).to(x.device)]

        return self.values.encode_ranges(share(self.ratio, x.numel()), read)

    def decode(self, payload: Payload, n: int) -> Tensor:
        """See `Codec.decode`; needs the sender's seed."""
        k = share(self.ratio, n)
        check_length(payload, self.values.wire_bytes(k), self.name, n)
        decoded = np.zeros(n, np.float32)
        for start, stop in tile_ranges(0, k, self.values.block, TILE_ELEMENTS):
            decoded[self.positions(n, start, stop)] = self.values.decode_range(payload, k, start, stop).numpy()
        return torch.from_numpy(decoded)

    def wire_bytes(self, n: int) -> int:
        """The coded values, and nothing else."""
        return self.values.wire_bytes(share(self.ratio, n))

    def positions(self, n: int, start: int, stop: int) -> NDArray[np.int64]:
        """The chosen coordinates [start, stop) of all k; distinct, within [0, n)."""
        assert self.seed is not None, f"{self.name} needs a seed: codec.seeded(round)"
        k = share(self.ratio, n)
        assert 0 <= start <= stop <= k, f"range [{start}, {stop}) is not within [0, {k})"
        turn = int(_hash(self.seed, 0, 1)[0] % np.uint64(max(n, 1)))
        counters = np.arange(start, stop)
        if self.contiguous:
            return (counters + turn) % max(n, 1)
        length, longer = divmod(n, max(k, 1))  # the first `longer` stretches have one more
        lengths = (length + (counters < longer)).astype(np.uint64)
        within = (_hash(self.seed, start + 1, stop + 1) % np.maximum(lengths, np.uint64(1))).astype(np.int64)
        return (counters * length + np.minimum(counters, longer) + within + turn) % max(n, 1)


def _hash(seed: int, start: int, stop: int) -> NDArray[np.uint64]:
    """SplitMix64 of the counters [start, stop), after one of the seed; a remainder modulo m is biased by m / 2^64."""
    counters = np.arange(start, stop, dtype=np.uint64)
    return _mix(_mix(np.array([seed], np.uint64)) + counters * np.uint64(_GOLDEN))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
