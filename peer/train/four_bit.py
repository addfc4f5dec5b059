"""The frozen base of an adapter in 4 bits on a CUDA card, by bitsandbytes: an eighth of its memory, rounded values."""

from __future__ import annotations

import copy
import importlib.util
import math

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from peer.errors import UserError
from peer.hub import MODEL_FILES, fetch
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import ModelSpec
from peer.train.adapter import add_adapter
from peer.train.model_config import cannot_load
from peer.train.precision import Precision

NEEDED = ("bitsandbytes", "accelerate")
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_four_bit(spec: ModelSpec, device: torch.device, count: int) -> None:
    """Refuse what cannot have its base in 4 bits, before anything is built.

    Args:
        count: devices of the peer.

    Raises:
        UserError: no adapter, no CUDA card, several devices, or bitsandbytes is not installed.
    """
    why = None
    if spec.adapter is None:
        why = "this run trains the whole model, and only the frozen base of an adapter can be in 4 bits"
    elif device.type != "cuda":
        why = f"it needs a CUDA card, and the device is {device}"
    elif count > 1:
        why = f"the peer has {count} devices, and a packed base cannot be handed from one to the others"
    if why is not None:
        raise UserError(f"load_in_4bit=True: {why}", "leave it off")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        what = f"load_in_4bit=True: {' and '.join(missing)} is not installed"
        raise UserError(what, "pip install '.[bitsandbytes]' in a clone, or leave it off")


def four_bit_config(precision: Precision) -> BitsAndBytesConfig:
    """NF4 with its scales quantized again (Dettmers et al. 2023, arXiv 2305.14314)."""
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=COMPUTE[precision],
    )


def in_four_bits(
    model: PreTrainedModel, spec: ModelSpec, device: torch.device, precision: Precision
) -> PreTrainedModel:
    """The same model on its device, with the linear layers of its base in 4 bits, and the same adapter in fp32.

    Args:
        model: fp32 on the CPU, whose base is the organiser's.

    Raises:
        UserError: bitsandbytes cannot load it.
    """
    assert spec.pretrained is not None
    layout = FlatLayout.of(model)
    layout.copy_to_flat(model, flat := torch.empty(layout.numel))
    try:
        small: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            fetch(spec.pretrained, spec.revision, MODEL_FILES), config=copy.deepcopy(model.config),
            dtype=torch.float32, quantization_config=four_bit_config(precision), device_map={"": device},
            use_safetensors=True, local_files_only=True, trust_remote_code=False,
        )  # fmt: skip
        add_adapter(small, spec)
    except Exception as error:
        raise cannot_load(spec, error) from None
    assert FlatLayout.of(small) == layout
    layout.copy_from_flat(flat, small)
    return small


def count_values(parameter: Tensor) -> int:
    """How many a parameter has, also one that is packed."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else math.prod(packed.shape)
