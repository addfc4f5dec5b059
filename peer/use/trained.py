"""A trained model, wherever it lies: an exported folder, a checkpoint, or the output folder of a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from peer.base_folder import ADAPTER_FILE, CONFIG_FILE, holds_bytes
from peer.checkpoint.inventory import INVENTORY_FILE, CheckpointError
from peer.checkpoint.store import find_checkpoint, load_tensors, look_up, read_state
from peer.data.pretrained_tokenizer import HubTokenizer
from peer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from peer.errors import UserError
from peer.genesis import build_initial_model
from peer.hub import MODEL_FILES, fetch
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest
from peer.run.resume import CHECKPOINTS, OUTER_FILE, SavedState
from peer.run.run_file import kept_manifest
from peer.train.adapter import base_of, check_peft, load_adapter

EXPORT = "export"  # in a peer's output folder


@dataclass(frozen=True, kw_only=True)
class After:
    """Where in its run a model was taken.

    Attributes:
        lineage_id: of the link of that round.
        origin: a folder, or a peer's address.
        address: of the run, if it is known.
    """

    round: int
    lineage_id: str
    origin: str
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, ready to use.

    Attributes:
        model: fp32 on the CPU, in evaluation mode.
        manifest, after: its run, and where in it; None for a folder that only holds a model.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    manifest: RunManifest | None = None
    after: After | None = None


def open_trained(path: Path) -> Trained:
    """The model in a folder; of a peer's output folder that of its newest checkpoint, or its export if it has none.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder", "give an exported model, a checkpoint, or a peer's output folder")
    if _holds_export(path):
        return _exported(path)
    if (path / INVENTORY_FILE).exists():
        return _checkpoint(find_checkpoint(path))
    known = look_up(path / CHECKPOINTS)
    if not known and _holds_export(path / EXPORT):
        return _exported(path / EXPORT)
    if not known:
        raise UserError(
            f"{path} holds no model: neither {CONFIG_FILE} nor a checkpoint nor an export",
            "give an exported model, a checkpoint, or the output folder of a peer that has saved one (--save-steps)",
        )
    newest = max(known, key=lambda one: one.written)  # the run that was trained last, and not the one of most rounds
    return _checkpoint(find_checkpoint(newest.path.parent, newest.place.run_id if newest.place else None))


def _holds_export(path: Path) -> bool:
    return (path / CONFIG_FILE).exists() or (path / ADAPTER_FILE).exists()


def _exported(path: Path) -> Trained:
    if adapter := (path / ADAPTER_FILE).exists():
        check_peft()
    try:
        folder = fetch(*base_of(path), MODEL_FILES) if adapter else path
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, use_safetensors=True
        )
        if adapter:
            load_adapter(model, path)
        model.eval()  # type: ignore[no-untyped-call]
        return Trained(model=model, tokenizer=_tokenizer_of(path))
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} holds no model that can be loaded: {reason}", "export it again") from None


def _tokenizer_of(path: Path) -> Tokenizer:
    """That of an export; of bytes it is the one of training, which has a chat template."""
    if holds_bytes(path):
        return ByteTokenizer()
    return HubTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False), path.name)


def _checkpoint(path: Path) -> Trained:
    try:
        state = SavedState.model_validate(read_state(path))
        outer = load_tensors(path / OUTER_FILE)
        vectors = [outer["anchor"], *(outer[f"buffer{index}"] for index in range(len(outer) - 1))]
    except (ValidationError, KeyError):
        raise CheckpointError(f"the checkpoint {path} has no valid state", "give another checkpoint") from None
    manifest = kept_manifest(path.parent, state.run_id)
    after = After(round=state.round, lineage_id=state.lineage_id, origin=str(path))
    return of_state(RunPlan.of(manifest), vectors, after, path.parent.parent.parent)


def check_architecture(manifest: RunManifest) -> None:
    """Raise UserError where transformers cannot build a run's model."""
    if manifest.model.of_a_script:
        raise UserError(
            f"run {manifest.name} trains the model of a script: its manifest fixes names and shapes, and names no "
            "architecture of transformers that could be built here",
            "let the script write it: with its Swarm open call swarm.take_result(), then "
            "atoll.save_weights(model, FILE); with resume_from_checkpoint=\"latest\" it begins where the peer was",
        )  # fmt: skip


def of_state(plan: RunPlan, vectors: Sequence[Tensor], after: After, home: Path) -> Trained:
    """What a run yields after a round, from its outer state.

    Args:
        vectors: the anchor and the buffers, fp32 [P] each.
        home: the peer's output folder, which has the files of the run's tokenizer.

    Raises:
        UserError: the state is not one of this run's model.
    """
    manifest, recipe = plan.manifest, plan.recipe
    check_architecture(manifest)
    anchor, *buffers = vectors
    tokenizer = load_tokenizer(manifest.tokenizer, home)
    model = build_initial_model(manifest, tokenizer)
    layout = FlatLayout.of(model, recipe.cut)
    wanted = torch.Size([layout.numel])
    if len(buffers) != recipe.optimizer.num_buffers or any(one.shape != wanted for one in vectors):
        raise UserError(
            f"the state has {len(buffers)} buffers and {anchor.numel()} parameters; the model of run "
            f"{manifest.run_id[:16]} has {recipe.optimizer.num_buffers} and {layout.numel}", "give another checkpoint",
        )  # fmt: skip
    layout.copy_from_flat(recipe.optimizer.result(anchor, buffers, after.round), model)
    model.eval()  # type: ignore[no-untyped-call]
    return Trained(model=model, tokenizer=tokenizer, manifest=manifest, after=after)
