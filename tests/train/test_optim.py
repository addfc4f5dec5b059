from __future__ import annotations

import pytest
import torch

from peer.errors import UserError
from peer.protocol.manifest import InnerSpec
from peer.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from peer.train.step import Trainer
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(weight_decay=0.1)
CPU = torch.device("cpu")


def trained(steps: int) -> Trainer:
    model = tiny_model()
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 1e-2)
    for batch in random_batches(steps):
        trainer.step(batch)
    return trainer


def test_only_matrices_decay():
    model = tiny_model()
    decays = {
        name: group["weight_decay"]
        for group in build_optimizer(model, INNER).param_groups
        for name in group["param_names"]
    }
    assert decays == {name: 0.1 if weight.dim() >= 2 else 0.0 for name, weight in model.named_parameters()}
    assert sorted(set(decays.values())) == [0.0, 0.1]


def test_frozen_parameters_are_left_out():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [group["param_names"] for group in build_optimizer(model, INNER).param_groups] == [["weight"]]


def test_settings_reach_adamw():
    inner = InnerSpec(learning_rate=0.02, betas=(0.8, 0.9), eps=1e-6)
    assert [(g["lr"], g["betas"], g["eps"]) for g in build_optimizer(tiny_model(), inner).param_groups] == [
        (0.02, (0.8, 0.9), 1e-6)
    ] * 2


def test_saved_state_continues_bit_for_bit():
    trainer = trained(3)
    tensors = {key: tensor.clone() for key, tensor in optimizer_tensors(trainer.optimizer).items()}
    assert len(tensors) == 3 * len(list(trainer.model.parameters()))
    assert tensors["model.norm.weight.step"].item() == 3
    copy = tiny_model()
    copy.load_state_dict(trainer.model.state_dict())
    optimizer = build_optimizer(copy, INNER)
    load_optimizer_tensors(optimizer, tensors)
    resumed = Trainer(copy, optimizer, INNER, lambda: 1e-2)
    for batch in random_batches(6)[3:]:
        assert trainer.step(batch).loss == resumed.step(batch).loss
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), copy.parameters(), strict=True))
    assert tensors["model.norm.weight.step"].item() == 3, "loading copies"


def test_fresh_state_is_empty_and_loads():
    trainer = trained(1)
    assert optimizer_tensors(build_optimizer(tiny_model(), INNER)) == {}
    load_optimizer_tensors(trainer.optimizer, {})
    assert optimizer_tensors(trainer.optimizer) == {}


def test_a_foreign_state_is_refused_and_changes_nothing():
    trainer = trained(1)
    good = dict(optimizer_tensors(trainer.optimizer))
    shorter = {key: tensor for key, tensor in good.items() if key != "model.norm.weight.step"}
    for bad, message in [
        ({**good, "other.weight.step": torch.zeros(())}, "this model has no such state"),
        ({**good, "model.norm.weight.momentum": torch.zeros(16)}, "no such state"),
        ({**good, "model.norm.weight.exp_avg": torch.zeros(15)}, r"of shape \[15\]: this model has shape \[16\]"),
        (shorter, "has only"),
    ]:
        with pytest.raises(UserError, match=message):
            load_optimizer_tensors(trainer.optimizer, bad)
    after = optimizer_tensors(trainer.optimizer)
    assert after.keys() == good.keys()
    assert all(after[key] is good[key] for key in good)
