"""What payloads mean, written out plainly: the checks on the bits and the decoders agree with it on anything."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from peer.outer.compress.base import PayloadError, is_finite
from peer.outer.compress.registry import COMPRESSORS
from tests.outer.compress.test_hostile import mutate

N = 1301  # the last block is short, and its codes do not fill their last byte
SMALLEST = {"fp4": 2.0**-120}
LARGEST_CODE = {"int8": 127, "int4": 7}
Floats = NDArray[np.float32]


def meaning(name: str, payload: bytes) -> Floats | None:
    """The N values of a payload of the right length; None if no encoder writes it."""
    if COMPRESSORS[name].wire_bytes(N) != len(payload):
        return None
    if name in ("fp32", "fp16", "bf16"):
        values = bf16(payload) if name == "bf16" else np.frombuffer(payload, "<f4" if name == "fp32" else "<f2")
        return values.astype(np.float32) if np.isfinite(values).all() else None
    block, scale_bytes = COMPRESSORS[name].block, {"int8": 4, "int2": 4}.get(name, 2)
    split = scale_bytes * -(-N // block)
    scales = np.frombuffer(payload[:split], "<f4") if name == "int8" else bf16(payload[:split])
    codes = unpacked(payload[split:], {"int8": 8, "int4": 4, "fp4": 4, "int2": 2, "sign": 1}[name])
    if not all(allowed(name, float(scale)) for scale in scales) or codes[N:].any():
        return None
    return values_of(name, np.repeat(scales.reshape(-1, 2 if name == "int2" else 1), block, axis=0)[:N], codes[:N])


def values_of(name: str, scales: Floats, codes: NDArray[np.int64]) -> Floats | None:
    if name == "sign":
        return np.where(codes == 1, -scales[:, 0], scales[:, 0])
    if name == "int2":
        if (scales[:, 0] > scales[:, 1]).any():
            return None
        levels = np.where(codes >= 2, scales[:, 1], scales[:, 0])
        return np.where(codes % 2 == 1, -levels, levels)
    half = 128 if name == "int8" else 8
    signed = np.where(codes >= half, codes - 2 * half, codes)
    if (signed == -half).any():
        return None
    factors = np.sign(signed) * 2.0 ** (np.abs(signed) - 7) if name == "fp4" else signed
    return scales[:, 0] * factors.astype(np.float32)


def allowed(name: str, scale: float) -> bool:
    if scale == 0.0:
        return not np.signbit(scale)
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(np.float32(scale) * np.float32(LARGEST_CODE.get(name, 1)))
    return bool(finite) and scale >= SMALLEST.get(name, 2.0**-126)


def bf16(data: bytes) -> Floats:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def unpacked(data: bytes, bits: int) -> NDArray[np.int64]:
    ones = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").reshape(-1, bits)
    return (ones.astype(np.int64) << np.arange(bits)).sum(axis=1)


def with_one_odd_code(payload: bytes, rng: random.Random) -> bytes:
    """Random bytes are nearly all refused; one byte of the codes, or two of a scale, are often not."""
    mutated = bytearray(payload)
    at = rng.randrange(len(mutated) - 1) if rng.random() < 0.5 else rng.randrange(min(40, len(mutated) - 1))
    mutated[at : at + 2] = rng.choice([rng.randbytes(2), b"\x80\x00", b"\x08\x88", b"\x80\x7f", b"\x00\x80"])
    return bytes(mutated)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_check_and_decode_refuse_what_no_encoder_writes_and_nothing_else(name: str) -> None:
    codec, rng = COMPRESSORS[name], random.Random(7)
    whole = codec.encode(torch.randn(N, generator=torch.Generator().manual_seed(0)))
    outcomes = {True: 0, False: 0}
    for turn in range(600):
        payload = (mutate if turn % 3 == 0 else with_one_odd_code)(whole, rng)
        expected = meaning(name, payload)
        outcomes[expected is None] += 1
        if expected is None:
            for refuses in (codec.check, codec.decode):
                with pytest.raises(PayloadError):
                    refuses(payload, N)
            continue
        codec.check(payload, N)
        for checked in (False, True):
            assert (codec.decode_range(payload, N, 0, N, checked=checked).numpy() == expected).all()
    assert min(outcomes.values()) > 20


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("n", [1024, N])
def test_decoding_into_memory_at_any_offset(name: str, n: int) -> None:
    codec, room = COMPRESSORS[name], torch.empty(n + 1)
    payload = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(codec.decode_range(payload, n, 0, n, room[1:]), codec.decode(payload, n))


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([3e38, 3e38, -1.0], True),  # whose sum is infinite
        ([3e38, 3e38, -3e38, -3e38], True),
        ([float("inf"), 0.0], False),
        ([float("inf"), float("-inf")], False),
        ([1.0, float("nan"), 3e38, 3e38], False),
    ],
)
def test_is_finite_looks_at_elements_and_not_at_their_sum(values: list[float], finite: bool) -> None:
    assert is_finite(torch.tensor(values)) is finite
