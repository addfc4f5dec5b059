"""Fp32: no error, 4 bytes a value, finite numbers only."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from peer.outer.compress.base import NonFiniteError, PayloadError
from peer.outer.compress.identity import Fp32

VALUES = torch.tensor([1.5, -0.0, 1e-45, torch.finfo(torch.float32).max, -3.0])


def test_every_bit_survives() -> None:
    payload = Fp32().encode(VALUES)
    assert payload == struct.pack("<5f", *VALUES.tolist())
    assert torch.equal(Fp32().decode(payload, 5).view(torch.int32), VALUES.view(torch.int32))
    assert len(payload) == Fp32().wire_bytes(5) == 20


def test_ranges_are_slices_of_the_whole_at_any_element() -> None:
    payload = Fp32().encode(VALUES)
    for start, stop in [(0, 5), (1, 3), (4, 5), (2, 2), (5, 5)]:
        assert torch.equal(Fp32().decode_range(memoryview(payload), 5, start, stop), VALUES[start:stop])


def test_decoded_values_are_the_callers_own() -> None:
    payload = Fp32().encode(VALUES)
    Fp32().decode(payload, 5).zero_()
    assert torch.equal(Fp32().decode(payload, 5), VALUES)


def test_nothing_is_the_empty_payload() -> None:
    assert Fp32().encode(torch.empty(0)) == b""
    assert Fp32().decode(b"", 0).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused_both_ways(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        Fp32().encode(torch.tensor([1.0, bad]))
    with pytest.raises(PayloadError, match="NaN or infinity"):
        Fp32().decode(struct.pack("<2f", bad, 1.0), 2)


@pytest.mark.parametrize("size", [0, 7, 9, 800])
def test_another_length_is_refused(size: int) -> None:
    with pytest.raises(PayloadError, match=f"is {size} bytes; it must be 8"):
        Fp32().decode(bytes(size), 2)
