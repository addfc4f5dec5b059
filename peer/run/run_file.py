"""The manifest of a run, kept beside its checkpoints: with it a checkpoint is a model, without any network."""

from __future__ import annotations

from pathlib import Path

from peer.errors import UserError
from peer.protocol.manifest import MAX_MANIFEST_BYTES, RunManifest, parse_manifest
from peer.protocol.yaml_text import read_limited
from peer.system.output_files import replace_file

RUN_FILE = "run.json"


def keep_manifest(folder: Path, manifest: RunManifest) -> None:
    """Write it into the folder of the run's checkpoints.

    Raises:
        OSError: the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / RUN_FILE, manifest.canonical())


JOIN_AGAIN = "join the run once more with this output folder, or export from the address of a peer"


def kept_manifest(folder: Path, run_id: str, hint: str = JOIN_AGAIN) -> RunManifest:
    """The manifest of the run whose checkpoints, or history, lie in a folder.

    Raises:
        UserError: there is none, or it is that of another run.
    """
    path = folder / RUN_FILE
    manifest = parse_manifest(read_limited(path, MAX_MANIFEST_BYTES, "manifest of the run", hint), str(path))
    if manifest.run_id != run_id:
        raise UserError(f"{path} is the manifest of run {manifest.run_id[:16]}, not of {run_id[:16]}", hint)
    return manifest
