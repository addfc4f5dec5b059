"""Several processes on gloo make the steps of one with the same batch."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peer.outer.policy.straggler import ComputeTimeout
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.adapter_spec import AdapterSpec
from peer.protocol.manifest import InnerSpec, ModelSpec
from peer.train.adapter import add_adapter
from peer.train.batch import Batch
from peer.train.compute import Compute, is_compiled, prepare
from peer.train.compute_limit import ComputeLimit
from peer.train.gradient import KeptGradient
from peer.train.optim import build_optimizer, load_optimizer_tensors, reset_state
from peer.train.orders import gathered
from peer.train.rank_part import RankPart
from peer.train.ranks import ALONE, Ranks
from peer.train.sharding import local, place
from peer.train.step import Trainer
from tests.train.in_ranks import in_ranks
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec(learning_rate=1e-2, warmup_steps=0, batch_sequences=4)
STEPS = 4


def adapted_model() -> PreTrainedModel:
    """With a LoRA that does something from the first step on, and a dropout that does not depend on the rank: none."""
    model = tiny_model()
    lora = AdapterSpec(r=2, alpha=8, target_modules=("q_proj", "v_proj"))
    torch.manual_seed(5)
    add_adapter(model, ModelSpec(pretrained="o/base", revision="0" * 40, adapter=lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def trained(
    ranks: Ranks, rows: int, *, adapter: bool = False, optimizer: str = "adamw", hidden: int = 16, **choices: Any
) -> dict[str, Any]:
    """Losses and norms of a few steps, and the parameters after them; of each batch a rank sees its own rows."""
    wide = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 32 // hidden or 1}
    model = adapted_model() if adapter else tiny_model(**wide)
    compute, inner = Compute(ranks=ranks, **choices), INNER.model_copy(update={"optimizer": optimizer})
    place(model, torch.device("cpu"), ranks)
    prepare(model, compute)
    inner_optimizer = build_optimizer(model, inner, compute.eight_bit)
    trainer = Trainer(model, inner_optimizer, inner, lambda: 1e-2, compute=compute)
    layout, steps = FlatLayout.of(model), []
    for number, tokens in enumerate(random_batches(STEPS, rows)):
        tokens[0, 3:] |= 1 << 24  # learned from less: the mean is over tokens, and not over rows or ranks
        steps.append(trainer.step(ranks.part_of(Batch.of(tokens))))
        if number == STEPS // 2:  # as on resume: whole moments are read and written
            moments = {name: tensor.clone() for name, tensor in gathered(inner_optimizer)}
            reset_state(inner_optimizer)
            load_optimizer_tensors(inner_optimizer, moments)
    assert is_compiled(model) == compute.compiled  # it did not fall back
    return {
        "losses": [step.loss for step in steps], "norms": [step.grad_norm for step in steps],
        "tokens": [step.tokens for step in steps], "parameters": flat(layout, model, ranks).tolist(),
        "moments": {name: tensor.flatten().tolist() for name, tensor in gathered(inner_optimizer)},
        "held": sum(local(one).numel() for one in model.parameters()),
    }  # fmt: skip


def flat(layout: FlatLayout, model: Any, ranks: Ranks = ALONE) -> Tensor:
    """What a rank has of the parameters; zeros for the parts of others."""
    out = torch.zeros(layout.numel)
    if ranks.sharded:
        RankPart(layout, model, ranks).read(out, 0)
    else:
        layout.copy_to_flat(model, out)
    return out


HALF = ("fp16", "bf16")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without a C++ compiler, whose processes do not survive a fork: the traced graphs run as they are."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bf16 computes the same, only slowly, which is why `autocast` refuses it."""
    monkeypatch.setattr("peer.train.precision._has_bf16", lambda device: True)  # noqa: ARG005


def same(found: dict[str, Any], alone: dict[str, Any], within: float) -> None:
    assert found["losses"] == pytest.approx(alone["losses"], abs=within)
    assert found["norms"] == pytest.approx(alone["norms"], rel=10 * within)
    assert found["tokens"] == alone["tokens"]


def alone_of(rows: int, choices: dict[str, Any]) -> dict[str, Any]:
    """One process that cuts nothing and keeps all; these choices change what it computes."""
    kept = ("precision", "adapter", "optimizer", "eight_bit", "hidden")
    return trained(ALONE, rows, **{key: choices[key] for key in kept if key in choices})


@pytest.mark.parametrize(
    ("count", "rows", "choices"),
    [
        (2, 4, {}), (4, 8, {"micro_batch": 1}), (3, 4, {}),
        (2, 4, {"precision": "fp16"}), (2, 4, {"precision": "bf16"}),
        (2, 4, {"adapter": True, "micro_batch": 1, "checkpointing": True}),
        pytest.param(2, 4, {"compiled": True}, marks=pytest.mark.long),
    ],
    ids=["two", "four, accumulated", "three with four rows", "fp16", "bf16", "adapter, accumulated", "compiled"],
)  # fmt: skip
def test_ranks_make_the_steps_of_one_process(tmp_path: Path, count: int, rows: int, choices: dict[str, Any]) -> None:
    """Three ranks have two rows each, so the last has none to learn from."""
    alone = alone_of(rows, choices)
    found = in_ranks(count, tmp_path, lambda ranks: trained(ranks, rows, **choices))
    within = 2e-3 if choices.get("precision") in HALF else 1e-5
    for one in found:
        same(one, alone, within)
        assert one["parameters"] == found[0]["parameters"]  # to the bit
    assert found[0]["parameters"] == pytest.approx(alone["parameters"], abs=20 * within)
    assert found[0]["losses"][0] > 5.0


