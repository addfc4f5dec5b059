"""What a codec promises: fp32 vectors <-> bytes, with a known size and a stated error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.errors import AtollError, ProtocolError
from peer.outer.numerics.kernels import Coded, kernels_for

Payload = bytes | bytearray | memoryview
Read = Callable[[int, int], Tensor]
Shapes = Sequence[tuple[int, ...]]
LARGEST_VALUE = 2.0**48  # of an update: the sum of 2^24 such squares is within fp32's range
LARGEST_CONTRIBUTION = LARGEST_VALUE / 2  # so that what is made of such, and written, is no larger


class PayloadError(ProtocolError):
    """A payload that no correct encoder writes: wrong length, a bad scale, a forbidden value."""


class MemberPayloadError(PayloadError):
    """The payload of one member of a round is malformed.

    Args:
        place: of the member in the roster.
    """

    def __init__(self, place: int, error: PayloadError) -> None:
        super().__init__(str(error))
        self.place = place


class NonFiniteError(AtollError, ValueError):
    """NaN or infinity where only finite numbers may be: the local training has diverged."""


@runtime_checkable
class Codec(Protocol):
    """A codec for fp32 vectors; the same input gives the same bytes, the same bytes the same bits on every machine."""

    @property
    def name(self) -> str:
        """The canonical expression: `registry.codec(name)` is this codec, unbound and unseeded."""

    @property
    def fixed_size(self) -> bool:
        """Whether every payload of n elements has exactly `wire_bytes(n)` bytes; otherwise at most."""

    def encode(self, x: Tensor) -> bytes:
        """Fp32 [n], contiguous, on any device -> payload. The work is done on that device.

        Raises:
            NonFiniteError: `x` holds NaN or infinity (it is a ValueError too).
        """

    def decode(self, payload: Payload, n: int) -> Tensor:
        """Payload -> fp32 [n] on the CPU, all finite, the caller's own.

        Raises:
            PayloadError: any malformed payload, before more memory is taken than n elements need.
        """

    def wire_bytes(self, n: int) -> int:
        """Bytes of a payload of n elements: exact where `fixed_size`, otherwise the most."""

    def bind(self, shapes: Shapes) -> Codec:
        """This codec for a flat vector of tensors of these shapes, one after the other; itself if shapes do not matter.

        A codec that uses shapes and was not bound treats the vector as one 1-D tensor.
        """

    def seeded(self, seed: int) -> Codec:
        """This codec with the randomness of one round, the same for sender and receiver; itself if it uses none."""


@runtime_checkable
class Compressor(Codec, Protocol):
    """A codec of exact size whose payloads can be written and read by ranges."""

    @property
    def block(self) -> int:
        """Elements that share one scale; payloads can be cut and decoded at multiples of it."""

    def encode_ranges(self, n: int, read: Read) -> bytes:
        """`encode` of a vector that need not exist as a whole, with temporaries of a few MB whatever n is.

        Args:
            n: elements of the vector.
            read: (start, stop) -> elements [start, stop) as fp32 [stop - start]. It is called once for each of the
                consecutive ranges that make up [0, n); `start` is a multiple of `block`, `stop` too or n.

        Raises:
            NonFiniteError: see `encode`.
        """

    def decode_range(
        self, payload: Payload, n: int, start: int, stop: int, out: Tensor | None = None, *, checked: bool = False
    ) -> Tensor:
        """Elements [start, stop) of `decode(payload, n)`, reading (and checking) only what they need.

        Args:
            payload: the whole payload of n elements.
            n: elements in the payload.
            start: a multiple of `block`.
            stop: a multiple of `block`, or n.
            out: where to write them: fp32 [stop - start], contiguous, on the CPU; a new vector by default.
            checked: these very bytes have passed `check`, or come from `encode`: their values need no look.

        Raises:
            PayloadError: wrong length, or a malformed value within the range.
        """

    def coded(self, payload: Payload, n: int, start: int, stop: int) -> Sequence[Coded] | None:
        """What a compiled loop reads in place of `decode_range(payload, n, start, stop, checked=True)`, in order.

        Returns:
            None where no loop reads this codec.
        """

    def check(self, payload: Payload, n: int) -> None:
        """Refuse what `decode(payload, n)` would refuse, on the bits, with temporaries of a few MB.

        Raises:
            PayloadError: see `decode`.
        """

    def bind(self, shapes: Shapes) -> Compressor:
        """See `Codec.bind`."""

    def seeded(self, seed: int) -> Compressor:
        """See `Codec.seeded`."""


class StatelessCodec:
    """The part of `Codec` that is the same for all codecs of exact size without shapes and without randomness."""

    @property
    def fixed_size(self) -> bool:
        """True."""
        return True

    def coded(self, payload: Payload, n: int, start: int, stop: int) -> Sequence[Coded] | None:  # noqa: ARG002
        """None: see `Compressor.coded`."""
        return None

    def bind(self, shapes: Shapes) -> Self:  # noqa: ARG002
        """Itself: shapes do not matter."""
        return self

    def seeded(self, seed: int) -> Self:  # noqa: ARG002
        """Itself: nothing is random."""
        return self


def encode_difference(codec: Compressor, x: Tensor, minus: Tensor) -> Payload:
    """`codec.encode(x - minus)`, fp32 [n] each on the CPU: in one pass, where a compiled loop writes this codec.

    Raises:
        NonFiniteError: see `Codec.encode`.
    """
    n = x.numel()
    if kernels := kernels_for(x, minus):
        payload = np.empty(codec.wire_bytes(n), np.uint8).data
        coded = codec.coded(payload, n, 0, n)
        if coded is not None and kernels.quantize_difference(x, minus, coded):
            return payload
    return codec.encode_ranges(n, lambda start, stop: x[start:stop] - minus[start:stop])


def is_finite(x: Tensor) -> bool:
    """Whether all elements are finite, without a temporary of the size of `x`."""
    if kernels := kernels_for(x):
        return kernels.all_finite(x)
    if x.numel() == 0 or math.isfinite(x.sum().item()):  # NaN and infinity stay in a sum, whatever its order
        return True
    low, high = torch.aminmax(x)  # both become NaN if any element is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def check_values(x: Tensor, largest: float, coded: Sequence[Coded] | None = None) -> None:
    """Refuse NaN, and values beyond what rounds carry on: one member's would end each round.

    Args:
        coded: where the same values lie, checked: no value is looked at where the scales bound them all.

    Raises:
        PayloadError: for such a value.
    """
    if coded and max(one.bound for one in coded) <= largest:
        return
    low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    if not max(-low.item(), high.item()) <= largest:  # NaN compares as false
        raise PayloadError(f"values up to {max(-low.item(), high.item()):.2g}: more than {largest:.2g} is not applied")


def check_vector(x: Tensor) -> None:
    """Assert what every encoder takes: a contiguous fp32 vector."""
    assert x.dim() == 1, f"shape {tuple(x.shape)} is not a vector"
    assert x.dtype == torch.float32, f"{x.dtype} is not torch.float32"
    assert x.is_contiguous(), f"stride {x.stride()} is not contiguous"


def check_finite(largest: Tensor, num_values: int) -> None:
    """Refuse a block whose largest magnitude (or any sum that passes NaN and infinity on) is not finite.

    Raises:
        NonFiniteError: NaN or infinity in `largest`.
    """
    if not is_finite(largest):
        raise not_finite(num_values)


def not_finite(num_values: int) -> NonFiniteError:
    """What is raised where some of so many values are NaN or infinite."""
    return NonFiniteError(f"cannot encode {num_values} values: some are NaN or infinite")


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


def receiver(out: Tensor | None, n: int) -> Tensor:
    """`out`, or a new vector: fp32 [n]."""
    if out is None:
        return empty_vector(n)
    assert out.shape == (n,), f"out {tuple(out.shape)} is not ({n},)"
    return out


def empty_vector(n: int) -> Tensor:
    """Uninitialised fp32 [n]. Numpy asks for huge pages: of a large vector, the first touch costs a third."""
    return torch.from_numpy(np.empty(n, np.float32))


def look_at(view: memoryview, offset: int, rows: int, width: int) -> NDArray[np.uint8]:
    """`rows * width` bytes where they are, as uint8 [rows, width]."""
    return np.frombuffer(view, np.uint8, rows * width, offset).reshape(rows, width)


def read_bytes(view: memoryview, offset: int, rows: int, width: int) -> Tensor:
    """A copy of `rows * width` bytes as uint8 [rows, width]; torch takes no read-only memory without a warning."""
    return torch.from_numpy(look_at(view, offset, rows, width).copy())


def empty_payload(num_bytes: int) -> Tensor:
    """Uninitialised uint8 [num_bytes] on the CPU, for an encoder to fill."""
    return torch.from_numpy(np.empty(num_bytes, np.uint8))
