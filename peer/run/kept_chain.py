"""The chain that the folder of a peer, or of a bootstrap, holds of a run."""

from __future__ import annotations

from pathlib import Path

from peer.errors import UserError
from peer.protocol.manifest import MAX_MANIFEST_BYTES, RunManifest, parse_manifest
from peer.protocol.yaml_text import read_limited
from peer.run.resume import CHECKPOINTS
from peer.run.run_file import RUN_FILE
from peer.swarm.state.run_control import CHAIN_NAME


def find_chain(folder: Path, run_id: str | None) -> Path:
    """The file of its certificates.

    Args:
        folder: a peer's output folder, or the state folder of a bootstrap, which may have several runs.
        run_id: of the run, or the beginning of it; None: the only one.

    Raises:
        UserError: the folder holds the rounds of no run, or of several.
    """
    kept = [path for above in ("", "*/") for path in folder.glob(f"{above}history/*/{CHAIN_NAME}")]
    found = [path for path in kept if path.parent.name.startswith((run_id or "")[:16]) and path.stat().st_size]
    if len(found) != 1:
        names = ", ".join(sorted(path.parent.name for path in found))
        raise UserError(f"{folder} holds the rounds of {len(found)} runs" + (f": {names}" if names else ""),
                        "say which with --run-id" if found else "name the output folder of a peer that made rounds, or "
                        "the state folder of a bootstrap")  # fmt: skip
    return found[0]


def manifest_beside(chain: Path) -> RunManifest:
    """That of the run: a bootstrap keeps it with the chain, a peer with its checkpoints.

    Raises:
        UserError: there is none, or it is damaged.
    """
    place = chain.with_name(RUN_FILE)
    if not place.exists():
        place = chain.parents[2] / CHECKPOINTS / chain.parent.name / RUN_FILE
    hint = "name the --output-dir of a peer, the folder of the run at its bootstrap, or the address of the run"
    return parse_manifest(read_limited(place, MAX_MANIFEST_BYTES, "manifest of the run", hint), str(place))
