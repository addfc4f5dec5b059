"""Dense codecs below eight bits and half precision: stated errors, exact sizes, strict decoding."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError, PayloadError
from peer.outer.compress.blockwise import Blockwise
from peer.outer.compress.registry import COMPRESSORS, VALUES
from tests.outer.compress.vectors import BOUNDS, MAKERS, Make, gaussian, student_t3

LARGEST = torch.finfo(torch.float32).max
LENGTHS = (1, 2, 127, 128, 257, 1001, 300_001)
BITS = {"fp16": (16, 0), "bf16": (16, 0), "int4": (4, 2), "fp4": (4, 2), "int2": (2, 4), "sign": (1, 2)}
NEW = tuple(BITS)


def assert_within_bound(name: str, x: Tensor, decoded: Tensor, block: int) -> None:
    assert decoded.dtype == torch.float32
    for group, back in zip(torch.split(x.double(), block), torch.split(decoded.double(), block), strict=True):
        error = (group - back).abs()
        assert (error <= BOUNDS[name](group, group.abs().max())).all()
        if name in ("int2", "sign"):
            assert error.norm() <= (1 + 2.0**-8) * group.norm() + 2.0**-126 * len(group)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", NEW)
def test_the_error_stays_within_the_stated_bound(name: str, make: Make, n: int) -> None:
    x, codec = make(n), COMPRESSORS[name]
    assert_within_bound(name, x, codec.decode(codec.encode(x), n), codec.block)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=200)
@given(st.lists(floats, max_size=60), st.sampled_from(NEW), st.sampled_from([8, 16]))
def test_the_error_stays_within_the_stated_bound_for_any_floats(values: list[float], name: str, block: int) -> None:
    x, codec = torch.tensor(values, dtype=torch.float32), Blockwise(VALUES[name], block)
    payload = codec.encode(x)
    decoded = codec.decode(payload, x.numel())
    assert len(payload) == codec.wire_bytes(x.numel())
    assert torch.isfinite(decoded).all()
    if values:
        assert_within_bound(name, x, decoded, block)


@pytest.mark.parametrize("name", NEW)
def test_wire_bytes_are_exact(name: str) -> None:
    bits, scale = BITS[name]
    codec = COMPRESSORS[name]
    for n in (0, *LENGTHS):
        expected = math.ceil(n * bits / 8) + scale * math.ceil(n / codec.block)
        assert len(codec.encode(gaussian(n))) == codec.wire_bytes(n) == expected


def test_bytes_a_value() -> None:
    per_value = {name: COMPRESSORS[name].wire_bytes(1 << 20) / (1 << 20) for name in COMPRESSORS}
    assert per_value == {
        "fp32": 4, "fp16": 2, "bf16": 2, "int8": 1 + 4 / 256, "int4": 0.5 + 2 / 128, "fp4": 0.5 + 2 / 128,
        "int2": 0.25 + 4 / 256, "sign": 0.125 + 2 / 256,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most"), [("int4", 0.12), ("fp4", 0.20), ("int2", 0.345), ("sign", 0.61), ("bf16", 0.002)]
)
def test_relative_error_of_a_gaussian_vector(name: str, most: float) -> None:
    x, codec = gaussian(100_000), COMPRESSORS[name]
    assert (codec.decode(codec.encode(x), x.numel()) - x).norm() / x.norm() < most


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_saturates(name: str) -> None:
    codec = COMPRESSORS[name]
    limit = torch.finfo(torch.float16 if name == "fp16" else torch.bfloat16).max
    assert codec.decode(codec.encode(torch.tensor([LARGEST, -LARGEST, 1.0])), 3).tolist() == [limit, -limit, 1.0]


@pytest.mark.parametrize("name", NEW)
def test_the_ends_of_fp32(name: str) -> None:
    codec = Blockwise(VALUES[name], 8)
    x = torch.tensor([LARGEST, -LARGEST, LARGEST, LARGEST, 1.0, 0.0, 1e-45, -LARGEST, 1e-45, -1e-45, 1e-38, -2e-38])
    assert_within_bound(name, x, codec.decode(codec.encode(x), 12), 8)


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_zeros_decode_to_zeros(codec: Compressor) -> None:
    assert not codec.decode(codec.encode(torch.zeros(1000)), 1000).any()


def test_payloads_by_hand() -> None:
    x = torch.tensor([7.0, -7.0, 2.0, 0.0, 1.6])
    assert Blockwise(VALUES["int4"], 8).encode(x) == struct.pack("<H", 0x3F80) + bytes([0x97, 0x02, 0x02])
    x = torch.tensor([4.0, -2.0, 0.1, 0.0, -1 / 16])  # exponents 7, 6, 2 (0.125 / 4 = 2^-5), zero, 1
    assert Blockwise(VALUES["fp4"], 8).encode(x) == struct.pack("<H", 0x4080) + bytes([0xA7, 0x02, 0x0F])
    x = torch.tensor([1.0, -1.0, 3.0, -3.0, 1.0])
    assert Blockwise(VALUES["int2"], 8).encode(x) == struct.pack("<2H", 0x3F80, 0x4040) + bytes([0b11100100, 0])
    x = torch.tensor([1.0, -1.0, 2.0, -4.0, -2.0, 2.0, 2.0, 2.0, -2.0])
    assert Blockwise(VALUES["sign"], 16).encode(x) == struct.pack("<H", 0x4000) + bytes([0b00011010, 1])


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_ranges_are_slices_of_the_whole(codec: Compressor) -> None:
    n, b = 1000, codec.block
    payload = codec.encode(student_t3(n))
    whole = codec.decode(payload, n)
    for start, stop in [(0, n), (b, 2 * b), (2 * b, n), (3 * b, n), (b, b), (n, n)]:
        assert torch.equal(codec.decode_range(memoryview(payload), n, start, stop), whole[start:stop])
        out = torch.full((stop - start,), torch.nan)
        assert codec.decode_range(payload, n, start, stop, out) is out
        assert torch.equal(out, whole[start:stop])


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_threads_alignment_and_repetition_do_not_change_the_bits(codec: Compressor) -> None:
    x = student_t3(600_001)
    payload = codec.encode(x)
    decoded = codec.decode(payload, x.numel())
    torch.set_num_threads(2)
    assert codec.encode(x) == payload
    assert codec.encode(x[1:]) == codec.encode(x[1:].clone())
    assert torch.equal(codec.decode(memoryview(b"?" + payload)[1:], x.numel()), decoded)


@pytest.mark.parametrize("name", NEW)
def test_flushing_subnormals_does_not_change_the_decoded_bits(name: str) -> None:
    codec = Blockwise(VALUES[name], 8)
    payload = codec.encode(torch.tensor([1e-45, 3e-39, -1e-38, 2e-38, 1e-36, 1e-37, 0.0, -1e-36, 3e-39, 1e-45]))
    decoded = codec.decode(payload, 10)
    torch.set_flush_denormal(True)
    try:
        flushed = codec.decode(payload, 10)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), decoded.view(torch.int32))


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_refused(codec: Compressor, bad: float) -> None:
    for index in (0, 300, 1024):
        x = gaussian(1025)
        x[index] = bad
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            codec.encode(x)


@pytest.mark.parametrize("name", ["int4", "fp4", "int2", "sign"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-39], ids=str)
def test_scales_that_encode_never_writes_are_refused(name: str, scale: float) -> None:
    codec = Blockwise(VALUES[name], 8)
    payload = bytearray(codec.encode(torch.ones(9)))
    payload[0:2] = struct.pack("<f", scale)[2:]
    with pytest.raises(PayloadError, match=f"{name} payload: scale .* must be 0 or from"):
        codec.decode(payload, 9)


@pytest.mark.parametrize("name", ["int4", "fp4", "int2", "sign"])
def test_the_largest_allowed_scale_decodes_to_finite_values(name: str) -> None:
    codec = Blockwise(VALUES[name], 8)
    payload = codec.encode(torch.full((8,), LARGEST))
    assert torch.isfinite(codec.decode(payload, 8)).all()
    above = bytearray(payload)
    above[:2] = struct.pack("<H", struct.unpack("<H", payload[codec.values.scale_bytes - 2 :][:2])[0] + 1)
    with pytest.raises(PayloadError):
        codec.decode(above, 8)


@pytest.mark.parametrize("name", ["int4", "fp4"])
def test_the_reserved_code_is_refused_in_either_half(name: str) -> None:
    codec = Blockwise(VALUES[name], 8)
    payload = codec.encode(torch.ones(8))
    for byte in (0x18, 0x81, 0x88):
        with pytest.raises(PayloadError, match=f"{name} payload holds -8"):
            codec.decode(payload[:5] + bytes([byte]), 8)


@pytest.mark.parametrize("name", ["int4", "fp4", "int2", "sign"])
def test_padding_must_be_zero(name: str) -> None:
    codec = Blockwise(VALUES[name], 8)
    payload = bytearray(codec.encode(torch.ones(1)))
    payload[-1] |= 0x40
    with pytest.raises(PayloadError, match="padded"):
        codec.decode(payload, 1)


def test_levels_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(PayloadError, match="low level is above"):
        Blockwise(VALUES["int2"], 8).decode(struct.pack("<2HB", 0x4000, 0x3F80, 0), 4)


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_dense_codecs_know_neither_shapes_nor_seeds(codec: Compressor) -> None:
    assert codec.bind([(3, 4)]) is codec.seeded(7) is codec
    assert codec.fixed_size
    assert isinstance(codec, Compressor)
