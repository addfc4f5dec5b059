"""Mutated payloads: decoding gives finite values of the right length, or PayloadError, and nothing else."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import torch

from peer.outer.compress.base import Codec, Compressor, PayloadError
from peer.outer.compress.registry import COMPRESSORS, codec
from peer.outer.state.reduced_update import ReduceFormat

SPARSE = (
    "top4/64+int2", "top5/100+int4", "top64/4096+fp16", "top3/64x64+sign", "top20/64+int8", "top64/64+fp4",
    "dct64+top32/4096+int8", "dct64+top4/64+sign", "dct8+top64/64+fp32", "threshold0.1+int8", "threshold0.3+sign",
    "random0.3+int4", "randomblock0.3+fp32",
)  # fmt: skip
SHAPES = [(20, 25), (100,), (10, 10)]


def mutate(payload: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(payload)
    kind = rng.randrange(5)
    if kind == 0:
        del mutated[rng.randrange(len(mutated)) :]
    elif kind == 1:
        mutated += rng.randbytes(rng.randint(1, 300))
    elif kind == 2:
        for _ in range(rng.randint(1, 8)):
            mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        at = rng.randrange(len(mutated) - 4)
        mutated[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x00\x00\x80", b"\x80" * 4])
    else:
        mutated[:] = rng.randbytes(len(mutated))
    return bytes(mutated)


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_500_mutated_payloads(codec: Compressor) -> None:
    n, rng = 700, random.Random(1)
    good = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(0)))
    refused = 0
    for _ in range(500):
        payload = mutate(good, rng)
        try:
            decoded = codec.decode(payload, n)
        except PayloadError:
            refused += 1
            continue
        assert decoded.shape == (n,)
        assert torch.isfinite(decoded).all()
    assert 200 < refused < 500


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_checking_refuses_what_decoding_refuses(codec: Compressor) -> None:
    """Without decoding, where that is less work."""
    n, rng = 1300, random.Random(4)
    good = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(0)))
    codec.check(good, n)
    codec.check(codec.encode(torch.empty(0)), 0)
    for _ in range(500):
        payload = mutate(good, rng)
        try:
            codec.decode(payload, n)
        except PayloadError:
            with pytest.raises(PayloadError):
                codec.check(payload, n)
        else:
            codec.check(payload, n)


@pytest.mark.parametrize("parts", [codec(name).bind(SHAPES).seeded(3) for name in SPARSE], ids=SPARSE)
@pytest.mark.parametrize("seed", [0, 1])
def test_500_mutated_sparse_payloads(parts: Codec, seed: int) -> None:
    n, rng = 700, random.Random(seed)
    good = parts.encode(torch.randn(n, generator=torch.Generator().manual_seed(seed)))
    refused = 0
    for _ in range(500):
        payload = mutate(good, rng)
        try:
            decoded = parts.decode(payload, n)
        except PayloadError:
            refused += 1
            continue
        assert decoded.shape == (n,)
        assert torch.isfinite(decoded).all()
    assert 150 < refused <= 500


@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_500_mutated_updates(codec: Compressor) -> None:
    rng = random.Random(2)
    wire = ReduceFormat(900, codec, 256)
    good = b"".join(codec.encode(torch.ones(b - a)) for place in range(3) for a, b in wire.slices(3, place))
    assert wire.split(good, [1, 1, 1], 0).payload == good
    refused = 0
    for _ in range(500):
        try:
            update = wire.split(mutate(good, rng), [1, 1, 1], 0)
        except PayloadError:
            refused += 1
            continue
        assert torch.isfinite(update.decode_range(0, 900)).all()
    assert 200 < refused < 500


@pytest.mark.parametrize("name", [*COMPRESSORS, *SPARSE])
def test_a_payload_far_too_long_takes_no_memory(name: str) -> None:
    payload, parts = bytes(50_000_000), codec(name).seeded(1)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            parts.decode(payload, 10)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
