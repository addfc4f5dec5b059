"""Manifest -> model: the same bits on every peer with the same torch, and no code from anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from peer.errors import UserError, did_you_mean
from peer.protocol.manifest import ModelSpec

T = TypeVar("T")

MAX_LAYERS = 1024  # a manifest comes from the network; building a billion layers would hang even without weights

# transformers checks little: a bad size surfaces as whatever the first failing line raises.
_BUILD_ERRORS = (
    ValueError, TypeError, KeyError, ArithmeticError, AssertionError, AttributeError, RuntimeError, ImportError,
    StrictDataclassError,
)
# Set by this module or by transformers, never by a manifest.
_RESERVED_KEYS = frozenset({
    "model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id", "problem_type",
    "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder",
})


def build_model(spec: ModelSpec, vocab_size: int, seed: int) -> PreTrainedModel:
    """The fp32 model on the CPU, in training mode; the caller's random state is untouched.

    Args:
        spec: an architecture with its config, or a pretrained revision.
        vocab_size: the tokenizer's; a config that gives none gets this one.
        seed: of the initial weights, and of those that a pretrained revision lacks.

    Raises:
        UserError: unknown architecture or config key, sizes that make no model, a vocabulary smaller than the
            tokenizer's, or a pretrained revision that cannot be loaded.
    """
    config = load_config(spec, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.pretrained is None:
            return _guarded(spec, lambda: _from_config(config))
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                spec.pretrained, revision=spec.revision, dtype=torch.float32, attn_implementation="sdpa",
                use_safetensors=True, trust_remote_code=False,
            )
        except (OSError, *_BUILD_ERRORS) as error:
            raise _cannot_load(spec, error) from None
        model.train()
        return model


def count_parameters(spec: ModelSpec, vocab_size: int) -> int:
    """Number of parameters, tied ones once, without allocating any.

    Raises:
        UserError: as `build_model`.
    """
    config = load_config(spec, vocab_size)
    with torch.device("meta"):
        model = _guarded(spec, lambda: _from_config(config))
    return sum(parameter.numel() for parameter in model.parameters())


def check_sequence_length(model: PreTrainedModel, sequence_length: int) -> None:
    """Refuse sequences longer than the positions that the model was made for.

    Raises:
        UserError: both numbers.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and sequence_length > limit:
        raise UserError(
            f"sequence_length={sequence_length} is above the model's max_position_embeddings={limit}",
            "lower data.sequence_length or raise the model's limit in the manifest",
        )


def load_config(spec: ModelSpec, vocab_size: int) -> PretrainedConfig:
    """The checked transformers config of a spec.

    Raises:
        UserError: as `build_model`.
    """
    config = _new_config(spec, vocab_size) if spec.pretrained is None else _pretrained_config(spec, spec.pretrained)
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or size < vocab_size:
        raise UserError(
            f"the model's vocab_size={size} is smaller than the tokenizer's {vocab_size}",
            f"set model.config.vocab_size to at least {vocab_size}, or choose the tokenizer that fits the model",
        )
    layers = getattr(text, "num_hidden_layers", 0)
    if layers > MAX_LAYERS:
        raise UserError(f"num_hidden_layers={layers}: must be at most {MAX_LAYERS}")
    return config


def _new_config(spec: ModelSpec, vocab_size: int) -> PretrainedConfig:
    architecture = str(spec.architecture)
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"unknown model architecture {architecture!r}",
            did_you_mean(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        )
    defaults = _guarded(spec, lambda: AutoConfig.for_model(architecture))
    known = _settable_keys(defaults)
    for key in spec.config:
        if key not in known:
            raise UserError(f"unknown key {key!r} in model.config of {architecture}", did_you_mean(key, known))
    keys: dict[str, Any] = {"vocab_size": vocab_size, **spec.config}
    config: PretrainedConfig = _guarded(spec, lambda: AutoConfig.for_model(architecture, **keys))
    return config


def _settable_keys(config: PretrainedConfig) -> set[str]:
    """What a manifest may set: transformers itself takes any misspelt key without a word."""
    keys = set(config.to_dict()) | set(config.attribute_map)
    if "rope_parameters" in keys:
        keys.add("rope_theta")  # folded into rope_parameters by transformers
    return {key for key in keys if not key.startswith("_")} - _RESERVED_KEYS


def _pretrained_config(spec: ModelSpec, name: str) -> PretrainedConfig:
    if spec.config:
        raise UserError(
            f"model.config {sorted(spec.config)} cannot change the pretrained model {name}",
            "remove 'config', or give an 'architecture' instead of 'pretrained'",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, revision=spec.revision, trust_remote_code=False)
    except (OSError, *_BUILD_ERRORS) as error:
        raise _cannot_load(spec, error) from None
    return config


def _from_config(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
    )
    model.train()
    return model


def _guarded(spec: ModelSpec, build: Callable[[], T]) -> T:
    try:
        return build()
    except _BUILD_ERRORS as error:
        raise UserError(
            f"{spec.architecture or spec.pretrained} cannot be built: {type(error).__name__}: "
            f"{' '.join(str(error).split())}",
            "check the sizes in model.config: " + ", ".join(f"{k}={v!r}" for k, v in sorted(spec.config.items())),
        ) from None


def _cannot_load(spec: ModelSpec, error: Exception) -> UserError:
    return UserError(
        f"cannot load the model {spec.pretrained} at revision {spec.revision!r}: {' '.join(str(error).split())}",
        "check the name and the network; only safetensors weights and no remote code are accepted",
    )
