"""The run manifest: everything that must be equal on all peers of a run.

The organiser writes YAML, `atoll-bootstrap` fills in the genesis digest, signs the canonical JSON and publishes it.
Its SHA-256 is the run id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from peer.errors import UserError
from peer.protocol.adapter_spec import AdapterSpec as AdapterSpec
from peer.protocol.data_spec import URL_PATTERN as URL_PATTERN
from peer.protocol.data_spec import DataSpec as DataSpec
from peer.protocol.data_spec import FileSpec as FileSpec
from peer.protocol.data_spec import SourceSpec as SourceSpec
from peer.protocol.identity import MAX_PEER_ID_CHARS
from peer.protocol.plain_json import Key, PlainJson
from peer.protocol.problems import explain_validation, show_value
from peer.protocol.spec import ALONE as ALONE
from peer.protocol.spec import COMMIT_PATTERN as COMMIT_PATTERN
from peer.protocol.spec import HUB_PATTERN, Revision, own_folder
from peer.protocol.spec import ORGANISER as ORGANISER
from peer.protocol.spec import Digest as Digest
from peer.protocol.spec import Name as Name
from peer.protocol.spec import Spec as Spec
from peer.protocol.tokenizer_spec import TokenizerSpec as TokenizerSpec
from peer.protocol.yaml_text import parse_yaml, read_limited

PROTOCOL_VERSION = 11
MAX_MANIFEST_BYTES = 16 * 1024
MAX_ROUNDS = 10_000_000  # of a run
WORK_BITS, MAX_WORK_BITS = 21, 32  # about a second of one core; more than an hour

Expression = Annotated[str, Field(pattern=r"^[a-z0-9_./+@-]{1,64}$")]
PartNumber = bool | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | None
PartValue = PartNumber | Name | Annotated[tuple[float, ...], Field(max_length=8)]
Part = Name | Annotated[dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], PartValue], Field(max_length=16)]
PeerIdText = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9-]{{0,{MAX_PEER_ID_CHARS - 1}}}$")]


def _hub_name_or_folder(name: str, info: ValidationInfo) -> str:
    if re.fullmatch(HUB_PATTERN, name):
        return name
    if info.context not in (ALONE, ORGANISER):
        raise ValueError("must be a name on the hub, such as owner/model; other peers cannot read a folder of this "
                         "machine (atoll-bootstrap, atoll simulate and atoll compare can)")
    return own_folder(name)


HubNameOrFolder = Annotated[str, AfterValidator(_hub_name_or_folder)]


def _own_file(name: str, info: ValidationInfo) -> str:
    if info.context not in (ALONE, ORGANISER):
        raise ValueError("names a file of the organiser's machine, which other peers cannot read")
    return own_folder(name)


class ModelSpec(Spec):
    """A transformers architecture with its config, a pretrained revision on the hub, or a model that scripts build.

    `pretrained` may be a folder of the organiser's: other machines receive its architecture and config, and its weights
    through the swarm.

    Of a script's model (`atoll.Swarm`) the organiser names `weights`, a safetensors file with the initial values of its
    trainable parameters; other machines receive their `layout`, a digest of names and shapes.

    With `adapter` the pretrained model stays as it is, and the adapter alone is trained and sent. `base` is then the
    digest of its values, written by `atoll-bootstrap`: a peer that loads others does not train.
    """

    architecture: Name | None = None
    config: dict[Key, PlainJson] = Field(default_factory=dict, max_length=256)
    pretrained: HubNameOrFolder | None = None
    revision: Revision = "main"
    adapter: AdapterSpec | None = None
    base: Digest | None = None
    weights: Annotated[str, AfterValidator(_own_file)] | None = None
    layout: Digest | None = None

    @property
    def of_a_script(self) -> bool:
        """Only a script can build it."""
        return self.weights is not None or self.layout is not None

    @model_validator(mode="after")
    def _exactly_one_origin(self) -> ModelSpec:
        origins = [self.architecture is not None, self.pretrained is not None, self.of_a_script]
        if origins.count(True) != 1 or (self.weights is not None and self.layout is not None):
            raise ValueError("give exactly one of 'architecture' (with 'config'), 'pretrained' and 'weights'")
        if (self.adapter is not None or self.base is not None) and self.pretrained is None:
            raise ValueError("'adapter' goes with 'pretrained', the model that it stands on")
        return self


class InnerSpec(Spec):
    """The inner optimizer, its learning-rate schedule over the swarm's progress, and the size of a step.

    Without `optimizer` it is the recipe's own. `batch_sequences` are those of one step of one peer, however it cuts
    them. `decay_fraction`: the part of the run after the warm-up in which the schedule `wsd` (warm-up, stable, decay)
    decays. `router_loss`: the weight of the auxiliary loss of a mixture of experts; unset: the model's own.
    """

    optimizer: Literal["adamw", "muon", "sgd"] | None = None
    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    muon_learning_rate_ratio: float = Field(default=1.0, gt=0.0, le=1000.0)
    learning_rate: float = Field(default=1e-3, gt=0.0, le=1.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1e-2)
    weight_decay: float = Field(default=0.1, ge=0.0, le=1.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=50, ge=0)
    min_learning_rate_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    batch_sequences: int = Field(default=8, ge=1, le=65536)
    router_loss: float | None = Field(default=None, ge=0.0, le=100.0)

    @model_validator(mode="after")
    def _betas_in_range(self) -> InnerSpec:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be in [0, 1)")
        return self


class RecipeSpec(Spec):
    """A recipe by name, and the parts of it that this run sets differently from the published ones.

    A part is one word (a kind of part, or another recipe whose part to borrow) or a mapping of that part's own
    numbers, with `name` where the kind changes too. `peer.outer.recipe.resolve` knows the words and checks the numbers.
    """

    name: Name = "lagoon"
    steps_per_round: int | None = Field(default=None, ge=1, le=100_000)
    outer_learning_rate: float | None = Field(default=None, gt=0.0, le=10.0)
    outer_momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    compressor: Expression | None = None
    feedback: Part | None = None
    payload: Literal["delta", "gradient", "parameters"] | None = None
    exchange: Literal["reduce", "gather"] | None = None
    schedule: Part | None = None
    local: Part | None = None
    moments: Part | None = None
    merge: Part | None = None
    topology: Part | None = None
    aggregator: Part | None = None
    outer: Part | None = None
    outer_schedule: Part | None = None
    straggler: Part | None = None
    allocator: Part | None = None
    average: float | None = Field(default=None, ge=0.0, lt=1.0)
    interpolation: float | None = Field(default=None, ge=0.0, lt=1.0)


class RoundSpec(Spec):
    """When the run ends and how long a group waits; times are caps, deadlines derive from measurement.

    It ends after `total` rounds or with the round in which the swarm's committed tokens reach `tokens_total`, whichever
    comes first; without either it does not end.
    """

    total: int | None = Field(default=None, ge=1, le=MAX_ROUNDS)
    tokens_total: int | None = Field(default=None, ge=1, le=2**53)
    min_group: int = Field(default=2, ge=2, le=64)
    max_group: int = Field(default=16, ge=2, le=64)
    straggler_wait_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    timeout_s: float = Field(default=120.0, gt=0.0, le=3600.0)

    @model_validator(mode="after")
    def _group_bounds(self) -> RoundSpec:
        if self.min_group > self.max_group:
            raise ValueError(f"min_group={self.min_group} is above max_group={self.max_group}")
        return self


class TrustSpec(Spec):
    """Whom the run trusts. `open`: strangers may join, so that a recipe of plain means gets gates and clipping, no
    member weighs more than `largest_weight` times the median, newcomers hold little together, and an identity costs
    2^`identity_work` hashes. `private`: the peers know each other, and the recipe is used unchanged. With `invited` a
    peer needs an invitation of the organiser's, in either mode, and no identity costs work unless `identity_work` is
    set.
    """

    mode: Literal["open", "private"] = "open"
    largest_weight: int = Field(default=3, ge=1, le=1000)
    probation_rounds: int = Field(default=10, ge=0, le=100_000)
    newcomers_share: float = Field(default=0.2, ge=0.01, le=0.99)
    checkpoint_keys: Annotated[tuple[PeerIdText, ...], Field(max_length=8)] = ()
    identity_work: int | None = Field(default=None, ge=0, le=MAX_WORK_BITS)
    invited: bool = False

    @property
    def work_bits(self) -> int:
        """Zero bits of the puzzle that an identity must solve to take part."""
        if self.identity_work is not None:
            return self.identity_work
        return WORK_BITS if self.mode == "open" and not self.invited else 0


class RunManifest(Spec):
    """One run. `genesis` is the digest of the initial outer state: lineage id 0."""

    protocol: int = PROTOCOL_VERSION
    name: Name
    seed: int = Field(default=0, ge=0, lt=2**31)
    model: ModelSpec
    tokenizer: TokenizerSpec = TokenizerSpec()
    data: DataSpec = DataSpec()
    inner: InnerSpec = InnerSpec()
    recipe: RecipeSpec = RecipeSpec()
    rounds: RoundSpec = RoundSpec()
    trust: TrustSpec = TrustSpec()
    genesis: Digest | None = None

    def canonical(self) -> bytes:
        """The one byte string that is hashed and signed: sorted keys, no spaces, UTF-8."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def tokens_per_step(self) -> int:
        """Of one step of one peer."""
        return self.inner.batch_sequences * self.data.sequence_length

    @property
    def run_id(self) -> str:
        """SHA-256 of the canonical form, as 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()


def read_manifest(path: str | Path, context: Mapping[str, bool] | None = None) -> RunManifest:
    """The manifest in a file.

    Args:
        context: ALONE if no other machine reads it, so that it may name folders of this one; ORGANISER for the
            organiser's file, which may name folders of the model and the tokenizer.

    Raises:
        UserError: the file cannot be read, or what `parse_manifest` refuses.
    """
    hint = "give the path of a YAML file such as configs/runs/quickstart.yaml"
    return parse_manifest(read_limited(path, MAX_MANIFEST_BYTES, "manifest", hint), str(path), context)


def parse_manifest(text: str | bytes, origin: str, context: Mapping[str, bool] | None = None) -> RunManifest:
    """YAML or JSON text -> RunManifest.

    Args:
        text: the document, at most MAX_MANIFEST_BYTES.
        origin: a file name or peer, for messages.
        context: see `read_manifest`.

    Raises:
        UserError: too large, not YAML, an incompatible protocol version, an unknown key (names the nearest
            known one), or a value out of its range.
    """
    num_bytes = len(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    if num_bytes > MAX_MANIFEST_BYTES:
        raise UserError(f"manifest {origin} is {num_bytes} bytes; the limit is {MAX_MANIFEST_BYTES}")
    try:
        document = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"manifest {origin} cannot be read: {error}") from None
    if document is None:
        raise UserError(f"manifest {origin} is empty", "copy configs/runs/quickstart.yaml to begin with")
    if not isinstance(document, dict):
        raise UserError(f"manifest {origin} must be a mapping of keys to values, not {type(document).__name__}")
    check_protocol(document.get("protocol", PROTOCOL_VERSION), origin)
    try:
        manifest = RunManifest.model_validate(_waiting_once(document), context=context)
    except ValidationError as error:
        raise UserError(f"manifest {origin} is not valid", explain_validation(error, RunManifest)) from None
    num_bytes = len(manifest.canonical())
    if num_bytes > MAX_MANIFEST_BYTES:
        what = f"manifest {origin} is {num_bytes} bytes with its defaults; the limit is {MAX_MANIFEST_BYTES}"
        raise UserError(what, "shorten model.config")
    return manifest


def _waiting_once(document: dict[str, Any]) -> dict[str, Any]:
    """How long a round waits is one number: a recipe's `deadline_s` is the default of `rounds.straggler_wait_s`."""
    deadline_s: Any = document
    for key in ("recipe", "straggler", "deadline_s"):
        deadline_s = deadline_s.get(key) if isinstance(deadline_s, dict) else None
    rounds = document.get("rounds", {})
    if deadline_s is None or not isinstance(rounds, dict) or "straggler_wait_s" in rounds:
        return document
    return {**document, "rounds": {**rounds, "straggler_wait_s": deadline_s}}


def check_protocol(version: Any, origin: str) -> None:
    """Raise UserError when a manifest speaks another protocol version than this program."""
    if version == PROTOCOL_VERSION and not isinstance(version, bool):
        return
    remedy = "upgrade atoll on this machine" if isinstance(version, int) and version > PROTOCOL_VERSION else (
        "ask the organiser to restart the run with a current atoll, or install the version it was made for"
    )
    what = f"{origin} uses protocol version {show_value(version)}; this atoll speaks {PROTOCOL_VERSION}"
    raise UserError(what, remedy)
