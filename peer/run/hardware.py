"""A volunteer's settings and this machine -> how the peer computes its steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from peer.errors import UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest
from peer.run.devices import device_names
from peer.settings import PeerSettings
from peer.train.compute import Compute
from peer.train.compute_limit import micro_batch_of
from peer.train.four_bit import check_four_bit
from peer.train.memory import NO_RULE, Footprint, ModelSize, RuleBytes
from peer.train.precision import Precision, allow_tf32, autocast
from peer.train.ranks import ALONE, Ranks


def check_hardware(settings: PeerSettings) -> None:
    """Raise UserError for a device that is not there, or cannot compute as the settings ask; let it use TF32 or not."""
    autocast(first_device(settings), _precision(settings))
    allow_tf32(settings.tf32)


def compute_of(settings: PeerSettings, plan: RunPlan, ranks: Ranks = ALONE) -> Compute:
    """The choices of this peer; each of its ranks makes no more sequences at a time than it has of a step.

    Raises:
        UserError: more devices than a step has sequences, or a base that cannot be in 4 bits.
    """
    recipe, sequences = plan.recipe, plan.manifest.inner.batch_sequences
    if ranks.count > sequences:
        what = f"{ranks.count} devices: a step of this run has {sequences} sequences, so some would have none"
        raise UserError(what, f"name at most {sequences} with --devices, or start several peers")
    if settings.load_in_4bit:
        check_four_bit(plan.manifest.model, first_device(settings), ranks.count)
    step, timeout = ranks.rows(sequences), recipe.straggler.timeout
    return Compute(
        ranks=ranks,
        micro_batch=min(step, settings.per_device_train_batch_size or micro_batch_of(timeout, step)),
        auto_micro_batch=settings.auto_find_batch_size,
        precision=_precision(settings),
        compiled=settings.torch_compile,
        checkpointing=settings.gradient_checkpointing,
        eight_bit=settings.adam_8bit,
        four_bit=settings.load_in_4bit,
        attention=None if settings.attn_implementation == "auto" else settings.attn_implementation,
    )


def first_device(settings: PeerSettings) -> torch.device:
    """That of this process."""
    return torch.device(device_names(settings)[0])


def fitting(
    compute: Compute, size: ModelSize, sequence_length: int, device: torch.device, rule_bytes: RuleBytes = NO_RULE
) -> Compute:
    """The same, with as few sequences at a time as memory allows if the peer is to find that out.

    Args:
        rule_bytes: as in `Footprint.of`.

    Raises:
        UserError: it does not fit.
    """
    while True:
        assert compute.micro_batch is not None
        try:
            tokens = compute.micro_batch * sequence_length
            Footprint.of(size, tokens, device, compute, rule_bytes=rule_bytes).check(device)
        except UserError:
            if not compute.auto_micro_batch or compute.micro_batch == 1:
                raise
            compute = replace(compute, micro_batch=compute.micro_batch // 2)
        else:
            return compute


def plan_in_words(
    manifest: RunManifest, size: ModelSize, device: torch.device, compute: Compute, rule_bytes: RuleBytes = NO_RULE
) -> str:
    """One line of what a step is, and what it takes."""
    assert compute.micro_batch is not None
    step, length = manifest.inner.batch_sequences, manifest.data.sequence_length
    ranks = compute.ranks
    parts = -(-ranks.rows(step) // compute.micro_batch)
    cut = f", {ranks.rows(step)} on each of {ranks.count} devices" if ranks.count > 1 else ""
    cut += f" in {parts} micro-batches of {compute.micro_batch}" if parts > 1 else ""
    needs = Footprint.of(size, compute.micro_batch * length, device, compute, rule_bytes=rule_bytes).in_words(device)
    return f"a step: {step} sequences of {length} tokens{cut}, {compute.precision} on {device}; {needs}"


def _precision(settings: PeerSettings) -> Precision:
    if settings.bf16 and settings.fp16:
        raise UserError("bf16=True and fp16=True: a peer computes in one of them", "leave fp16 off")
    return "bf16" if settings.bf16 else "fp16" if settings.fp16 else "fp32"
