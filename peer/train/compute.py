"""How a peer computes its steps on the hardware it has; what is computed is the same, but for rounding."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from peer.errors import UserError
from peer.train.precision import Precision
from peer.train.ranks import ALONE, Ranks

log = logging.getLogger(__name__)
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The choices of a volunteer.

    Attributes:
        micro_batch: sequences of one forward pass; None: all of a step.
        auto_micro_batch: halve it when memory runs out.
        precision: of matrix products.
        compiled: by torch.compile.
        checkpointing: keep the inputs of layers alone, and compute the rest again in the backward pass.
        eight_bit: moments of one byte each.
        four_bit: the base of an adapter in 4 bits.
        attention: an implementation by transformers' name; None: the best that the architecture has.
        ranks: that make each step together.
    """

    micro_batch: int | None = None
    auto_micro_batch: bool = False
    precision: Precision = "fp32"
    compiled: bool = False
    checkpointing: bool = False
    eight_bit: bool = False
    four_bit: bool = False
    attention: str | None = None
    ranks: Ranks = ALONE


DEFAULT = Compute()


def prepare(model: PreTrainedModel, compute: Compute) -> None:
    """Set a model on its device up to compute as chosen.

    Raises:
        UserError: an attention or a recomputation that this architecture does not have.
    """
    if compute.attention is not None:
        _set_attention(model, compute.attention)
    if compute.checkpointing:
        if not model.supports_gradient_checkpointing:
            what = f"gradient_checkpointing=True: {model.config.model_type} cannot recompute its layers"
            raise UserError(what, "leave it off, and lower --per-device-train-batch-size")
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    if compute.compiled:
        _compiled_part(model).compile()


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether a part of it runs compiled."""
    return _compiled_part(model)._compiled_call_impl is not None


def uncompile(model: PreTrainedModel, reason: str) -> None:
    """Continue without torch.compile, and say why in one line."""
    log.warning("torch.compile failed, training without it: %s", reason)
    _compiled_part(model)._compiled_call_impl = None


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or this machine, had no memory left; torch has no common word for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def out_of_memory(device: torch.device, sequences: int) -> UserError:
    """What to say when a step does not fit."""
    what = f"out of memory on {device}: a step of {sequences} sequences at a time does not fit"
    if sequences == 1:
        return UserError(what, "use --gradient-checkpointing, --bf16, or a larger machine")
    return UserError(what, "lower --per-device-train-batch-size, or let --auto-find-batch-size do so")


def _compiled_part(model: PreTrainedModel) -> nn.Module:
    """All but the head, which is applied to parts."""
    return model.base_model


def _set_attention(model: PreTrainedModel, name: str) -> None:
    if not _takes(model, name):
        has = [kind for kind in ATTENTIONS if kind != name and _takes(model, kind)]
        what = f"attn_implementation={name!r}: {model.config.model_type} cannot compute it on this machine"
        raise UserError(what, f"use auto, or one of {', '.join(has)}" if has else "use auto")
    model.set_attn_implementation(name)


def _takes(model: PreTrainedModel, name: str) -> bool:
    """Whether an architecture can switch to it; nothing is fetched for it, and the model is as before."""
    if name == "flash_attention_2" and not (model.device.type == "cuda" and is_flash_attn_2_available()):
        return False  # transformers would look for it on the hub
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        return bool(model.config._attn_implementation == name)
    except (ValueError, ImportError):  # transformers' words for "not of this architecture" and "not installed"
        return False
    finally:
        model.set_attn_implementation(before)
