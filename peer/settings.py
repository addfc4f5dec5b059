"""Settings: everything about one peer that may differ.

They come from a file, then ATOLL_* variables in the environment, then flags; the last one wins. A setting is spelled
`save_steps` in the file, `ATOLL_SAVE_STEPS` in the environment and `--save-steps` as a flag.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from peer.errors import UserError, did_you_mean
from peer.protocol.address import parse_host_address
from peer.protocol.line_limits import ActiveHours
from peer.protocol.manifest import Digest, Name
from peer.protocol.problems import DEVICE_PATTERN, validation_message
from peer.protocol.yaml_text import parse_yaml, read_limited
from peer.system.output_files import named_path

ENV_PREFIX = "ATOLL_"
MAX_FILE_BYTES = 64 * 1024
MAX_SHOWN_CHARS = 120
LATEST = "latest"
MAX_NICKNAME_CHARS = 64
OWN_CHARS = 5  # of a peer id in its default nickname


def _as_list(value: Any) -> Any:
    """A list from one string: JSON when it starts with '[', else separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("starts with '[' but is not a JSON list") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a whole number, not true or false")
    return value


def _host_address(text: str) -> str:
    try:
        return str(parse_host_address(text))
    except UserError as error:
        raise ValueError(f"{error.what}. {error.hint}") from None


def announced_address(text: str) -> str:
    """The same, checked; raises ValueError."""
    if parse_host_address(_host_address(text)).port == 0:
        raise ValueError("port 0 cannot be dialled: announce the port that others reach")
    return text


