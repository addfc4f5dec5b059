"""Manifest -> model: the same bits on every peer with the same torch, and no code from anywhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from peer.errors import UserError
from peer.hub import MODEL_FILES, check_download, fetch
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import ModelSpec
from peer.system.bounded_child import run_bounded
from peer.train.adapter import add_adapter, base_digest, check_peft
from peer.train.batch import Batch, positions_in_documents
from peer.train.loss import LanguageLoss
from peer.train.memory import ModelSize
from peer.train.model_config import cannot_load, guarded, load_config

CAUSAL_CHECK_TOKENS = 16
CPU_WORK = 20_000_000_000  # parameters times tokens: a few seconds
WIDEST_VALUE = 8  # bytes: fp64, or fp32 twice
OTHER_FILES_BYTES = 256 * 2**20  # tokenizers, indices, tied weights
LOOKS_AHEAD = 1e-4  # of the largest logit; rounding moves less
_POSITION_LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions", "n_positions")


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
            return guarded(spec, lambda: _from_config(config))
        if spec.adapter is not None:
            check_peft()
        most = WIDEST_VALUE * _parameters(guarded(spec, lambda: _skeleton(config))) + OTHER_FILES_BYTES
        check_download(spec.pretrained, spec.revision, MODEL_FILES, most)
        try:
            folder = fetch(spec.pretrained, spec.revision, MODEL_FILES)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:
            raise cannot_load(spec, error) from None
        model.train()
        if spec.adapter is not None:
            torch.manual_seed(seed)
            guarded(spec, lambda: add_adapter(model, spec))
            _check_base(spec, model)
        return model


def _check_base(spec: ModelSpec, model: PreTrainedModel) -> None:
    if spec.base is not None and (found := base_digest(model)) != spec.base:
        raise UserError(
            f"the weights of {spec.pretrained} at {spec.revision} differ from the organiser's: their digest is "
            f"{found[:16]}, the manifest's model.base {spec.base[:16]}",
            "remove it from the hub's cache, so that it is downloaded again; else install the organiser's transformers",
        )


def end_texts_with(model: PreTrainedModel, token: int, written: Mapping[str, Any]) -> None:
    """Let generation start and end where documents do; an architecture's defaults belong to its published tokenizer.

    Args:
        written: the config of the manifest, whose own tokens stay.
    """
    for key in ("bos_token_id", "eos_token_id"):
        if key in written or key in written.get("text_config", {}):
            continue
        for owner in (model.config, model.config.get_text_config(), model.generation_config):
            if hasattr(owner, key):
                setattr(owner, key, token)


def build_skeleton(spec: ModelSpec, vocab_size: int) -> PreTrainedModel:
    """The model on torch's meta device: names and shapes, nothing allocated and no weights loaded.

    Raises:
        UserError: as `build_model`.
    """
    config = load_config(spec, vocab_size)
    skeleton = guarded(spec, lambda: _skeleton(config))
    if spec.adapter is not None:
        with torch.device("meta"):
            guarded(spec, lambda: add_adapter(skeleton, spec))
    return skeleton


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return _from_config(config)


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def measure_model(spec: ModelSpec, vocab_size: int) -> ModelSize:
    """The size of a model, found in a child that may use little time and memory: its config is a stranger's.

    Raises:
        UserError: as `build_model`, or the layout alone takes too long or too much.
    """
    if spec.of_a_script:
        raise UserError(
            "this run's model is that of a script: it has no architecture of transformers",
            "join with the script, by atoll.Swarm",
        )
    what = f"the model {spec.architecture or spec.pretrained}"
    return ModelSize(**run_bounded(lambda: _sizes(spec, vocab_size), what, "choose a smaller model"))


def _sizes(spec: ModelSpec, vocab_size: int) -> dict[str, int]:
    skeleton = build_skeleton(spec, vocab_size)
    text = skeleton.config.get_text_config()
    numbers = (getattr(text, key, 0) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    names = ("vocab_size", "hidden_size", "layers")
    sizes = {name: number if isinstance(number, int) else 0 for name, number in zip(names, numbers, strict=True)}
    total = _parameters(skeleton)
    return {"parameters": total, "frozen": total - FlatLayout.of(skeleton).numel, **sizes}


def check_sequence_length(model: PreTrainedModel, sequence_length: int) -> None:
    """Refuse sequences longer than the positions that the model was made for.

    Raises:
        UserError: both numbers.
    """
    text = model.config.get_text_config()
    for key in _POSITION_LIMITS:
        limit = getattr(text, key, None)
        if isinstance(limit, int) and 0 < limit < sequence_length:
            raise UserError(
                f"sequence_length={sequence_length} is above the model's {key}={limit}",
                "lower data.sequence_length or raise the model's limit in the manifest",
            )


def check_trains(
    spec: ModelSpec, model: PreTrainedModel, sequence_length: int, document_end: int | None = None
) -> None:
    """Make one forward and backward pass, and see that no position looks ahead; the model is as before afterwards.

    Args:
        spec: what the model was built of, for messages.
        model: in training mode, on the device where it will compute.
        sequence_length: inputs of a step; a large model on the CPU is tried with fewer.
        document_end: the token behind which attention must not look back; None: it may.

    Raises:
        UserError: too few positions, no causal model, or whatever the first step of training would fail of.
    """
    check_sequence_length(model, sequence_length)
    vocab_size = model.config.get_text_config().vocab_size
    count = min(sequence_length, max(CAUSAL_CHECK_TOKENS, CPU_WORK // sum(p.numel() for p in model.parameters())))
    on_cuda = model.device.type == "cuda"
    num_tokens = sequence_length if on_cuda else count
    ids_bt = torch.randint(vocab_size, (1, num_tokens + 1), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.random.fork_rng(devices=[model.device] if on_cuda else []):
        short_bt = ids_bt[:, :CAUSAL_CHECK_TOKENS]
        guarded(spec, lambda: _check_causal(spec, model, short_bt, (short_bt + 1) % vocab_size), "trained")
        if document_end is not None:
            guarded(spec, lambda: _check_separates(spec, model, short_bt, (short_bt + 1) % vocab_size, document_end),
                    "trained")
        loss = guarded(spec, lambda: _loss_after_backward(model, ids_bt), "trained")
    model.zero_grad(set_to_none=True)
    if not math.isfinite(loss):
        what = f"{spec.architecture or spec.pretrained} cannot be trained: its first loss is {loss}"
        raise UserError(what, "check the numbers in model.config")


def _check_separates(
    spec: ModelSpec, model: PreTrainedModel, ids_bt: Tensor, others_bt: Tensor, document_end: int
) -> None:
    """Another first document must not change what is predicted in the second one."""
    half = ids_bt.shape[1] // 2
    ids_bt = ids_bt.clone()
    ids_bt[ids_bt == document_end] = others_bt[ids_bt == document_end]
    ids_bt[:, half - 1] = document_end
    changed_bt = torch.cat([others_bt[:, : half - 1], ids_bt[:, half - 1 :]], dim=1)
    positions_bt = positions_in_documents(ids_bt == document_end)
    model.train(False)
    with torch.no_grad():
        first, second = (
            model(input_ids=ids, position_ids=positions_bt, use_cache=False).logits[:, half:]
            for ids in (ids_bt, changed_bt)
        )
    model.train()
    if float((first - second).abs().max()) > LOOKS_AHEAD * float(first.abs().max()):
        what = f"{spec.architecture or spec.pretrained} cannot keep attention inside a document"
        raise UserError(what, "set data.document_mask to false, or choose another architecture")


def _loss_after_backward(model: PreTrainedModel, ids_bt: Tensor) -> float:
    batch = Batch.of(ids_bt)
    return LanguageLoss(model).backward(batch, batch.tokens).item()


def _check_causal(spec: ModelSpec, model: PreTrainedModel, ids_bt: Tensor, others_bt: Tensor) -> None:
    """Another last token must not change what is predicted before it."""
    changed_bt = torch.cat([ids_bt[:, :-1], others_bt[:, -1:]], dim=1)
    model.train(False)
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (ids_bt, changed_bt))
    model.train()
    if float((first - second).abs().max()) <= LOOKS_AHEAD * float(first.abs().max()):
        return
    hint = "set model.config.is_decoder to true, or choose" if hasattr(model.config, "is_decoder") else "choose"
    what = f"{spec.architecture or spec.pretrained} cannot be trained: what it predicts depends on later tokens"
    raise UserError(what, f"{hint} another architecture")


def _from_config(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, trust_remote_code=False
    )
    model.train()
    return model
