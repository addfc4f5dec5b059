"""What a codec promises: fp32 vectors <-> bytes, with an exact size and a stated error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from peer.errors import AtollError, ProtocolError

Payload = bytes | bytearray | memoryview
Read = Callable[[int, int], Tensor]


class PayloadError(ProtocolError):
    """A payload that no correct encoder writes: wrong length, a bad scale, a forbidden value."""


class NonFiniteError(AtollError, ValueError):
    """NaN or infinity where only finite numbers may be: the local training has diverged."""


class Compressor(Protocol):
    """A codec for fp32 vectors on the CPU; the same input gives the same bytes, the same bytes the same bits."""

    @property
    def name(self) -> str:
        """The name in the manifest."""

    @property
    def block(self) -> int:
        """Elements that share one scale; payloads can be cut and decoded at multiples of it."""

    def encode(self, x: Tensor) -> bytes:
        """Fp32 [n] -> payload of `wire_bytes(n)` bytes.

        Raises:
            NonFiniteError: `x` holds NaN or infinity (it is a ValueError too).
        """

    def encode_ranges(self, n: int, read: Read) -> bytes:
        """`encode` of a vector that need not exist as a whole, with temporaries of a few MB whatever n is.

        Args:
            n: elements of the vector.
            read: (start, stop) -> elements [start, stop) as fp32 [stop - start]. It is called once for each of the
                consecutive ranges that make up [0, n); `start` is a multiple of `block`, `stop` too or n.

        Raises:
            NonFiniteError: see `encode`.
        """

    def decode(self, payload: Payload, n: int) -> Tensor:
        """Payload -> fp32 [n], all finite.

        Raises:
            PayloadError: any malformed payload, before more memory is taken than n elements need.
        """

    def decode_range(self, payload: Payload, n: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of `decode(payload, n)`, reading (and checking) only what they need.

        Args:
            payload: the whole payload of n elements.
            n: elements in the payload.
            start: a multiple of `block`.
            stop: a multiple of `block`, or n.

        Raises:
            PayloadError: wrong length, or a malformed value within the range.
        """

    def wire_bytes(self, n: int) -> int:
        """Exact bytes of a payload of n elements."""


def is_finite(x: Tensor) -> bool:
    """Whether all elements are finite, without a temporary of the size of `x`."""
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x)  # both become NaN if any element is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def check_vector(x: Tensor) -> None:
    """Assert what every encoder takes: a contiguous fp32 vector on the CPU."""
    assert x.dim() == 1, f"shape {tuple(x.shape)} is not a vector"
    assert x.dtype == torch.float32, f"{x.dtype} is not torch.float32"
    assert x.device.type == "cpu", f"{x.device} is not the CPU"
    assert x.is_contiguous(), f"stride {x.stride()} is not contiguous"


def check_range(block: int, n: int, start: int, stop: int) -> None:
    """Assert that [start, stop) is within [0, n) and cut where `decode_range` can cut."""
    assert 0 <= start <= stop <= n, f"range [{start}, {stop}) is not within [0, {n})"
    assert start % block == 0 or start == n, f"start={start} is not a multiple of {block}"
    assert stop % block == 0 or stop == n, f"stop={stop} is neither a multiple of {block} nor {n}"


def check_length(payload: Payload, expected: int, codec: str, n: int) -> memoryview:
    """The payload as a flat memoryview of exactly `expected` bytes.

    Raises:
        PayloadError: another length.
    """
    view = memoryview(payload)
    if view.nbytes != expected:
        raise PayloadError(f"{codec} payload of {n} values is {view.nbytes} bytes; it must be {expected}")
    return view
