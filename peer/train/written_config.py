"""The config of a trained model as a manifest writes it, so that every peer builds the same architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import ModelSpec
from peer.train.model import build_skeleton
from peer.train.model_config import guarded, is_refused, known_keys, load_config

TOKEN_IDS = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})


def as_architecture(spec: ModelSpec, vocab_size: int) -> ModelSpec:
    """Architecture and config of a pretrained model, in place of the folder that it lies in.

    Args:
        spec: names the folder.
        vocab_size: the tokenizer's.

    Raises:
        UserError: the folder holds no causal language model, or one that a manifest cannot describe.
    """
    own = load_config(spec, vocab_size)
    defaults = guarded(spec, lambda: AutoConfig.for_model(own.model_type))
    written = ModelSpec(architecture=own.model_type, config=_written(own.to_dict(), defaults))
    again = load_config(written, vocab_size)
    first, second = _compared(own.to_dict()), _compared(again.to_dict())
    if others := sorted(key for key in first.keys() & second.keys() if first[key] != second[key]):
        raise UserError(
            f"the config of {spec.pretrained} cannot be written into a manifest: {', '.join(others)[:200]}",
            "put the model on the hub, and name it there",
        )
    if FlatLayout.of(build_skeleton(spec, vocab_size)) != FlatLayout.of(build_skeleton(written, vocab_size)):
        raise UserError(f"{spec.pretrained} has other parameters than its config says", "export the model again")
    return written


def _written(values: Mapping[str, Any], defaults: PretrainedConfig, prefix: str = "") -> dict[str, Any]:
    """What the architecture knows and a manifest may set; token ids that are unset are left to the tokenizer's."""
    known, found = known_keys(defaults), dict[str, Any]()
    for key, value in values.items():
        part = vars(defaults).get(key)
        if isinstance(part, PretrainedConfig) and isinstance(value, dict):
            found[key] = _written(value, part, f"{prefix}{key}.")
        elif key in known and not is_refused(prefix + key) and not (key in TOKEN_IDS and value is None):
            found[key] = value
    return found


def _compared(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By path, all that a manifest may set; token ids may follow the tokenizer."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in TOKEN_IDS or is_refused(prefix + key):
            continue
        found |= _compared(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
