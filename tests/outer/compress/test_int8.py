"""Block-wise int8: stated error, exact size, strict decoding."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.compress.base import NonFiniteError, PayloadError
from peer.outer.compress.int8 import BlockInt8

LARGEST = torch.finfo(torch.float32).max
LENGTHS = [1, 2, 255, 256, 257, 1000, 70_001, 300_000]


def gaussian(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def student_t3(n: int) -> Tensor:
    chi_square = torch.stack([gaussian(n + k)[:n] ** 2 for k in (1, 2, 3)]).sum(dim=0)
    return gaussian(n) / (chi_square / 3.0).sqrt()


def mixed_scales(n: int) -> Tensor:
    return gaussian(n) * torch.pow(10.0, torch.linspace(-38.0, 37.0, n))


def assert_within_bound(x: Tensor, decoded: Tensor, block: int) -> None:
    for group, back in zip(torch.split(x.double(), block), torch.split(decoded.double(), block), strict=True):
        largest = group.abs().max().item()
        bound = max(largest / 254, 2.0**-127) + 2.0**-22 * largest
        assert (group - back).abs().max().item() <= bound


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("make", [gaussian, student_t3, mixed_scales])
def test_error_stays_within_the_stated_bound(make: Callable[[int], Tensor], n: int) -> None:
    x, codec = make(n), BlockInt8()
    decoded = codec.decode(codec.encode(x), n)
    assert decoded.dtype == torch.float32
    assert_within_bound(x, decoded, 256)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60), st.sampled_from([1, 4, 16]))
def test_error_stays_within_the_stated_bound_for_any_floats(values: list[float], block: int) -> None:
    x, codec = torch.tensor(values, dtype=torch.float32), BlockInt8(block=block)
    decoded = codec.decode(codec.encode(x), x.numel())
    assert torch.isfinite(decoded).all()
    if values:
        assert_within_bound(x, decoded, block)


def test_error_at_the_ends_of_fp32() -> None:
    codec = BlockInt8(block=4)
    x = torch.tensor([LARGEST, -LARGEST, 1.0, 0.0, 1e-45, -1e-45, 0.0, 1e-38, 2.0**-126, -(2.0**-120), 0.0, 0.0])
    decoded = codec.decode(codec.encode(x), x.numel())
    assert_within_bound(x, decoded, 4)
    assert decoded[0] == -decoded[1]
    assert decoded[0].item() == pytest.approx(LARGEST, rel=1e-6)


def test_zeros_decode_to_zeros_with_scale_zero() -> None:
    codec, x = BlockInt8(), torch.zeros(600)
    x[256:512] = 1.0
    payload = codec.encode(x)
    assert struct.unpack("<3f", payload[:12]) == (0.0, pytest.approx(1 / 127), 0.0)
    assert torch.equal(codec.decode(payload, 600), x)


def test_payload_by_hand() -> None:
    codec = BlockInt8(block=2)
    payload = codec.encode(torch.tensor([127.0, -64.0, 2.54]))
    assert payload == struct.pack("<2f3b", 1.0, 2.54 / 127, 127, -64, 127)
    assert codec.decode(payload, 3).tolist() == pytest.approx([127.0, -64.0, 2.54], rel=1e-6)


@pytest.mark.parametrize("n", [0, *LENGTHS])
def test_wire_bytes_are_exact(n: int) -> None:
    codec = BlockInt8()
    assert len(codec.encode(gaussian(n))) == codec.wire_bytes(n) == n + 4 * math.ceil(n / 256)


def test_nothing_is_the_empty_payload() -> None:
    assert BlockInt8().encode(torch.empty(0)) == b""
    assert BlockInt8().decode(b"", 0).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 700, 1024])
def test_non_finite_input_is_refused(bad: float, index: int) -> None:
    x = gaussian(1025)
    x[index] = bad
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        BlockInt8().encode(x)
    assert issubclass(NonFiniteError, ValueError)


def test_ranges_are_slices_of_the_whole() -> None:
    codec, n = BlockInt8(), 1000
    payload = codec.encode(gaussian(n))
    whole = codec.decode(payload, n)
    for start, stop in [(0, 1000), (256, 512), (512, 1000), (768, 1000), (256, 256), (1000, 1000)]:
        assert torch.equal(codec.decode_range(memoryview(payload), n, start, stop), whole[start:stop])
    for start, stop in [(1, 256), (0, 255), (0, 1256), (512, 256)]:
        with pytest.raises(AssertionError):
            codec.decode_range(payload, n, start, stop)


def test_cutting_at_blocks_does_not_change_the_values() -> None:
    codec, x = BlockInt8(), gaussian(300_001)
    pieces = [codec.decode(codec.encode(piece), piece.numel()) for piece in (x[:512], x[512:262_400], x[262_400:])]
    assert torch.equal(torch.cat(pieces), codec.decode(codec.encode(x), x.numel()))


def test_threads_and_alignment_do_not_change_the_bits() -> None:
    codec, x = BlockInt8(), student_t3(300_001)
    payload = codec.encode(x)
    decoded = codec.decode(payload, x.numel())
    torch.set_num_threads(2)
    assert codec.encode(x) == payload
    assert torch.equal(codec.decode(memoryview(b"?" + payload)[1:], x.numel()), decoded)


def test_flushing_subnormals_does_not_change_the_decoded_bits() -> None:
    codec = BlockInt8(block=4)
    payload = codec.encode(torch.tensor([1e-45, 3e-39, -1e-38, 2e-38, 1e-36, 1e-37, 0.0, -1e-36]))
    decoded = codec.decode(payload, 8)
    torch.set_flush_denormal(True)
    try:
        flushed = codec.decode(payload, 8)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), decoded.view(torch.int32))


@pytest.mark.parametrize(
    "scale", [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-45, 1e-39, 2.6795e36, LARGEST], ids=str
)
def test_scales_that_encode_never_writes_are_refused(scale: float) -> None:
    payload = struct.pack("<2f3b", 1.0, scale, 1, 2, 3)
    with pytest.raises(PayloadError, match="of block 1 must be 0 or from"):
        BlockInt8(block=2).decode(payload, 3)


def test_the_largest_allowed_scale_decodes_to_finite_values() -> None:
    payload = struct.pack("<I2b", 0x7C010203, 127, -127)
    assert torch.isfinite(BlockInt8(block=2).decode(payload, 2)).all()
    with pytest.raises(PayloadError):
        BlockInt8(block=2).decode(struct.pack("<I2b", 0x7C010204, 1, 1), 2)


def test_minus_128_is_refused() -> None:
    with pytest.raises(PayloadError, match="holds -128"):
        BlockInt8(block=2).decode(struct.pack("<1f2b", 1.0, 1, -128), 2)


@pytest.mark.parametrize("size", [0, 1, 1003, 1015, 1017, 5000])
def test_another_length_is_refused(size: int) -> None:
    with pytest.raises(PayloadError, match=f"is {size} bytes; it must be 1016"):
        BlockInt8().decode(bytes(size), 1000)
