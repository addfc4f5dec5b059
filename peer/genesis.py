"""Genesis: the initial outer state of a run, built from the manifest's seed and model; its digest is lineage id 0.

`python -m peer.genesis MANIFEST --out FILE` is run by the bootstrap as a child, so that the long-lived process
never imports transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from peer.base_folder import folder_of, read_organisers
from peer.data.shareable import shared_data
from peer.data.tokenizer import Tokenizer, load_tokenizer, published_spec
from peer.errors import UserError
from peer.free_weights import layout_of_file, read_weights
from peer.hub import pin
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import FlatLayout, count_blocks
from peer.outer.state.outer_state import OuterState
from peer.protocol.data_spec import SharedData
from peer.protocol.manifest import RunManifest
from peer.protocol.pinning import on_hub
from peer.system.death_signal import die_with_parent
from peer.train.adapter import base_digest
from peer.train.memory import check_memory
from peer.train.model import build_model, check_trains, end_texts_with, measure_model
from peer.train.written_config import as_architecture


def build_initial_model(manifest: RunManifest, tokenizer: Tokenizer) -> PreTrainedModel:
    """The model of a run at round 0, fp32 on the CPU."""
    model = build_model(manifest.model, tokenizer.vocab_size, manifest.seed)
    if manifest.model.architecture is not None:
        end_texts_with(model, tokenizer.eos_id, manifest.model.config)
    return model


def _state_of_file(plan: RunPlan, path: Path) -> tuple[OuterState, FlatLayout]:
    if plan.recipe.num_fragments > 1:
        raise UserError(
            f"recipe {plan.manifest.recipe.name} synchronises fragments of transformer blocks; a script's model has no "
            "blocks that are known", "choose a recipe that synchronises the whole model, such as diloco",
        )  # fmt: skip
    layout = layout_of_file(path)
    return _state_of(plan, layout, read_weights(path)), layout


def _genesis_state(plan: RunPlan, model: PreTrainedModel) -> tuple[OuterState, FlatLayout]:
    """The outer state at round 0, and its layout: the model's parameters as the anchor, zero buffers."""
    plan = replace(plan, recipe=plan.recipe.fitted(count_blocks(FlatLayout.of(model).names)))
    layout = FlatLayout.of(model, plan.recipe.cut)
    anchor = torch.empty(layout.numel)
    layout.copy_to_flat(model, anchor)
    return _state_of(plan, layout, anchor), layout


def _state_of(plan: RunPlan, layout: FlatLayout, anchor: torch.Tensor) -> OuterState:
    optimizer = plan.recipe.optimizer
    buffers = [torch.full((layout.numel,), value) for value in optimizer.initial_values]
    return OuterState(anchor, buffers, optimizer, plan.fragments(layout.shapes, layout.sizes))


def built_genesis(plan: RunPlan, tokenizer: Tokenizer) -> tuple[OuterState, str | None, FlatLayout]:
    """The state of round 0, the digest of the base that an adapter stands on, and the layout of the parameters, after
    checks that every joining peer would fail as well.

    Raises:
        UserError: the model cannot be built, does not fit this machine's memory, or could not be trained.
    """
    manifest = plan.manifest
    if manifest.model.weights is not None:
        state, layout = _state_of_file(plan, Path(manifest.model.weights))
        return state, None, layout
    size, num_buffers = measure_model(manifest.model, tokenizer.vocab_size), plan.recipe.optimizer.num_buffers
    # The model, the anchor and the buffers, fp32 each.
    check_memory(size.parameters, 4 * (size.parameters + (1 + num_buffers) * size.trained), torch.device("cpu"))
    model = build_initial_model(manifest, tokenizer)
    check_trains(
        manifest.model, model, manifest.data.sequence_length,
        tokenizer.eos_id if manifest.data.document_mask else None,
    )  # fmt: skip
    base = base_digest(model) if manifest.model.adapter is not None else None
    state, layout = _genesis_state(plan, model)
    return state, base, layout


def main() -> None:
    """Build, write the state as raw fp32 (anchor, then buffers), print its figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m peer.genesis", description="build the initial state of a run")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", type=Path, dest="base", help="folder of the model that the run continues")
    parser.add_argument("--parent", type=int, help="process id to die with")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    torch.set_num_threads(1)
    try:
        manifest = pin(read_organisers(arguments.manifest, arguments.base))
        tokenizer = load_tokenizer(manifest.tokenizer)
        own = folder_of(manifest.model)
        written = as_architecture(manifest.model, tokenizer.vocab_size) if own is not None else None
        plan = RunPlan.of(manifest)
        state, base, layout = built_genesis(plan, tokenizer)
        shared = _shared_data(plan, tokenizer)
        _write_state(arguments.out, state)
    except UserError as error:
        print(json.dumps({"what": error.what, "hint": error.hint}))
        sys.exit(2)
    digests = [digest.hex() for digest in state.chunk_digests()]
    commits = {section: revision for section, _, revision in on_hub(manifest)}
    figures = {
        "digest": state.digest(), "num_buffers": len(state.buffers), "chunks": digests,
        "fragments": state.fragments.sizes, "shapes": layout.shapes, "hidden": layout.hidden,
        "commits": commits, "base": base,
        "model": None if written is None else written.model_dump(mode="json"),
        "tokenizer": published_spec(manifest.tokenizer, tokenizer).model_dump(mode="json"),
        "shared": None if shared is None else shared.model_dump(mode="json"),
    }  # fmt: skip
    print(json.dumps(figures))


def _shared_data(plan: RunPlan, tokenizer: Tokenizer) -> SharedData | None:
    """The text that peers lease from each other, unless the organiser's file says it; none without a chain that shows
    what is done, or of a script that reads its own.
    """
    manifest, data = plan.manifest, plan.manifest.data
    if data.assignment != "leases" or data.shared is not None or plan.recipe.gossips or manifest.model.of_a_script:
        return None
    return shared_data(manifest, tokenizer, plan.nominal_tokens)


def _write_state(path: Path, state: OuterState) -> None:
    try:
        with path.open("wb") as file:
            for tensor in (state.anchor, *state.buffers):
                file.write(tensor.numpy().data)
    except OSError as error:
        raise UserError(f"cannot write the initial state {path}: {error.strerror}", "check the disk") from None


if __name__ == "__main__":
    main()