def _not_empty(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise ValueError("needs at least one address")
    return values


def default_nickname(hostname: str, peer_id: str) -> str:
    """A legal nickname that tells machines of one name apart: `vm` and `12D3KooW...xYz12` make `vm-xyz12`."""
    host = re.sub(r"[^a-z0-9._-]+", "-", hostname.lower()).strip("-.")
    end = peer_id[-OWN_CHARS:].lower()  # all ids begin alike
    return f"{host[: MAX_NICKNAME_CHARS - OWN_CHARS - 1] or 'peer'}-{end}"


def _hours(text: str) -> str:
    ActiveHours.parse(text)
    return text


Count = Annotated[int, BeforeValidator(_not_bool)]
HostAddress = Annotated[str, AfterValidator(_host_address)]
AnnouncedAddress = Annotated[str, AfterValidator(announced_address)]
Hours = Annotated[str, AfterValidator(_hours)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Trackers = Annotated[tuple[Literal["wandb", "trackio", "tensorboard"], ...], BeforeValidator(_as_list)]
UserPath = Annotated[Path, AfterValidator(named_path)]
HostAddresses = Annotated[tuple[HostAddress, ...], BeforeValidator(_as_list), AfterValidator(_not_empty)]
AnnouncedAddresses = Annotated[tuple[AnnouncedAddress, ...], BeforeValidator(_as_list)]


class PeerSettings(BaseModel):
    """Everything about one peer that may differ from its neighbours. Frozen; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    output_dir: UserPath = Field(Path("runs/peer"), description="folder for checkpoints, logs and the identity key")
    device: str = Field("auto", pattern=DEVICE_PATTERN, description="auto, cpu, cuda, cuda:1, mps")
    devices: str | None = Field(
        None, min_length=1, description="several devices in one peer: all, cuda:0,cuda:1, or cpu:2; unset: device")
    sharding: Literal["ddp", "fsdp"] = Field(
        "ddp", description="of several devices each has the whole model (ddp) or a part of it (fsdp)")
    per_device_train_batch_size: Count | None = Field(
        None, ge=1, le=65536, description="sequences in one forward pass, of which a step makes several; unset: all")
    auto_find_batch_size: bool = Field(False, description="halve per_device_train_batch_size when memory runs out")
    torch_threads: Count | None = Field(None, ge=1, le=1024, description="CPU threads; unset: torch's choice")
    bf16: bool = Field(False, description="compute in bfloat16 where the device can; parameters stay fp32")
    fp16: bool = Field(False, description="compute in float16, for cards without bfloat16; parameters stay fp32")
    tf32: bool = Field(True, description="let CUDA cards multiply fp32 matrices in TF32")
    torch_compile: bool = Field(False, description="compile the model's forward and backward pass (torch.compile)")
    gradient_checkpointing: bool = Field(
        False, description="compute layers again in the backward pass: less memory, a third more work")
    adam_8bit: bool = Field(False, description="keep AdamW's moments in one byte each")
    load_in_4bit: bool = Field(
        False, description="keep the base of an adapter in 4 bits on a CUDA card (pip install '.[bitsandbytes]')")
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto", description="how attention is computed; auto: the best that the architecture has")
    host_maddrs: HostAddresses = Field(("/ip4/0.0.0.0/tcp/0",), description="where to listen; port 0: any free port")
    announce_maddrs: AnnouncedAddresses = Field(
        (), description="addresses at which others reach this peer; empty: auto-detect")
    identity_path: UserPath | None = Field(None, description="private key file; unset: identity.key in output_dir")
    nickname: Name | None = Field(
        None, description="name of this peer in logs and in the table; unset: of the host's name and the peer id")
    train_files: Texts = Field((), description="your files, folders or globs to train on; empty: the run's data")
    data_workers: Count = Field(1, ge=1, le=64, description="processes that read and tokenise text")
    data_cache_gb: float = Field(4.0, ge=0.1, le=10_000.0, description="GB of tokenised text to keep in output_dir")
    private_urls: bool = Field(False, description="let the run's data lie on a server of your own network")
    data_seed: Count | None = Field(None, ge=0, lt=2**31, description="data order; unset: from the identity")
    save_steps: Count = Field(200, ge=0, description="steps between checkpoints; 0: never")
    save_total_limit: Count = Field(3, ge=1, le=1000, description="checkpoints to keep")
    resume_from_checkpoint: str | None = Field(
        None, min_length=1, description="a checkpoint folder, or 'latest' (the flag alone means latest)")
    max_rounds: Count | None = Field(None, ge=1, description="leave after this many committed rounds; unset: stay")
    eval_every_rounds: Count = Field(1, ge=0, description="rounds between validations; 0: never")
    eval_sequences: Count = Field(32, ge=1, le=1_000_000, description="validation sequences used each time")
    eval_tasks: Texts = Field(
        (), description="tasks of lm-eval to score the model on, such as hellaswag (pip install '.[eval]')")
    eval_tasks_every_rounds: Count = Field(100, ge=1, description="rounds between these scores")
    eval_tasks_limit: Count = Field(100, ge=1, le=1_000_000, description="documents of a task used each time")
    eval_tasks_device: str = Field(
        "cpu", pattern=DEVICE_PATTERN, description="where they are computed, in a process of low priority")
    eval_task_folder: UserPath | None = Field(None, description="folder of tasks of your own (YAML)")
    drain_s: float = Field(
        0.0, ge=0.0, le=3600.0, description="seconds after a stop signal in which a round that is near is still made")
    spot_notice: str | None = Field(
        None, pattern=r"^(aws|gcp|azure|/.{1,1000})$",
        description="leave in order when the cloud takes this machine: aws, gcp, azure, or a file that appears then")
    logging_steps: Count = Field(10, ge=1, description="steps between log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    report_to: Trackers = Field(
        (), description="also send metrics to these: wandb, trackio, tensorboard (pip install '.[wandb]')")
    run_name: str | None = Field(
        None, min_length=1, max_length=128, description="name of this peer there; unset: its nickname")
    project: str = Field("atoll", min_length=1, max_length=128, description="project there; peers of a run are a group")
    report: UserPath | None = Field(None, description="JSON file for the final figures")
    json_lines: bool = Field(False, alias="json", description="print log lines as JSON instead of the live table")
    run: Name | None = Field(
        None, description="name of the run to join, where an address has several; unset: the only one there")
    run_id: Digest | None = Field(None, description="join only this run; unset: the only one there")
    invitation: str | None = Field(
        None, max_length=2048, description="token for a run of invited peers, or @FILE that holds it; once is enough")
    nat_port_map: bool = Field(True, description="ask the router to forward the port (UPnP)")
    client_mode: bool | None = Field(
        None, description="run as a client that accepts no inbound connections; unset: auto-detect")
    direct: bool = Field(True, description="use direct TLS connections for large transfers")
    max_upload_mbit: float | None = Field(
        None, ge=1.0, description="Mbit/s that are sent at most, state for newcomers included, "
        "but not the directory's few kB/s; unset: no limit")
    max_download_mbit: float | None = Field(None, ge=1.0, description="Mbit/s that are received at most")
    monthly_traffic_gb: float | None = Field(
        None, ge=1.0, description="GB a calendar month at most, sent and received together; unset: no limit")
    active_hours: Hours | None = Field(
        None, description="train and exchange only at these hours of local time, such as 22-8; unset: always")
    direct_port: Count = Field(0, ge=0, le=65535, description="TCP port for direct connections; 0: any free port")


def known_settings() -> dict[str, FieldInfo]:
    """Every setting by the name that users give it (`json` is the attribute `json_lines`: pydantic owns the other)."""
    return {field.alias or name: field for name, field in PeerSettings.model_fields.items()}


def load_settings(overrides: Mapping[str, Any], config_file: Path | None, environ: Mapping[str, str]) -> PeerSettings:
    """Merge the three sources of settings.

    Args:
        overrides: values of flags by setting name, as `setting_overrides` gives them.
        config_file: a YAML mapping, at most MAX_FILE_BYTES, or None.
        environ: the environment; empty ATOLL_* variables count as unset.

    Raises:
        UserError: unreadable file, unknown names (with the nearest known one) and bad values (with the limit), all
            problems in one message.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, tuple[str, str]] = {}
    problems = []
    known = known_settings()
    for key, value, spelling, place in _given(overrides, config_file, environ):
        if key in known:
            merged[key] = value
            origins[key] = (spelling, place)
        else:
            problems.append(f"unknown setting {spelling}{place}: {did_you_mean(key, known)}")
    try:
        settings = PeerSettings.model_validate(merged)
    except ValidationError as error:
        problems += _explain(error, origins)
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} settings are not valid", "\n".join(problems))
    return settings


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting, and `--config`; `--snake_case` works too. Values are checked by `load_settings`."""
    group = parser.add_argument_group("settings", "each also as a key in --config, or in the environment")
    group.add_argument("--config", type=named_path, metavar="FILE", help="YAML file of settings")
    for name, field in known_settings().items():
        options = _argparse_options(name, field)
        help_text = f"{field.description} (default {_default_text(field)}; {env_name(name)})".replace("%", "%%")
        group.add_argument(flag_name(name), default=None, help=help_text, **options)
        if "_" in name:
            group.add_argument(f"--{name}", default=None, help=argparse.SUPPRESS, **options)


def setting_overrides(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags."""
    given = vars(namespace)
    return {name: given[name] for name in known_settings() if given.get(name) is not None}


