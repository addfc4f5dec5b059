"""Which checkpoint a peer resumes from, and what of it still holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from peer.checkpoint.inventory import CheckpointError, Count
from peer.checkpoint.store import find_checkpoint, load_tensors, look_up, read_checkpoint
from peer.data.batches import DataState
from peer.errors import UserError
from peer.protocol.manifest import MAX_ROUNDS, Digest, RunManifest, Spec
from peer.protocol.problems import explain_validation
from peer.settings import LATEST, PeerSettings

log = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
OUTER_FILE = "outer.safetensors"
CHAIN_FILE = "chain.jsonl"
FILE_MARGIN_BYTES = 16 * 2**20
FEWEST_VECTORS = 4  # of the model's size in one file: what an inner optimizer keeps, and more
_ANOTHER = "resume from another checkpoint"
_ORIGIN = {"text": "text", "tokenizer": "tokenizer", "batch_sequences": "batch size", "data_seed": "data seed"}


Parts = Annotated[list[Count], Field(min_length=3, max_length=3)]  # see `peer.protocol.ranges.Range`


class ResumedAt(Spec):
    """What `SwarmSync.progress` says, and `VotingSync.progress`."""

    round: Annotated[int, Field(ge=0, le=MAX_ROUNDS)]
    step: Count
    tokens: Count
    steps_since_snapshot: Count
    unsent_tokens: Annotated[list[Count], Field(min_length=1, max_length=1024)]
    pending_data: list[Parts] = Field(default_factory=list, max_length=4096)
    votes: Count = 0
    smoothed_norm: Annotated[float, Field(ge=0.0)] | None = None
    calls: bool = False


class SavedState(Spec):
    """The numbers beside the tensors of a checkpoint."""

    run_id: Digest
    lineage_id: Digest
    round: Annotated[int, Field(ge=0, le=MAX_ROUNDS)]
    progress: ResumedAt
    data: DataState
    origin: Annotated[dict[str, Annotated[str, Field(max_length=64)] | Count], Field(max_length=16)]


@dataclass(frozen=True)
class Resumed:
    """A checkpoint of this run, read and verified."""

    folder: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    def continues(self, origin: Mapping[str, Any]) -> bool:
        """Whether the data continues where it was; says what is another one, so that it begins again.

        Args:
            origin: digest of the text, digest of its tokens, sequences of a batch, seed of the order.
        """
        before = self.state.get("origin", {})
        differ = [name for key, name in _ORIGIN.items() if before.get(key) != origin[key]]
        if "text" in differ and "tokenizer" in differ:
            differ.remove("tokenizer")  # other text has other tokens
        if differ:
            names = " and ".join(differ)
            log.warning("the checkpoint was made with another %s: the order of the data begins again", names)
        return not differ


def checkpoint_folder(output_dir: Path, run_id: str) -> Path:
    """Where a peer keeps the checkpoints of a run: those of another run in the same output folder are not touched."""
    return output_dir / CHECKPOINTS / run_id[:16]


def read_resumed(
    settings: PeerSettings, manifest: RunManifest, numel: int, num_buffers: int, second: Sequence[str] = ()
) -> Resumed | None:
    """The checkpoint that the settings ask for; the log says which, or that there is none.

    Args:
        numel: values of the model's flat vector.
        num_buffers: of the outer optimizer.
        second: names of the vectors that the recipe keeps beside the parameters.

    Raises:
        UserError: it is not valid, or belongs to another run or to another model.
    """
    wanted, run_id = settings.resume_from_checkpoint, manifest.run_id
    own = checkpoint_folder(settings.output_dir, run_id)
    known = look_up(own, run_id)
    if wanted is None:
        if known:
            log.warning(
                "starting fresh beside %d checkpoints of this run, newest %s; --resume-from-checkpoint continues it",
                len(known), known[0].in_words,
            )
        return None
    if wanted == LATEST and not known:
        log.info("no checkpoint of this run in %s yet; starting fresh", own)  # a machine can always start with 'latest'
        return None
    max_bytes = 4 * numel * max(FEWEST_VECTORS, 1 + num_buffers) + FILE_MARGIN_BYTES
    folder = find_checkpoint(own if wanted == LATEST else Path(wanted).expanduser(), run_id, max_bytes)
    resumed = _read(folder, run_id, max_bytes)
    _check_tensors(resumed, numel, num_buffers, second)
    progress = resumed.state["progress"]
    log.info("resuming from %s: step %d, round %d", folder, progress["step"], progress["round"])
    last = max(known if wanted == LATEST else [], key=lambda one: one.written, default=None)
    if last is not None and last.path != folder:
        log.warning("%s was written after it; name it to resume from that one", last.in_words)
    return resumed


def _read(folder: Path, run_id: str, max_bytes: int) -> Resumed:
    tensors, document = read_checkpoint(folder, max_bytes)
    try:
        state = SavedState.model_validate(document, strict=True)
    except ValidationError as error:
        raise CheckpointError(f"the checkpoint {folder} has no valid state", explain_validation(error, SavedState)) \
            from None
    if state.run_id != run_id:
        raise UserError(
            f"the checkpoint {folder} belongs to run {state.run_id[:16]}, not {run_id[:16]}",
            "join without --resume-from-checkpoint, or give the address of the other run",
        )
    outer = folder / OUTER_FILE  # written by the agent, verified by its hash like every file
    if not outer.exists():
        raise UserError(f"the checkpoint {folder} holds no {OUTER_FILE}", _ANOTHER)
    return Resumed(folder, {**tensors, "outer": load_tensors(outer)}, state.model_dump())


def _check_tensors(resumed: Resumed, numel: int, num_buffers: int, second: Sequence[str]) -> None:
    """Refuse tensors of another model, and numbers from which training could not continue."""
    if "optimizer" not in resumed.tensors:
        raise CheckpointError(f"the checkpoint {resumed.folder} holds no optimizer", _ANOTHER)
    vectors = {"inner": ["parameters"], "outer": ["anchor", *(f"buffer{index}" for index in range(num_buffers))]}
    if second:
        vectors["second"] = list(second)
    for stem, names in vectors.items():
        if set(resumed.tensors.get(stem, {})) != set(names):
            raise CheckpointError(f"the checkpoint {resumed.folder}: {stem} must hold {', '.join(names)}", _ANOTHER)
    for stem, named in resumed.tensors.items():
        for name, tensor in named.items():
            what = f"the checkpoint {resumed.folder}: {stem} {name[:64]!r}"
            if stem in vectors and (tensor.dtype, tensor.shape) != (torch.float32, torch.Size([numel])):
                raise CheckpointError(
                    f"{what} is {tensor.dtype} {list(tensor.shape)[:8]}; this model's is {torch.float32} {[numel]}",
                    "resume from a checkpoint of the same model",
                )
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{what} holds values that are no finite numbers", _ANOTHER)
