"""The state of a run as an exported model on the hub: what a bootstrap with an archive runs beside itself."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from peer.errors import UserError
from peer.outer.recipe.plan import RunPlan
from peer.run.run_file import kept_manifest
from peer.swarm.state.run_control import history_folder
from peer.system.death_signal import die_with_parent
from peer.use.export import export, upload
from peer.use.trained import After, of_state

NICENESS = 10


def main() -> None:
    """Export what `--state` holds (fp32: the anchor, then the buffers), upload it, print its address."""
    parser = argparse.ArgumentParser(prog="python -m peer.use.upload_state", description="export a state, upload it")
    add = parser.add_argument
    add("--state", type=Path, required=True)
    add("--vectors", type=int, required=True, help="of the model's size, in that file")
    add("--run-id", required=True)
    add("--round", type=int, required=True)
    add("--lineage-id", required=True)
    add("--home", type=Path, required=True, help="folder of the run at its bootstrap")
    add("--name", required=True, help="of the repository")
    add("--address", required=True, help="of the bootstrap")
    add("--parent", type=int, required=True, help="process id to die with")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    os.nice(NICENESS)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        print(_upload(arguments))
    except UserError as error:
        print(error.what, file=sys.stderr)
        sys.exit(2)


def _upload(arguments: argparse.Namespace) -> str:
    manifest = kept_manifest(history_folder(arguments.home, arguments.run_id), arguments.run_id)
    elements = arguments.state.stat().st_size // 4
    state = torch.from_file(str(arguments.state), size=elements, dtype=torch.float32)
    after = After(
        round=arguments.round, lineage_id=arguments.lineage_id, origin="the archive of the bootstrap",
        address=arguments.address,
    )  # fmt: skip
    trained = of_state(RunPlan.of(manifest), state.view(arguments.vectors, -1).unbind(), after, arguments.home)
    with tempfile.TemporaryDirectory(prefix="atoll-upload-") as folder:
        return upload(export(trained, Path(folder) / "model", "fp32"), arguments.name)


if __name__ == "__main__":
    main()
