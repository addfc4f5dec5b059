"""Which checkpoint a peer resumes from, and what of it still holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from peer.checkpoint.store import Found, find_checkpoint, look_up, read_checkpoint
from peer.errors import UserError
from peer.protocol import hashing
from peer.protocol.manifest import RunManifest
from peer.settings import LATEST, PeerSettings

log = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
OUTER_FILE = "outer.safetensors"
_ORIGIN = {"text": "text", "tokenizer": "tokenizer", "batch_sequences": "batch size", "data_seed": "data seed"}


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


def text_digest(texts: Iterable[str]) -> str:
    """BLAKE3 of all documents in their order, 64 hex digits."""
    hasher = hashing.Hasher()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.digest().hex()


def read_resumed(settings: PeerSettings, manifest: RunManifest) -> Resumed | None:
    """The checkpoint that the settings ask for; the log says which, or that there is none.

    Raises:
        UserError: it is not valid, or belongs to another run.
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
    folder = find_checkpoint(own if wanted == LATEST else Path(wanted).expanduser(), run_id)
    return _read(folder, run_id, known if wanted == LATEST else [])


def _read(folder: Path, run_id: str, others: list[Found]) -> Resumed:
    tensors, state = read_checkpoint(folder)
    if state.get("run_id") != run_id:
        raise UserError(
            f"the checkpoint {folder} belongs to run {str(state.get('run_id'))[:16]}, not {run_id[:16]}",
            "join without --resume-from-checkpoint, or give the address of the other run",
        )
    outer = folder / OUTER_FILE  # written by the agent, verified by its hash like every file
    if not outer.exists():
        raise UserError(f"the checkpoint {folder} holds no {OUTER_FILE}", "resume from another checkpoint")
    progress = state["progress"]
    log.info("resuming from %s: step %d, round %d", folder, progress["step"], progress["round"])
    last = max(others, key=lambda one: one.written, default=None)
    if last is not None and last.path != folder:
        log.warning("%s was written after it; name it to resume from that one", last.in_words)
    return Resumed(folder, {**tensors, "outer": load_file(outer)}, state)
