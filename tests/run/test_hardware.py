from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peer.errors import UserError
from peer.link.limits import Limits
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RoundSpec, RunManifest
from peer.run.assemble import rate_of
from peer.run.hardware import check_hardware, compute_of, fitting, plan_in_words
from peer.settings import load_settings
from peer.train.compute import Compute
from peer.train.memory import Footprint, ModelSize
from peer.train.ranks import Ranks

CPU, GIB = torch.device("cpu"), 2**30
SIZE = ModelSize(parameters=1_000_000, vocab_size=1000, hidden_size=512, layers=8)


def manifest(**sections) -> RunManifest:
    inner = {"batch_sequences": 8, "learning_rate": 1.0, "warmup_steps": 0, "min_learning_rate_ratio": 0.0}
    document = {"name": "a", "model": {"architecture": "llama"}, "recipe": {"name": "diloco", "steps_per_round": 10}}
    inner |= sections.pop("inner", {})
    return RunManifest.model_validate({**document, **sections, "inner": inner, "trust": {"mode": "private"}})


def compute(**given) -> Compute:
    return compute_of(load_settings(given, None, {}), RunPlan.of(manifest()))


def test_a_volunteer_chooses_how_and_the_manifest_what():
    assert compute() == Compute(micro_batch=8)
    assert compute(per_device_train_batch_size=3).micro_batch == 3
    assert compute(per_device_train_batch_size=32).micro_batch == 8, "a step has no more"
    chosen = compute(
        bf16=True, torch_compile=True, gradient_checkpointing=True, attn_implementation="eager", adam_8bit=True
    )
    assert chosen == Compute(
        micro_batch=8, precision="bf16", compiled=True, checkpointing=True, attention="eager", eight_bit=True
    )
    assert compute(fp16=True, auto_find_batch_size=True) == Compute(
        micro_batch=8, precision="fp16", auto_micro_batch=True
    )


def test_two_precisions_are_one_too_many():
    with pytest.raises(UserError, match="bf16=True and fp16=True"):
        check_hardware(load_settings({"bf16": True, "fp16": True, "device": "cpu"}, None, {}))


def test_what_the_hardware_lacks_is_told_before_anything_is_dialled(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(UserError, match="cannot compute in bf16"):
        check_hardware(load_settings({"bf16": True, "device": "cpu"}, None, {}))
    check_hardware(load_settings({"tf32": False, "device": "cpu"}, None, {}))
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_as_many_sequences_at_a_time_as_memory_allows(monkeypatch):
    wanted = Compute(micro_batch=8, auto_micro_batch=True)
    of_three = Footprint.of(SIZE, 3 * 1024, CPU, wanted)
    free = of_three.training + of_three.agent + of_three.activations
    monkeypatch.setattr("peer.train.device.resources.available_memory", lambda: free)
    assert fitting(wanted, SIZE, 1024, CPU).micro_batch == 2
    with pytest.raises(UserError, match="a step needs"):
        fitting(Compute(micro_batch=8), SIZE, 1024, CPU)
    monkeypatch.setattr("peer.train.device.resources.available_memory", lambda: 10**6)
    with pytest.raises(UserError, match=r"1\.0M parameters needs"):
        fitting(wanted, SIZE, 1024, CPU)


def test_what_a_step_is_and_takes_is_one_line(monkeypatch):
    monkeypatch.setattr("peer.train.device.resources.available_memory", lambda: 4 * GIB)
    line = plan_in_words(manifest(), SIZE, CPU, Compute(micro_batch=3, precision="bf16"))
    assert line.startswith("a step: 8 sequences of 128 tokens in 3 micro-batches of 3, bf16 on cpu; needs at least 0.0")
    assert " of 4.00 GiB free on cpu" in line
    assert "micro" not in plan_in_words(manifest(), SIZE, CPU, Compute(micro_batch=8))
    several = Compute(micro_batch=2, ranks=Ranks(0, 2, sharded=True))
    line = plan_in_words(manifest(), SIZE, CPU, several)
    assert "8 sequences of 128 tokens, 4 on each of 2 devices in 2 micro-batches of 2, fp32" in line


class Progress:
    """How far the swarm is."""

    steps_since_fresh, drops = 1000, 0

    def __init__(self, end: RoundSpec, round: int, steps: int, swarm_tokens: int) -> None:
        self.limits = Limits(rounds_total=end.total, tokens_total=end.tokens_total, max_rounds=None)
        self.round, self.global_step, self.swarm_tokens = round, 10.0 * round + steps, swarm_tokens


def rate(plan: RunPlan, *progress: int) -> float:
    return rate_of(plan, Progress(plan.manifest.rounds, *progress), resumed=False)()  # type: ignore[arg-type]


def test_the_rate_follows_the_rounds_or_the_tokens_of_the_swarm_whichever_end_first():
    each = manifest().tokens_per_step
    rounds = RunPlan.of(manifest(rounds={"total": 10}, inner={"schedule": "linear"}))
    assert rate(rounds, 5, 0, 0) == pytest.approx(0.5)
    by_tokens = {"tokens_total": 100 * each}
    tokens = RunPlan.of(manifest(rounds=by_tokens, inner={"schedule": "linear"}))
    assert rate(tokens, 0, 0, 0) == 1.0
    assert rate(tokens, 0, 5, 0) == pytest.approx(0.95), "alone until others are seen"
    assert rate(tokens, 2, 0, 80 * each) == pytest.approx(0.2), "four peers were faster"
    assert rate(tokens, 2, 5, 80 * each) == pytest.approx(0.0), "and within the round as well"
    both = RunPlan.of(manifest(rounds={**by_tokens, "total": 5}, inner={"schedule": "linear"}))
    assert rate(both, 2, 0, 20 * each) == pytest.approx(0.6)
    assert rate(both, 2, 0, 80 * each) == pytest.approx(0.2)
    assert rate(RunPlan.of(manifest(inner={"schedule": "linear"})), 999, 0, 10**12) == 1.0, "no end"


def test_the_rate_ends_where_the_organiser_has_moved_the_end():
    plan = RunPlan.of(manifest(rounds={"total": 10}, inner={"schedule": "linear"}))
    swarm = Progress(plan.manifest.rounds, 9, 0, 0)
    rate = rate_of(plan, swarm, resumed=False)  # type: ignore[arg-type]
    assert rate() == pytest.approx(0.1)
    swarm.limits = replace(swarm.limits, rounds_total=18)
    assert rate() == pytest.approx(0.5)
