"""Encoding a vector that never exists as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError
from peer.outer.compress.blockwise import Blockwise
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.registry import COMPRESSORS, VALUES

SIZES = (0, 1, 255, 256, 257, 524_288, 524_289, 700_001)


ODD = {"int8 by 1000": BlockInt8(block=1000), "int4 by 1000": Blockwise(VALUES["int4"], 1000)}
CODECS = {**COMPRESSORS, **ODD}


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
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
    assert max((stop - start for start, stop in asked), default=0) <= 1 << 19


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_a_bad_value_in_the_last_range_is_found(codec: Compressor) -> None:
    def read(start: int, stop: int) -> Tensor:
        x = torch.ones(stop - start)
        if stop == 600_000:
            x[-1] = float("nan")
        return x

    with pytest.raises(NonFiniteError):
        codec.encode_ranges(600_000, read)
