"""No compression: little-endian fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peer.outer.compress.base import (
    NonFiniteError,
    Payload,
    PayloadError,
    Read,
    check_length,
    check_range,
    check_vector,
    is_finite,
)

_GROUP_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Fp32:
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
        """See `Compressor.encode`."""
        check_vector(x)
        return self.encode_ranges(x.numel(), lambda start, stop: x[start:stop])

    def encode_ranges(self, n: int, read: Read) -> bytes:
        """See `Compressor.encode_ranges`."""
        payload = bytearray(self.wire_bytes(n))
        values = np.frombuffer(payload, "<f4")
        for start in range(0, n, _GROUP_ELEMENTS):
            stop = min(start + _GROUP_ELEMENTS, n)
            x = read(start, stop)
            check_vector(x)
            if not is_finite(x):
                raise NonFiniteError(f"cannot encode {n} values: some of [{start}, {stop}) are NaN or infinite")
            values[start:stop] = x.detach().numpy()
        return bytes(payload)

    def decode(self, payload: Payload, n: int) -> Tensor:
        """See `Compressor.decode`."""
        return self.decode_range(payload, n, 0, n)

    def decode_range(self, payload: Payload, n: int, start: int, stop: int) -> Tensor:
        """See `Compressor.decode_range`."""
        check_range(self.block, n, start, stop)
        view = check_length(payload, self.wire_bytes(n), self.name, n)
        if start == stop:
            return torch.empty(0)
        values = np.frombuffer(view, "<f4", stop - start, 4 * start)
        decoded = torch.from_numpy(values.astype(np.float32))
        if not is_finite(decoded):
            raise PayloadError(f"fp32 payload holds NaN or infinity within values [{start}, {stop})")
        return decoded

    def wire_bytes(self, n: int) -> int:
        """4 n."""
        return 4 * n
