"""Residuals of ranges: in place, and computed again when the round is over; the same bits either way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.compress.base import NonFiniteError, Read
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.registry import compressor
from peer.outer.compress.residual import DeferredResidual, Residual

KINDS = pytest.mark.parametrize("kind", [Residual, DeferredResidual])
RANGES = ((0, 512), (512, 1024), (1024, 1300))
ENDS = st.lists(st.sampled_from(["commit", "revert", "missed"]), min_size=1, max_size=6)


def gaussian(seed: int, n: int = 1300) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def reading(x: Tensor, start: int) -> Read:
    return lambda first, last: x[start + first : start + last].clone()


def encode(residual: Any, name: str, x: Tensor) -> list[bytes]:
    return [residual.encode(compressor(name), start, stop, reading(x, start)) for start, stop in RANGES]


@given(ends=ENDS, name=st.sampled_from(["int2", "int8", "fp32"]), decay=st.sampled_from([1.0, 0.95, 0.0]),
       gain=st.sampled_from([1.0, 0.3]), seed=st.integers(0, 1000))
def test_both_kinds_send_and_keep_the_same_bits(
    ends: list[str], name: str, decay: float, gain: float, seed: int
) -> None:
    feedback = ErrorFeedback(decay=decay, gain=gain)
    one, other = Residual(feedback, 1300), DeferredResidual(feedback, 1300)
    for round, end in enumerate(ends):
        x = gaussian(seed + round)
        before = other.vector.clone()
        assert encode(one, name, x) == encode(other, name, x)
        assert torch.equal(other.vector, before)
        for residual in (one, other):
            if end == "commit":
                residual.commit()
            else:
                residual.revert()
        assert end == "commit" or torch.equal(other.vector, before)
        if end == "missed":
            x.fill_(0.0)  # what was encoded is needed no longer
            one.restore()
            other.restore()
        assert torch.equal(one.vector, other.vector)


@KINDS
def test_what_was_sent_and_what_is_kept_is_all_there_was(kind: Any) -> None:
    residual, total, sent = kind(ErrorFeedback(decay=1.0), 1300), torch.zeros(1300), torch.zeros(1300)
    for round in range(6):
        x = gaussian(round)
        payloads = encode(residual, "int2", x)
        residual.commit()
        total += x
        sent += torch.cat([
            compressor("int2").decode(payload, stop - start)
            for payload, (start, stop) in zip(payloads, RANGES, strict=True)
        ])  # fmt: skip
    assert (sent + residual.vector - total).abs().max() < 1e-5 * total.abs().max()
    assert residual.vector.norm() < 3 * gaussian(0).norm()


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_range_takes_the_round_back(kind: Any, bad: float) -> None:
    residual, x = kind(ErrorFeedback(decay=1.0), 1300), gaussian(1)
    encode(residual, "int2", x)
    residual.commit()
    before = residual.vector.clone()
    x[1200] = bad
    with pytest.raises(NonFiniteError):
        encode(residual, "int2", x)
    residual.commit()
    residual.restore()
    assert torch.equal(residual.vector, before)


@KINDS
def test_what_was_taken_back_is_restored_once_and_not_when_another_round_has_begun(kind: Any) -> None:
    residual = kind(ErrorFeedback(decay=0.9), 1300)
    first = encode(residual, "int2", gaussian(1))
    residual.revert()
    assert not residual.vector.any()
    residual.restore()
    after = residual.vector.clone()
    assert after.any()
    residual.restore()
    assert torch.equal(residual.vector, after)
    assert encode(residual, "int2", gaussian(1)) != first  # it counts
    residual.revert()
    encode(residual, "int2", gaussian(2))
    before = residual.vector.clone()
    residual.restore()
    assert torch.equal(residual.vector, before)
