"""Error feedback: nothing is lost, and an abandoned round is undone bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from peer.errors import UserError
from peer.outer.compress.base import NonFiniteError
from peer.outer.compress.feedback import Encoder, ErrorFeedback
from peer.outer.compress.registry import codec
from tests.outer.compress.vectors import gaussian, student_t3

NAMES = (
    "int8", "int4", "fp4", "int2", "sign", "fp16", "top64/4096+int2", "top4/64x64+sign", "dct64+top32/4096+int8",
    "threshold0.05@3+int8", "random0.1+int4", "randomblock0.1+fp32",
)  # fmt: skip
SHAPES = [(64, 100), (3000,), (600,)]
N = 10_000


def inputs(rounds: int) -> list[torch.Tensor]:
    return [student_t3(N + r)[:N] * 0.01 for r in range(rounds)]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_and_what_is_left_is_all_that_came(name: str) -> None:
    parts = codec(name).bind(SHAPES)
    encoder = Encoder(parts, ErrorFeedback(decay=1.0), N)
    sent, total = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for seed, x in enumerate(inputs(12)):
        payload, decoded = encoder.encode_decoded(x, seed)
        assert torch.equal(decoded, parts.seeded(seed).decode(payload, N))
        sent += decoded
        total += x
    assert encoder.residual is not None
    assert (sent + encoder.residual - total).abs().max() < 1e-5 * total.abs().max()
    assert encoder.residual.norm() < 12 * inputs(1)[0].norm()


def test_the_formula() -> None:
    encoder, parts = Encoder(codec("sign"), ErrorFeedback(decay=0.5, gain=2.0), 4), codec("sign")
    assert encoder.residual is not None
    encoder.residual.copy_(torch.tensor([2.0, 0.0, -2.0, 4.0]))
    x = torch.tensor([1.0, -1.0, 3.0, 0.0])
    before = torch.tensor([3.0, -2.0, 5.0, 2.0])
    payload = encoder.encode(x, 0)
    assert payload == parts.encode(before)
    assert torch.equal(encoder.residual, before - torch.tensor([3.0, -3.0, 3.0, 3.0]))
    assert x.tolist() == [1.0, -1.0, 3.0, 0.0]


@pytest.mark.parametrize(
    "name", ["fp32", "top4096/4096+fp32", "top4096/64x64+fp32", "random1+fp32", "threshold1@1+fp32"]
)
def test_without_loss_there_is_no_residual(name: str) -> None:
    encoder = Encoder(codec(name).bind(SHAPES), ErrorFeedback(decay=0.95), N)
    for seed, x in enumerate(inputs(3)):
        assert torch.equal(encoder.encode_decoded(x, seed).decoded, x)
        assert encoder.residual is not None
        assert not encoder.residual.any()


@pytest.mark.parametrize("name", NAMES)
def test_an_abandoned_round_is_undone_exactly(name: str) -> None:
    parts = codec(name).bind(SHAPES)
    plain, tried = Encoder(parts, ErrorFeedback(decay=0.95), N), Encoder(parts, ErrorFeedback(decay=0.95), N)
    for seed, x in enumerate(inputs(8)):
        tried.encode(gaussian(N), 99)
        tried.revert()
        tried.revert()
        assert tried.encode(x, seed) == plain.encode(x, seed)
        assert torch.equal(tried.residual, plain.residual)
        assert (tried.threshold, tried.encodes) == (plain.threshold, plain.encodes)
        if seed % 2:
            tried.commit()
            tried.revert()


@pytest.mark.parametrize("name", NAMES)
def test_a_round_that_others_applied_after_all_counts_as_if_it_had_never_been_abandoned(name: str) -> None:
    parts = codec(name).bind(SHAPES)
    plain, tried = Encoder(parts, ErrorFeedback(decay=0.95), N), Encoder(parts, ErrorFeedback(decay=0.95), N)
    for seed, x in enumerate(inputs(4)):
        assert tried.encode(x, seed) == plain.encode(x, seed)
        tried.revert()
        tried.restore()
        tried.restore()
        assert torch.equal(tried.residual, plain.residual)
        assert (tried.threshold, tried.encodes) == (plain.threshold, plain.encodes)


def test_what_was_not_abandoned_or_not_last_is_not_restored() -> None:
    encoder = Encoder(codec("sign"), ErrorFeedback(decay=1.0), 100)
    encoder.encode(gaussian(100), 0)
    encoder.revert()
    encoder.encode(inputs(1)[0][:100].clone(), 1)
    after = encoder.residual.clone()
    encoder.restore()
    assert torch.equal(encoder.residual, after)
    encoder.commit()
    encoder.restore()
    assert torch.equal(encoder.residual, after)
    with pytest.raises(NonFiniteError):
        encoder.encode(torch.full((100,), math.nan), 2)
    encoder.restore()
    assert torch.equal(encoder.residual, after)


def test_a_committed_round_stays() -> None:
    encoder = Encoder(codec("sign"), ErrorFeedback(decay=1.0), 100)
    encoder.encode(gaussian(100), 0)
    after = encoder.residual.clone()
    encoder.commit()
    encoder.revert()
    assert torch.equal(encoder.residual, after)


def test_without_feedback_the_payload_is_that_of_the_codec() -> None:
    encoder, x = Encoder(codec("random0.1+int8"), None, 100), gaussian(100)
    for seed in (3, 4):
        expected = codec("random0.1+int8").seeded(seed)
        assert encoder.encode(x, seed) == expected.encode(x)
        assert torch.equal(encoder.encode_decoded(x, seed).decoded, expected.decode(expected.encode(x), 100))
    assert encoder.residual is None
    encoder.revert()
    assert encoder.encodes == 3


def test_a_threshold_is_refreshed_every_few_payloads() -> None:
    encoder, x = Encoder(codec("threshold0.05@3+fp32"), None, N), student_t3(N)
    seen = []
    for r in range(7):
        encoder.encode((1 + 0.01 * r) * x, r)
        seen.append(encoder.threshold)
    first = x.abs().topk(500).values[-1].item()
    assert seen == pytest.approx([first * f for f in (1, 1, 1, 1.03, 1.03, 1.03, 1.06)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_diverged_vector_changes_nothing(name: str, bad: float) -> None:
    encoder = Encoder(codec(name).bind(SHAPES), ErrorFeedback(decay=1.0), N)
    encoder.encode(inputs(1)[0], 0)
    before = encoder.residual.clone()
    x = gaussian(N)
    x[4321] = bad
    with pytest.raises(NonFiniteError):
        encoder.encode(x, 1)
    assert torch.equal(encoder.residual, before)
    assert encoder.encodes == 1


def test_the_residual_stays_where_it_is() -> None:
    encoder = Encoder(codec("sign"), ErrorFeedback(decay=1.0), 100)
    address = encoder.residual.data_ptr()
    encoder.encode(gaussian(100), 0)
    encoder.revert()
    encoder.encode(gaussian(100), 0)
    assert encoder.residual.data_ptr() == address


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_an_impossible_decay_is_the_users_mistake(decay: float) -> None:
    with pytest.raises(UserError, match=r"must be in \[0, 1\]"):
        ErrorFeedback(decay=decay)


@pytest.mark.parametrize("gain", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_gain_is_the_users_mistake(gain: float) -> None:
    with pytest.raises(UserError, match="must be positive and finite"):
        ErrorFeedback(decay=1.0, gain=gain)
