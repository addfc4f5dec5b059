from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.outer.compress.base import PayloadError
from peer.outer.compress.registry import COMPRESSORS, compressor
from peer.outer.compress.sliced import Sliced

NAMES = sorted(COMPRESSORS)


def sliced(name, blocks=2):
    base = compressor(name)
    return Sliced(base, blocks * base.block if base.block > 1 else 64)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_payload_is_its_slices_and_every_range_decodes_alike(name, data):
    codec = sliced(name)
    n = data.draw(st.integers(0, 5 * codec.elements), label="n")
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    payload = codec.encode(x)
    assert len(payload) == codec.wire_bytes(n)
    assert payload == b"".join(codec.base.encode(x[a:b]) for a, b in codec.slices(0, n)) or n == 0
    assert codec.encode_ranges(n, lambda a, b: x[a:b]) == payload
    whole = codec.decode(payload, n)
    parts = [codec.base.decode(codec.base.encode(x[a:b]), b - a) for a, b in codec.slices(0, n)]
    assert torch.equal(whole, torch.cat(parts) if parts else whole[:0])
    start = data.draw(st.integers(0, n // codec.block), label="start") * codec.block
    stop = min(n, start + data.draw(st.integers(0, 8), label="blocks") * codec.block)
    assert torch.equal(codec.decode_range(payload, n, start, stop), whole[start:stop])


@pytest.mark.parametrize("name", NAMES)
def test_up_to_one_slice_the_payload_is_the_plain_one(name):
    base = compressor(name)
    x = torch.randn(1000)
    assert Sliced(base).encode(x) == base.encode(x)
    assert Sliced(base).name == base.name


def test_a_payload_of_another_length_is_refused():
    codec = sliced("int8")
    payload = codec.encode(torch.ones(2000))
    for bad in (payload[:-1], payload + b"\0"):
        with pytest.raises(PayloadError, match="must be"):
            codec.decode(bad, 2000)
