"""No compression: little-endian fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from peer.outer.compress.base import (
    NonFiniteError,
    Payload,
    PayloadError,
    Read,
    StatelessCodec,
    check_length,
    check_range,
    check_vector,
    is_finite,
    look_at,
    receiver,
)
from peer.outer.compress.values import FP32_INFINITY, check_floats
from peer.outer.numerics.scratch import scratch_vector
from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_elements, tile_ranges


@dataclass(frozen=True)
class Fp32(StatelessCodec):
    """The vector itself, 4 bytes a value, error 0."""

    @property
    def name(self) -> str:
        """`fp32`."""
        return "fp32"

    @property
    def block(self) -> int:
        """1: any cut is a good cut."""
        return 1

    def encode(self, x: Tensor) -> bytes:
        check_vector(x)
        for start, stop in tile_ranges(0, x.numel(), 1, tile_elements(x.device)):
            _check_finite(x[start:stop], start)
        return x.detach().cpu().numpy().astype("<f4", copy=False).tobytes()

    def encode_ranges(self, n: int, read: Read) -> bytes:
        values = scratch_vector(n).numpy().view("<f4")
        for start, stop in tile_ranges(0, n, 1, TILE_ELEMENTS):
            x = read(start, stop)
            check_vector(x)
            _check_finite(x, start)
            values[start:stop] = x.detach().cpu().numpy()
        return values.tobytes()

    def decode(self, payload: Payload, n: int) -> Tensor:
        return self.decode_range(payload, n, 0, n)

    def decode_range(
        self, payload: Payload, n: int, start: int, stop: int, out: Tensor | None = None, *, checked: bool = False
    ) -> Tensor:
        check_range(self.block, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        decoded = receiver(out, stop - start)
        for first, last in tile_ranges(start, stop, 1, TILE_ELEMENTS):
            tile = decoded[first - start : last - start]
            tile.numpy()[:] = np.frombuffer(view, "<f4", last - first, 4 * first)
            if not (checked or is_finite(tile)):
                raise PayloadError(f"fp32 payload holds NaN or infinity within values [{start}, {stop})")
        return decoded

    def check(self, payload: Payload, n: int) -> None:
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        for start, stop in tile_ranges(0, n, 1, TILE_ELEMENTS):
            check_floats(look_at(view, 4 * start, stop - start, 4), np.uint32, FP32_INFINITY, self.name)

    def wire_bytes(self, n: int) -> int:
        """4 n."""
        return 4 * n


def _check_finite(x: Tensor, start: int) -> None:
    if not is_finite(x):
        raise NonFiniteError(f"cannot encode values [{start}, {start + x.numel()}): some are NaN or infinite")
