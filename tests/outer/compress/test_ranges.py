"""Encoding a vector that never exists as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8

SIZES = (0, 1, 255, 256, 257, 262_144, 262_145, 700_001)


@pytest.mark.parametrize("codec", [Fp32(), BlockInt8(), BlockInt8(block=1000)], ids=["fp32", "int8", "int8 by 1000"])
@pytest.mark.parametrize("n", SIZES)
def test_the_bytes_are_those_of_the_whole_vector(codec: Compressor, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return x[start:stop].clone()

    payload = codec.encode_ranges(n, read)
    assert payload == codec.encode(x)
    assert len(payload) == codec.wire_bytes(n)
    assert [start for start, _ in asked] == [0, *(stop for _, stop in asked[:-1])][: len(asked)]
    assert all(start % codec.block == 0 for start, _ in asked)
    assert (asked[-1][1] if asked else 0) == n
    assert max((stop - start for start, stop in asked), default=0) <= 1 << 18


@pytest.mark.parametrize("codec", [Fp32(), BlockInt8()], ids=["fp32", "int8"])
def test_a_bad_value_in_the_last_range_is_found(codec: Compressor) -> None:
    def read(start: int, stop: int) -> Tensor:
        x = torch.ones(stop - start)
        if stop == 600_000:
            x[-1] = float("nan")
        return x

    with pytest.raises(NonFiniteError):
        codec.encode_ranges(600_000, read)
