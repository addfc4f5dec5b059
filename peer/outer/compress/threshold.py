"""A hard threshold on magnitudes, set to keep a fraction of the values and refreshed now and then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError, Payload, PayloadError, Shapes, check_vector, is_finite
from peer.outer.numerics.tiles import tile_elements, tile_ranges

_BLOCK_BITS = 16  # positions are within blocks of 65536
_BLOCK = 1 << _BLOCK_BITS
_SMALLEST = 2.0**-149  # zeros are never sent
_LOW_BITS = 16
DEFAULT_EVERY = 32


@dataclass(frozen=True)
class Threshold:
    """Values of magnitude >= `at` with their positions (arXiv 2010.08899); everything else decodes to 0.

    The sender sets the threshold to the k-th magnitude, k = ceil(ratio n), and keeps it for `every` payloads; it
    recomputes it earlier if more than 2 k values pass. At most 2 k values are ever sent, the first ones. `values` codes
    them as one vector: the error of a value is |x| < threshold, or that of `values`.

    Payload: how many pass in each block of 65536 (uint32), their positions in it (uint16, increasing), the coded
    values.
    """

    ratio: float
    values: Compressor
    every: int = DEFAULT_EVERY
    at: float | None = None

    @property
    def name(self) -> str:
        """`threshold{ratio}+{values}`, with `@{every}` after the ratio when it is not 32."""
        every = "" if self.every == DEFAULT_EVERY else f"@{self.every}"
        return f"threshold{number(self.ratio)}{every}+{self.values.name}"

    @property
    def fixed_size(self) -> bool:
        """False."""
        return False

    def bind(self, shapes: Shapes) -> Threshold:  # noqa: ARG002
        """Itself: shapes do not matter."""
        return self

    def seeded(self, seed: int) -> Threshold:  # noqa: ARG002
        """Itself: nothing is random."""
        return self

    def tuned(self, x: Tensor, previous: float | None) -> Threshold:
        """With the threshold `previous` where that still keeps at most 2 k values of `x`, else the k-th magnitude.

        Raises:
            NonFiniteError: `x` holds NaN or infinity.
        """
        check_vector(x)
        if previous is None or self._count(x, previous) > self.most(x.numel()):
            return replace(self, at=max(_SMALLEST, kth_magnitude(x, share(self.ratio, x.numel()))))
        return replace(self, at=previous)

    def encode(self, x: Tensor) -> bytes:
        """See `Codec.encode`; without a threshold, `tuned` comes first."""
        check_vector(x)
        if self.at is None:
            return self.tuned(x, None).encode(x)
        if not is_finite(x):
            raise NonFiniteError(f"cannot encode {x.numel()} values: some are NaN or infinite")
        counts, places, kept, left = [], [], [], self.most(x.numel())
        for start, stop in _groups(x):
            group = x[start:stop]
            passing = _passing(group, self.at)[:left]
            left -= passing.numel()
            counts.append(torch.bincount(passing >> _BLOCK_BITS, minlength=-(-(stop - start) // _BLOCK)).cpu())
            places.append((passing & (_BLOCK - 1)).cpu().numpy().astype("<u2"))
            kept.append(group[passing])
        if not counts:
            return b""
        header = torch.cat(counts).numpy().astype("<u4").tobytes() + np.concatenate(places).tobytes()
        return header + self.values.encode(torch.cat(kept))

    def decode(self, payload: Payload, n: int) -> Tensor:
        view = memoryview(payload)
        header = 4 * -(-n // _BLOCK)
        if not header <= view.nbytes <= self.wire_bytes(n):
            limits = f"from {header} to {self.wire_bytes(n)}"
            raise PayloadError(f"{self.name} payload of {n} values is {view.nbytes} bytes; it must be {limits}")
        counts = np.frombuffer(view, "<u4", header // 4).astype(np.int64)
        total = int(counts.sum())
        expected = header + 2 * total + self.values.wire_bytes(total)
        if total > self.most(n) or view.nbytes != expected:
            what = f"{total} of at most {self.most(n)} values in {view.nbytes} bytes"
            raise PayloadError(f"{self.name} payload of {n} values holds {what}")
        positions = np.frombuffer(view, "<u2", total, header).astype(np.int64)
        positions += np.repeat(np.arange(counts.size) * _BLOCK, counts)
        if total and (positions[-1] >= n or (positions[1:] <= positions[:-1]).any()):
            raise PayloadError(f"{self.name} payload: positions must increase and be below {n}")
        decoded = np.zeros(n, np.float32)
        decoded[positions] = self.values.decode(view[header + 2 * total :], total).numpy()
        return torch.from_numpy(decoded)

    def wire_bytes(self, n: int) -> int:
        """At most: 4 ceil(n / 65536) + 2 most(n) + the coded values."""
        most = self.most(n)
        return 4 * -(-n // _BLOCK) + 2 * most + self.values.wire_bytes(most)

    def most(self, n: int) -> int:
        """Values that a payload of n elements can hold: min(n, 2 k)."""
        return min(n, 2 * share(self.ratio, n))

    def _count(self, x: Tensor, threshold: float) -> int:
        return sum(_passing(x[start:stop], threshold).numel() for start, stop in _groups(x))


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest |x|, exactly, by two histograms of 16 bits: no copy and no sort of `x` fp32 [n], n >= k >= 1.

    Raises:
        NonFiniteError: `x` holds NaN or infinity.
    """
    if x.numel() == 0:
        return 0.0
    if not is_finite(x):
        raise NonFiniteError(f"cannot encode {x.numel()} values: some are NaN or infinite")
    above = torch.zeros(1 << 15, dtype=torch.int64, device=x.device)
    for start, stop in _groups(x):
        above += torch.bincount(_magnitude_bits(x[start:stop]) >> _LOW_BITS, minlength=1 << 15)
    prefix, k = _find(above, k)
    below = torch.zeros(1 << _LOW_BITS, dtype=torch.int64, device=x.device)
    for start, stop in _groups(x):
        bits = _magnitude_bits(x[start:stop])
        chosen = bits[(bits >> _LOW_BITS) == prefix]
        below += torch.bincount(chosen & 0xFFFF, minlength=1 << _LOW_BITS)
    low, _ = _find(below, k)
    return float(np.uint32((prefix << _LOW_BITS) | low).view(np.float32))


def share(ratio: float, n: int) -> int:
    """k = ceil(ratio n), at most n."""
    return min(n, math.ceil(ratio * n))


def number(value: float) -> str:
    """The shortest decimal form that reads back as `value`: `1`, `0.01`."""
    return repr(float(value)).removesuffix(".0")


def _magnitude_bits(x: Tensor) -> Tensor:
    """As integers, magnitudes are ordered like the numbers."""
    return x.view(torch.int32) & 0x7FFFFFFF


def _find(histogram: Tensor, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest, and which one of that bin it is."""
    from_top = histogram.flip(0).cumsum(0)
    place = int((from_top < k).sum())
    before = int(from_top[place - 1]) if place else 0
    return histogram.numel() - 1 - place, k - before


def _passing(group: Tensor, threshold: float) -> Tensor:
    """Int64: where |x| >= threshold, increasing, on the device of `group`."""
    magnitudes = group.abs()
    if group.device.type == "cpu":  # several times as fast as torch there
        return torch.from_numpy(np.flatnonzero(magnitudes.numpy() >= threshold))
    return (magnitudes >= threshold).nonzero().squeeze(1)


def _groups(x: Tensor) -> Iterator[tuple[int, int]]:
    return tile_ranges(0, x.numel(), _BLOCK, tile_elements(x.device))
