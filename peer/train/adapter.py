"""LoRA on a frozen model, by `peft`: what trains, what it was put on, and the two merged."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from peer.base_folder import ADAPTER_FILE
from peer.errors import UserError
from peer.protocol import hashing
from peer.protocol.manifest import ModelSpec
from peer.protocol.spec import HUB_PATTERN

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of names in a file of peft


def check_peft() -> None:
    """Raise UserError where `peft` is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("this model has an adapter, and peft is not installed", "pip install '.[peft]' in a clone")


def add_adapter(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Freeze the model, and put the trainable matrices of `spec.adapter` into it, fp32: A random, B zero.

    Raises:
        UserError: `peft` is not installed.
        ValueError: no layer of the model has such a name.
    """
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

    assert spec.adapter is not None
    config = LoraConfig(
        r=spec.adapter.r, lora_alpha=spec.adapter.alpha, lora_dropout=spec.adapter.dropout, task_type="CAUSAL_LM",
        target_modules=list(spec.adapter.target_modules) or "all-linear",
    )  # fmt: skip
    config.base_model_name_or_path, config.revision = spec.pretrained, spec.revision
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gives them the dtype in which a layer in 4 bits multiplies
            parameter.data = parameter.data.float()
    model.train()


def base_digest(model: PreTrainedModel) -> str:
    """BLAKE3 over names and values of all frozen parameters, 64 hex digits: equal for equal bases."""
    hasher = hashing.Hasher()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            described = json.dumps([name, str(parameter.dtype), list(parameter.shape)]).encode()
            hasher.update(len(described).to_bytes(8, "big") + described)
            hasher.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return hasher.digest().hex()


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether matrices of an adapter stand in a model."""
    return getattr(model, "peft_config", None) is not None


class AdapterOf:
    """The adapter of a model, as a folder that `PeftModel.from_pretrained` loads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def save_pretrained(self, folder: Path) -> None:
        """Write it."""
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(self._model).items()
        save_file({_PREFIX + name: one.detach().cpu().contiguous() for name, one in tensors}, folder / WEIGHTS_FILE)
        for config in self._model.peft_config.values():
            config.inference_mode = True
            config.save_pretrained(str(folder))


def what_to_save(model: PreTrainedModel) -> PreTrainedModel | AdapterOf:
    """The adapter alone where there is one, else the model."""
    return AdapterOf(model) if has_adapter(model) else model


@torch.no_grad()
def merge_adapter(model: PreTrainedModel) -> None:
    """Add what the adapter has learned to the layers that it stands beside, and take it out: a model like its base."""
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: one for name, one in model.named_modules() if isinstance(one, LoraLayer)}
    for name, layer in layers.items():
        layer.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def base_of(folder: Path) -> tuple[str, str]:
    """(name on the hub, revision) of the model that an exported adapter stands on.

    Raises:
        UserError: the folder does not say it, or names something else.
    """
    try:
        config = json.loads((folder / ADAPTER_FILE).read_bytes())
        name, revision = config["base_model_name_or_path"], config.get("revision") or "main"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder / ADAPTER_FILE} cannot be read", "export the adapter again") from None
    if not (isinstance(name, str) and isinstance(revision, str) and re.fullmatch(HUB_PATTERN, name)):
        raise UserError(f"the adapter in {folder} names no model on the hub as its base", "export it with --merged")
    return name, revision


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Put an exported adapter into the model that it was trained on.

    Raises:
        OSError, ValueError, RuntimeError, KeyError: it is not one of this model.
    """
    from peft import LoraConfig, PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"an adapter of kind {config.peft_type}, and not LoRA")
    tensors = {name.removeprefix(_PREFIX): one for name, one in load_file(folder / WEIGHTS_FILE).items()}
    inject_adapter_in_model(config, model)
    loaded: Any = set_peft_model_state_dict(model, tensors)
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if strange := [*loaded.unexpected_keys, *missing]:
        raise ValueError(f"not an adapter of this model: {', '.join(strange[:3])}")
