from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.train.batch import Batch
from peer.train.compute import Compute, prepare
from peer.train.moments import InnerMoments
from peer.train.muon import MuonAdamW
from peer.train.optim import build_optimizer, optimizer_tensors
from peer.train.ranks import ALONE, Ranks
from peer.train.sharding import place
from peer.train.step import Trainer
from tests.train.in_ranks import in_ranks
from tests.train.tiny import random_batches, tiny_model

CPU = torch.device("cpu")


def trained(optimizer: str, steps: int, ranks: Ranks = ALONE) -> tuple[Trainer, FlatLayout, list[InnerMoments]]:
    model, inner = tiny_model(), InnerSpec(optimizer=optimizer, batch_sequences=4)  # type: ignore[arg-type]
    layout, compute = FlatLayout.of(model), Compute(ranks=ranks)
    place(model, CPU, ranks)
    prepare(model, compute)
    trainer = Trainer(model, build_optimizer(model, inner), inner, lambda: 1e-2, compute=compute)
    for tokens in random_batches(steps, 4):
        trainer.step(ranks.part_of(Batch.of(tokens)))
    return trainer, layout, [InnerMoments(layout, model, trainer.optimizer, second, ranks) for second in (False, True)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_lie_as_parameters_do(optimizer: str) -> None:
    trainer, layout, moments = trained(optimizer, 2)
    state = optimizer_tensors(trainer.optimizer)
    muon = trainer.optimizer.momentum if isinstance(trainer.optimizer, MuonAdamW) else {}
    assert bool(muon) == (optimizer == "muon")
    for kind, fields in enumerate((("exp_avg", "momentum_buffer"), ("exp_avg_sq",))):
        moments[kind].read(out := torch.full((layout.numel,), torch.nan))
        for name, view in zip(layout.names, layout.views(out), strict=True):
            held = [state[f"{name}.{field}"] for field in fields if f"{name}.{field}" in state]
            assert torch.equal(view, held[0] if held else torch.zeros_like(view))
        moments[kind].write(out.neg_() if kind == 0 else out.add_(1.0))
        moments[kind].read(again := torch.empty(layout.numel))
        for name, view, now in zip(layout.names, layout.views(out), layout.views(again), strict=True):
            assert torch.equal(now, view) or f"{name}.exp_avg_sq" not in state


def test_a_fresh_optimizer_has_moments_of_zero_and_steps_on_from_what_it_gets() -> None:
    trainer, layout, moments = trained("adamw", 0)
    for one in moments:
        one.read(out := torch.full((layout.numel,), torch.nan))
        assert not out.any()
    plain, _, _ = trained("adamw", 1)
    trainer.step(next(iter(random_batches(1, 4))))
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True))


def test_a_mean_of_squares_that_rounding_made_negative_becomes_zero() -> None:
    trainer, layout, (_, second) = trained("adamw", 1)
    second.write(torch.full((layout.numel,), -1e-12))
    second.read(out := torch.empty(layout.numel))
    assert not out.any()
    trainer.step(next(iter(random_batches(1, 4))))
    assert all(bool(one.isfinite().all()) for one in trainer.model.parameters())


def test_moments_that_cannot_be_averaged_are_refused() -> None:
    model = tiny_model()
    for inner, eight_bit, message in [
        (InnerSpec(optimizer="sgd"), False, "'sgd' has no moments"), (InnerSpec(), True, "adam_8bit=True"),
    ]:
        with pytest.raises(UserError, match=message):
            InnerMoments(FlatLayout.of(model), model, build_optimizer(model, inner, eight_bit), second=False)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_hold_the_moments_of_one(tmp_path: Path, sharded: bool) -> None:
    def work(ranks: Ranks) -> dict[str, Any]:
        _, layout, moments = trained("adamw", 1, ranks)
        found = []
        for one in moments:
            one.read(out := torch.zeros(layout.numel))
            one.write(torch.arange(layout.numel).float())
            one.read(after := torch.zeros(layout.numel))
            found += [out.tolist(), after.tolist()]
        return {"found": found}

    both = [torch.tensor(one["found"]) for one in in_ranks(2, tmp_path, work, sharded=sharded)]
    numel = both[0].shape[1]
    whole = both[0] + both[1]  # each copies its part
    assert torch.equal(whole[1], torch.arange(numel).float())
    assert torch.equal(whole[3], torch.arange(numel).float())
    _, _, alone = trained("adamw", 1)
    for kind, one in enumerate(alone):
        one.read(out := torch.empty(numel))
        torch.testing.assert_close(whole[2 * kind], out, rtol=1e-3, atol=1e-7)
