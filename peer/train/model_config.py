"""Manifest -> the config of a transformers model: checked key by key, and nothing in it can fetch or run code."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from peer.errors import UserError, did_you_mean
from peer.hub import CONFIG_FILES, fetch
from peer.protocol.manifest import ModelSpec

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_REPEATS = 1024  # layers, experts: a manifest comes from the network; a billion would hang even without weights
MAX_SIZE = 2**24  # widths, ids, positions
MAX_REASON_CHARS = 400

_REPEATED = re.compile(r"(^|_)(layers?|blocks|experts|stages|depth|codebooks|loops|cycles|streams|stacks)$")
_READ_BY_CODE = re.compile(r"""(?:config\.|(?:getattr|hasattr)\([\w.]+, ["']|kwargs\.(?:get|pop)\(["'])(\w+)""")
_ROPE_KEYS = frozenset({"rope_scaling", "rope_theta", "partial_rotary_factor"})  # folded into rope_parameters
_FETCHES = "it can fetch code or weights from elsewhere"
_OURS = "Atoll sets it"
_CLASSIFIER = "it is about classifiers"
_REFUSED = {
    **dict.fromkeys(("auto_map", "trust_remote_code", "custom_pipelines"), "code from elsewhere is never run"),
    "attn_implementation": f"the best one of the architecture is taken; {_FETCHES}",
    "experts_implementation": f"the best one of the architecture is taken; {_FETCHES}",
    "use_kernels": _FETCHES, "backbone": _FETCHES, "use_pretrained_backbone": _FETCHES, "use_timm_backbone": _FETCHES,
    "backbone_kwargs": _FETCHES,
    "quantization_config": "quantised weights cannot be trained",
    "compression_config": "packed weights cannot be trained",
    "dtype": "parameters are fp32; a peer computes in bfloat16 with its setting bf16",
    "torch_dtype": "parameters are fp32; a peer computes in bfloat16 with its setting bf16",
    "architectures": "model.architecture names it", "name_or_path": "it says where a file came from",
    "transformers_version": "it says what a file was written by", "tokenizer_class": "the section tokenizer names it",
    "id2label": _CLASSIFIER, "label2id": _CLASSIFIER, "problem_type": _CLASSIFIER, "num_labels": _CLASSIFIER,
    "return_dict": _OURS, "output_attentions": _OURS, "output_hidden_states": _OURS, "is_encoder_decoder": _OURS,
}  # fmt: skip
# Published files of these architectures carry them, and no code reads them.
_UNUSED = frozenset({"max_window_layers", "initial_context_length"})
_OF_THE_WHOLE = {"model_type": "model.architecture names it"}  # parts of a composite model may name theirs


def load_config(spec: ModelSpec, vocab_size: int) -> PretrainedConfig:
    """The checked transformers config of a spec.

    Raises:
        UserError: unknown architecture or config key, a key that is refused, values that make no config, a vocabulary
            smaller than the tokenizer's, a pretrained revision that cannot be loaded.
    """
    config = _new_config(spec, vocab_size) if spec.pretrained is None else _pretrained_config(spec, spec.pretrained)
    text = _text_config(spec, config)
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or size < vocab_size:
        raise UserError(
            f"the model's vocab_size={size} is smaller than the tokenizer's {vocab_size}",
            f"set model.config.vocab_size to at least {vocab_size}, or choose the tokenizer that fits the model",
        )
    guarded(spec, lambda: _settle_token_ids(config, text, size, set(_paths(spec.config))))
    for path, value in _paths(guarded(spec, config.to_dict)).items():
        _check_repeats(path, value)
    # Each part of the model takes the best it has: sdpa, else eager. A name from a file could fetch a kernel.
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def _text_config(spec: ModelSpec, config: PretrainedConfig) -> PretrainedConfig:
    try:
        text: PretrainedConfig = config.get_text_config()
    except ValueError:
        what = f"{spec.architecture or spec.pretrained} cannot be trained: it is made of several language models"
        raise UserError(what, "choose another architecture") from None
    return text


def guarded(spec: ModelSpec, build: Callable[[], T], done: str = "built") -> T:
    """What `build` returns; whatever transformers raises over a config is the user's to mend.

    Args:
        spec: what is built, for messages.
        done: what cannot be done if it fails.

    Raises:
        UserError: with the reason, and the config.
    """
    try:
        return build()
    except UserError:
        raise
    except Exception as error:  # transformers checks little: a bad size surfaces as what the first failing line raises
        log.debug("%s cannot be %s", spec.architecture or spec.pretrained, done, exc_info=True)
        given = ", ".join(f"{key}={value!r}" for key, value in sorted(spec.config.items()))
        raise UserError(
            f"{spec.architecture or spec.pretrained} cannot be {done}: {reason_of(error)}",
            f"check the sizes in model.config: {given}" if given else "give its sizes in model.config",
        ) from None


def reason_of(error: Exception) -> str:
    """The kind and the words of an error in one line of bounded length."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "..."


def _new_config(spec: ModelSpec, vocab_size: int) -> PretrainedConfig:
    architecture = str(spec.architecture)
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"unknown model architecture {architecture!r}",
            did_you_mean(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        )
    for path, value in _paths(spec.config).items():
        _check_repeats(path, value)
    defaults = guarded(spec, lambda: AutoConfig.for_model(architecture))
    _raise_problems(architecture, [*_refusals(spec.config), *_unknown(spec.config, defaults, "")])
    keys = _fitted(spec.config, defaults)  # a copy: transformers writes into the dicts that it is given
    if "vocab_size" in _settable(defaults):
        keys.setdefault("vocab_size", vocab_size)
    elif "text_config" in _settable(defaults):
        keys["text_config"] = {"vocab_size": vocab_size, **keys.get("text_config", {})}
    config: PretrainedConfig = guarded(spec, lambda: AutoConfig.for_model(architecture, **keys))
    return config


def _raise_problems(architecture: str, problems: list[tuple[str, str]]) -> None:
    """All keys that cannot be taken at once: who copies a published file has several."""
    if len(problems) == 1:
        raise UserError(f"model.config of {architecture}: {problems[0][0]}", problems[0][1])
    if problems:
        lines = "\n".join(f"{what}; {remedy}" for what, remedy in problems)
        raise UserError(f"model.config of {architecture}: {len(problems)} keys cannot be taken", lines)


def _refusals(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What no manifest may set, wherever it stands, and why."""
    for path in _paths(config):
        if (reason := _reason_against(path)) is not None:
            yield f"{path!r} cannot be set: {reason}", f"remove {path.rpartition('.')[2]!r}"


def is_refused(path: str) -> bool:
    """Whether no manifest may set this key of a config (`text_config.hidden_size`)."""
    return _reason_against(path) is not None


def _reason_against(path: str) -> str | None:
    key = path.rpartition(".")[2]
    if key.startswith("_"):
        return "it is private to transformers"
    if path == key and key in GenerationConfig._get_default_generation_params():
        return "it is about generating text"
    return _REFUSED.get(key) or (_OF_THE_WHOLE.get(key) if path == key else None)


def _unknown(config: Mapping[str, Any], defaults: PretrainedConfig, prefix: str) -> Iterator[tuple[str, str]]:
    """Keys that the architecture does not know; transformers itself takes any misspelt key without a word."""
    known = _settable(defaults)
    refused = {path for path in config if next(_refusals({path: None}), None)}
    for key, value in config.items():
        default = _default_of(defaults, key)
        if isinstance(default, PretrainedConfig) and isinstance(value, dict):
            yield from _unknown(value, default, f"{prefix}{key}.")
        elif prefix and key in _OF_THE_WHOLE:
            continue
        elif key not in refused | _UNUSED and key not in known_keys(defaults):
            yield f"unknown key {prefix + key!r}", did_you_mean(key, known)


def _check_repeats(path: str, value: Any) -> None:
    """Refuse a number of layers or the like, or any other size, that no model has."""
    limit = MAX_REPEATS if _REPEATED.search(path.rpartition(".")[2]) else MAX_SIZE if type(value) is int else None
    if limit is not None and isinstance(value, int | float) and value > limit:
        raise UserError(f"{path}={value}: must be at most {limit}", "choose a smaller model")
    for item in value if isinstance(value, list | tuple) else ():
        _check_repeats(path, item)


def _paths(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key of nested dicts by its path (`text_config.hidden_size`), with its value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            found.update(_paths(value, f"{prefix}{key}."))
    return found


def _fitted(given: Mapping[str, Any], defaults: PretrainedConfig) -> dict[str, Any]:
    """A copy of the given values, numbers as the types that the defaults have: transformers takes 1e5 for no int."""
    fitted = {}
    for key, value in given.items():
        default = _default_of(defaults, key)
        if isinstance(default, PretrainedConfig) and isinstance(value, dict):
            fitted[key] = _fitted(value, default)
        elif key not in _UNUSED or key in _settable(defaults):
            fitted[key] = _number_like(default, copy.deepcopy(value))
    return fitted


def _default_of(defaults: PretrainedConfig, key: str) -> Any:
    return vars(defaults).get(defaults.attribute_map.get(key, key))  # as an attribute it may refuse to be read


def _number_like(default: Any, value: Any) -> Any:
    """1e5 for a whole number and 1 for a fraction are meant as numbers of the other kind."""
    if type(default) is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return float(value) if type(default) is float and type(value) is int else value


def known_keys(defaults: PretrainedConfig) -> set[str]:
    """The keys that an architecture reads: those of its config, and those that its code alone knows."""
    return _settable(defaults) | _read_by_code(defaults)


def _settable(config: PretrainedConfig) -> set[str]:
    keys = set(config.to_dict()) | set(config.attribute_map)
    return {key for key in keys if not key.startswith("_") and key not in _REFUSED and key not in _OF_THE_WHOLE}


def _read_by_code(config: PretrainedConfig) -> set[str]:
    """What the architecture's own code reads of a config beyond its fields, such as the keys of older files."""
    names = set(_ROPE_KEYS) if hasattr(config, "rope_parameters") else set()
    own = [cls.__module__ for cls in type(config).__mro__ if cls.__module__.startswith("transformers.models.")]
    for module in (*own, *(name.replace("configuration_", "modeling_") for name in own)):
        with contextlib.suppress(ImportError):
            names |= set(_READ_BY_CODE.findall(inspect.getsource(importlib.import_module(module))))
    return {name for name in names if not name.startswith("_") and not callable(getattr(config, name, None))}


def _settle_token_ids(config: PretrainedConfig, text: PretrainedConfig, vocab_size: int, written: set[str]) -> None:
    """Special tokens beyond the vocabulary: told if the manifest wrote them, else left out.

    A default such as pad_token_id=32000 belongs to the published tokenizer; with another vocabulary it names nothing.
    """
    owners = [(config, "")] if text is config else [(config, ""), (text, "text_config.")]
    for owner, prefix in owners:
        for key, value in _token_ids(owner):
            ids = value if isinstance(value, list) else [value]
            if all(0 <= token < vocab_size for token in ids):
                continue
            if prefix + key in written or key in written:
                raise UserError(
                    f"model.config.{prefix}{key}={value}: must be from 0 to {vocab_size - 1}, below the vocab_size",
                    "leave it out, or set it to null" if min(ids) < 0
                    else f"leave it out, set it to null, or set vocab_size to at least {max(ids) + 1}",
                )
            try:
                setattr(owner, key, None)
            except StrictDataclassError:  # this architecture must have one: the last id, which no text of bytes holds
                setattr(owner, key, vocab_size - 1)


def _token_ids(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    for key, value in config.to_dict().items():
        is_ids = isinstance(value, int) or (isinstance(value, list) and value and all(type(v) is int for v in value))
        if key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id") and is_ids:
            yield key, value


def _pretrained_config(spec: ModelSpec, name: str) -> PretrainedConfig:
    if spec.config:
        raise UserError(
            f"model.config {sorted(spec.config)} cannot change the pretrained model {name}",
            "remove 'config', or give an 'architecture' instead of 'pretrained'",
        )
    try:
        folder = fetch(name, spec.revision, CONFIG_FILES)
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise cannot_load(spec, error) from None
    for path, value in _paths(config.to_dict()).items():
        key = path.rpartition(".")[2]
        if value and _REFUSED.get(key) == _FETCHES:
            raise UserError(f"the model {name} sets {path}: {_FETCHES}", "choose another model")
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"the model {name} is quantised: its weights cannot be trained", "name the original model")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"the model {name} ({config.model_type}) is no causal language model", "choose another model")
    return config


def cannot_load(spec: ModelSpec, error: Exception) -> UserError:
    """What to say when a pretrained model cannot be loaded."""
    log.debug("cannot load %s", spec.pretrained, exc_info=True)
    return UserError(
        f"cannot load the model {spec.pretrained} at revision {spec.revision!r}: {reason_of(error)}",
        "check the name and the network; only safetensors weights and no remote code are accepted",
    )