@pytest.mark.parametrize(
    ("rows", "choices"),
    [
        (4, {}), (3, {"micro_batch": 1, "checkpointing": True}), (4, {"precision": "bf16"}), (4, {"adapter": True}),
        (4, {"optimizer": "muon"}), (4, {"eight_bit": True, "hidden": 64}),
        pytest.param(4, {"compiled": True}, marks=pytest.mark.long),
    ],
    ids=["plain", "three rows, cut", "bf16", "adapter", "muon", "moments of one byte", "compiled"],
)  # fmt: skip
def test_ranks_that_share_a_model_make_the_steps_of_one(tmp_path: Path, rows: int, choices: dict[str, Any]) -> None:
    """Each holds about half of the parameters; together they have those, and the moments, of one process.

    Moments of one byte are those of one process where the parts are whole blocks, as with a width of 64.
    """
    alone = alone_of(rows, choices)
    found = in_ranks(2, tmp_path, lambda ranks: trained(ranks, rows, **choices), sharded=True)
    within = 2e-3 if choices.get("precision") in HALF else 1e-5
    for one in found:
        same(one, alone, within)
        assert one["held"] == pytest.approx(alone["held"] / 2, rel=0.05)
        assert one["moments"].keys() == alone["moments"].keys()
        for name, values in alone["moments"].items():
            moment = torch.tensor(one["moments"][name])
            torch.testing.assert_close(moment, torch.tensor(values), rtol=0, atol=10 * within)
    together = torch.tensor(found[0]["parameters"]) + torch.tensor(found[1]["parameters"])
    within *= 100 if choices.get("eight_bit") else 20  # a moment between two codes may become either
    torch.testing.assert_close(together, torch.tensor(alone["parameters"]), rtol=0, atol=within)


def gradients(ranks: Ranks, tau_s: float | None = None) -> dict[str, Any]:
    """What a recipe whose outer optimizer makes every step takes of each step, as far as this rank has it."""
    model = tiny_model()
    layout = FlatLayout.of(model)
    place(model, torch.device("cpu"), ranks)
    kept = KeptGradient(model, layout, ranks=ranks)
    trainer = Trainer(model, kept, INNER, lambda: 0.5, compute=Compute(ranks=ranks, micro_batch=1))
    trainer.hook.limit = ComputeLimit.of(None if tau_s is None else ComputeTimeout(tau_s=tau_s), model.device)
    found, tokens = [], []
    for batch in random_batches(2, 4):
        tokens.append(trainer.step(ranks.part_of(Batch.of(batch))).tokens)
        out = torch.zeros(layout.numel)
        kept.own.read(out, 0)
        found.append(out.tolist())
    return {"gradients": found, "tokens": tokens}


def test_ranks_that_share_a_model_keep_the_gradient_of_one_in_parts(tmp_path: Path) -> None:
    alone = gradients(ALONE)
    first, second = in_ranks(2, tmp_path, gradients, sharded=True)
    for one, other, expected in zip(first["gradients"], second["gradients"], alone["gradients"], strict=True):
        parts = torch.tensor([one, other])
        assert not bool((parts != 0).all(0).any())  # each element is in one of them
        assert parts.sum(0).tolist() == pytest.approx(expected, abs=1e-6)
        assert float(torch.tensor(expected).abs().max()) > 0.01


def test_ranks_that_share_a_model_stop_a_step_together(tmp_path: Path) -> None:
    """One is at its time limit after the first of two micro-batches, the other has none."""
    found = in_ranks(2, tmp_path, lambda ranks: gradients(ranks, 1e9 if ranks.rank else 1e-9), sharded=True)
    assert [one["tokens"] for one in found] == [[16, 16]] * 2


def test_each_rank_copies_its_part_of_the_flat_vector(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> list[float]:
        model = tiny_model()
        layout = FlatLayout.of(model)
        part, out = RankPart(layout, model, ranks), torch.full((layout.numel,), torch.nan)
        part.read(out, 0)
        part.write(torch.arange(float(layout.numel)), 0)
        assert torch.equal(flat(layout, model), torch.arange(float(layout.numel)))  # each holds all of it
        return out.tolist()

    found = [torch.tensor(out) for out in in_ranks(2, tmp_path, work)]
    model = tiny_model()
    whole = flat(FlatLayout.of(model), model)
    half = len(whole) // 2
    assert torch.equal(found[0][:half], whole[:half])
    assert torch.equal(found[1][half:], whole[half:])
    assert bool(found[0][half:].isnan().all())
    assert bool(found[1][:half].isnan().all())


def test_ranks_that_share_a_model_do_not_wait_to_agree() -> None:
    """They have met no other: a call to one would raise."""
    assert Ranks(0, 2, sharded=True).agree(0, []) == 0
    with pytest.raises(ValueError, match="process group has not been initialized"):
        Ranks(0, 2).agree(0, [])


def test_rows_that_are_missing_are_not_learned_from() -> None:
    batch = Batch.of(random_batches(1, 5)[0])
    parts = [Ranks(rank, 3).part_of(batch) for rank in range(3)]
    assert [len(part.inputs_bt) for part in parts] == [2, 2, 2]
    assert [part.tokens for part in parts] == [batch.tokens] * 3
    assert sum(int((part.labels_bt != -100).sum()) for part in parts) == batch.tokens
