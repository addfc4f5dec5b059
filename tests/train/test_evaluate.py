from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from peer.errors import UserError
from peer.train.evaluate import evaluate, sample_text
from tests.train.plain import plain_loss
from tests.train.tiny import VOCAB, random_batches, tiny_model


class Recorded:
    """Ten windows that remember which were read."""

    document_end = None

    def __init__(self) -> None:
        self.rows = random_batches(1, rows=10)[0]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def window(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return self.rows[index]


class Letters:
    """Ids 3.. are bytes; enough of a tokenizer for a sample."""

    vocab_size = 259
    eos_id = 1

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3

    def decode(self, ids: np.ndarray) -> str:
        return ".".join(map(str, ids))


def test_windows_are_spread_evenly_and_the_mean_is_over_tokens():
    model, validation = tiny_model(), Recorded()
    loss = evaluate(model, validation, max_sequences=4, batch_sequences=3)
    assert validation.read == [0, 2, 5, 7]
    assert loss == pytest.approx(plain_loss(model, validation.rows[[0, 2, 5, 7]]).item(), abs=1e-6)
    assert loss == evaluate(model, validation, max_sequences=4, batch_sequences=3)
    assert loss == pytest.approx(math.log(VOCAB), abs=0.1)


def test_no_more_windows_than_there_are():
    validation = Recorded()
    evaluate(tiny_model(), validation, max_sequences=99, batch_sequences=99)
    assert validation.read == list(range(10))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_and_no_gradient_is_kept(training):
    model = tiny_model().train(training)
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    evaluate(model, Recorded(), 2, 1)
    sample_text(model, Letters(), "a", 2, seed=0)
    assert model.training is training
    assert set(modes) == {False}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_evaluate_is_said():
    for limit, batch in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match=f"10 validation sequences, at most {limit} wanted, {batch} at a time"):
            evaluate(tiny_model(), Recorded(), limit, batch)


def test_a_sample_depends_on_its_seed_alone():
    model, before = tiny_model(), torch.get_rng_state()
    texts = [sample_text(model, Letters(), "ab", 60, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("100.101.")
    assert torch.equal(before, torch.get_rng_state())
    assert max(int(token) for token in texts[0].split(".")) < 259
    assert len(texts[0].split(".")) == 62, "longer than the model's 32 positions"


def test_a_sample_stops_at_eos_and_may_start_from_nothing():
    model = tiny_model()

    def only_eos(_module, _inputs, output):
        output.logits.fill_(-math.inf)
        output.logits[..., 1] = 0.0

    model.register_forward_hook(only_eos)
    assert sample_text(model, Letters(), "ab", 50, seed=0) == "100.101"
    assert sample_text(model, Letters(), "", 50, seed=0) == "1"
