"""Genesis: the initial outer state of a run, built from the manifest's seed and model; its digest is lineage id 0.

`python -m peer.genesis MANIFEST --out FILE` is run by the bootstrap as a child, so that the long-lived process
never imports transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError
from peer.lifetime import die_with_parent
from peer.outer.compress.registry import compressor
from peer.outer.fragments import FlatLayout
from peer.outer.recipes import resolve
from peer.outer.state import OuterState
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.train.model import build_model


def build_initial_model(manifest: RunManifest) -> PreTrainedModel:
    """The model of a run at round 0, fp32 on the CPU."""
    vocab_size = load_tokenizer(manifest.tokenizer).vocab_size
    return build_model(manifest.model, vocab_size, manifest.seed)


def genesis_state(manifest: RunManifest, model: PreTrainedModel) -> OuterState:
    """The outer state at round 0: the model's parameters as the anchor, zero buffers."""
    layout = FlatLayout.of(model)
    recipe = resolve(manifest.recipe)
    anchor = torch.empty(layout.numel)
    layout.copy_to_flat(model, anchor)
    buffers = [torch.zeros(layout.numel) for _ in range(recipe.outer.num_buffers)]
    return OuterState(anchor, buffers, recipe.outer, compressor(recipe.compressor))


def main() -> None:
    """Build, write the state as raw fp32 (anchor, then buffers), print its figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m peer.genesis", description="build the initial state of a run")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parent", type=int, help="process id to die with")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    torch.set_num_threads(1)
    try:
        manifest = parse_manifest(arguments.manifest.read_text(), str(arguments.manifest))
        state = genesis_state(manifest, build_initial_model(manifest))
    except UserError as error:
        print(json.dumps({"what": error.what, "hint": error.hint}))
        sys.exit(2)
    with arguments.out.open("wb") as file:
        for tensor in (state.anchor, *state.buffers):
            file.write(tensor.numpy().data)
    digests = [digest.hex() for digest in state.chunk_digests()]
    figures = {"digest": state.digest(), "numel": state.numel, "num_buffers": len(state.buffers), "chunks": digests}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