def flag_name(setting: str) -> str:
    """`save_steps` -> `--save-steps`."""
    return "--" + setting.replace("_", "-")


def env_name(setting: str) -> str:
    """`save_steps` -> `ATOLL_SAVE_STEPS`."""
    return ENV_PREFIX + setting.upper()


def _given(
    overrides: Mapping[str, Any], config_file: Path | None, environ: Mapping[str, str]
) -> Iterator[tuple[str, Any, str, str]]:
    """Every given (name, value, spelling at its source, where that is), the weakest source first."""
    if config_file is not None:
        for key, value in _read_file(config_file).items():
            yield key, value, key, f" in {config_file}"
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX) and value:
            yield name.removeprefix(ENV_PREFIX).lower(), value, name, ""
    for key, value in overrides.items():
        yield key, value, flag_name(key), ""


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = parse_yaml(read_limited(path, MAX_FILE_BYTES, "settings file", "check the path given to --config"))
    except ValueError as error:
        raise UserError(f"settings file {path} is not valid YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(f"settings file {path} must be a mapping of names to values, not {type(document).__name__}")
    return document


def _explain(error: ValidationError, origins: Mapping[str, tuple[str, str]]) -> list[str]:
    """One line for each bad value, named as its source spells it."""
    lines = []
    for problem in error.errors(include_url=False):
        spelling, place = origins[str(problem["loc"][0])]
        line = f"{spelling}={_shown(problem['input'])}{place}: {validation_message(problem)}"
        if line not in lines:
            lines.append(line)
    return lines


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:      # Python does not write integers of more than 4300 digits
        return "<too long>"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _argparse_options(name: str, field: FieldInfo) -> dict[str, Any]:
    if field.annotation in (bool, bool | None):
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(field.annotation) is tuple:
        return {"nargs": "+", "metavar": "VALUE"}
    if name == "resume_from_checkpoint":
        return {"nargs": "?", "const": LATEST, "metavar": "PATH"}
    return {"metavar": "VALUE"}


def _default_text(field: FieldInfo) -> str:
    if field.default in (None, ()):
        return "unset"
    if isinstance(field.default, tuple):
        return " ".join(field.default)
    return str(field.default)
