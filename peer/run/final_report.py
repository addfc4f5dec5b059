"""What a peer leaves behind at its end: the exported model, and the report."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from peer.checkpoint.export import export_model
from peer.errors import UserError
from peer.genesis import build_initial_model
from peer.link.messages import Stopped
from peer.outer.state.flat_layout import FlatLayout
from peer.run.assemble import Peer
from peer.run.card import names_run, write_card
from peer.run.checkpointing import BYTES_PER_S
from peer.run.hooks import PeerHooks
from peer.system.output_files import replace_file
from peer.telemetry.metrics import finite_json
from peer.train.adapter import what_to_save
from peer.train.sharding import is_sharded

log = logging.getLogger(__name__)
EXPORT_S = 30.0  # at most, of a peer that is asked to stop


def export(peer: Peer, hooks: PeerHooks) -> Path | None:
    """What the run yields, which the model holds, as a Hugging Face model under `export`; in place of an earlier one of
    this run, and beside what else has that name.
    """
    path = base = peer.settings.output_dir / "export"
    number = 1
    while path.exists() and not names_run(path, peer.manifest.run_id):
        number += 1
        path = base.with_name(f"export-{number}")
    try:
        saved = what_to_save(_whole_model(peer))
        return export_model(saved, peer.text.tokenizer, path, partial(_write_card, peer, hooks), replace=True)
    except (UserError, OSError) as error:
        log.error("the model was not exported: %s", error)
        return None


def _whole_model(peer: Peer) -> PreTrainedModel:
    """What the run yields, in one process."""
    if not is_sharded(peer.model):
        return peer.model
    model = build_initial_model(peer.manifest, peer.text.tokenizer)
    FlatLayout.of(model, peer.recipe.cut).copy_from_flat(peer.sync.result, model)
    return model


def export_at_once(peer: Peer, hooks: PeerHooks) -> Path | None:
    """The same for a peer that is asked to stop: not where it takes long, nor after a second Ctrl-C."""
    seconds = 4 * peer.mapped.numel / BYTES_PER_S
    if seconds > EXPORT_S:
        log.info("exporting %.1f GB would delay the exit, so it waits; `atoll export %s` reads the last checkpoint",
                 4e-9 * peer.mapped.numel, peer.settings.output_dir)  # fmt: skip
        return None
    if seconds > 1.0:
        log.info("exporting the model; Ctrl-C again skips it")
    try:
        peer.replica.write(peer.sync.result)
        return export(peer, hooks)
    except KeyboardInterrupt:
        log.warning("the model was not exported: interrupted")
        return None


def _write_card(peer: Peer, hooks: PeerHooks, folder: Path) -> None:
    sync, losses = peer.sync, [loss for _, loss in hooks.validation]
    members = {name for record in hooks.records if record.status == "committed" for name in record.members}
    address = "" if sync.finished else sync.agent.address
    write_card(folder, peer.manifest, {
        "round": f"{sync.round:,}", "lineage": f"`{sync.memory.head.lineage_id}`" if sync.memory.head else None,
        "tokens": f"{sync.swarm_tokens:,} in committed rounds", "peers": f"{len(members)} in the rounds of this one",
        "validation loss": f"{losses[0]:.4f}, then {losses[-1]:.4f}" if losses else None,
    }, adapter=peer.manifest.model.adapter is not None, address=address)  # fmt: skip


def report_of(
    peer: Peer, hooks: PeerHooks, stopped: Stopped | None, joined_at: int, export_path: Path | None, sample: str
) -> dict[str, Any]:
    """The figures of one life of a peer.

    Args:
        joined_at: round of its first anchor.
        sample: a text of the model.
    """
    sync, records = peer.sync, hooks.records
    losses = [loss for _, loss in hooks.validation]
    aborted = [record for record in records if record.status == "aborted" and not record.alone]
    head = sync.memory.head
    return {
        "id": peer.published.peer_id,
        "nickname": peer.published.nickname,
        "run_id": peer.manifest.run_id,
        "round": sync.round,
        "lineage_id": head.lineage_id if head else None,
        "state_digest": stopped.state_digest if stopped else (head.state_digest if head else None),
        "tokens": sync.tokens,
        "steps": sync.step,
        "joined_at_round": joined_at,
        "rounds_committed": sum(record.status == "committed" for record in records),
        "rounds_alone": sum(record.status == "committed" and len(record.members) == 1 for record in records),
        "rounds_aborted": len(aborted),
        "bytes_sent": stopped.round_bytes_sent if stopped else sum(record.bytes_sent for record in records),
        "bytes_received": stopped.round_bytes_received if stopped else sum(record.bytes_received for record in records),
        "state_bytes_sent": stopped.state_bytes_sent if stopped else None,
        "state_bytes_received": stopped.state_bytes_received if stopped else None,
        "seconds_waiting": sync.seconds_waiting,
        "seconds_training": hooks.seconds_training,
        "skipped_steps": peer.trainer.skipped_steps,
        "loss_spikes": peer.trainer.spikes.count,
        "numel": peer.mapped.numel,
        "val_loss_first": losses[0] if losses else None,
        "val_loss_last": losses[-1] if losses else None,
        "sample": sample,
        "export_path": str(export_path) if export_path else None,
        "agent_starts": peer.agent.starts,
        "aborts": [
            {"round": record.round, "phase": record.phase, "reason": record.reason, "culprit": record.culprit}
            for record in aborted
        ],
    }


def write_report(path: Path, document: dict[str, Any]) -> bool:
    """Whether it is written."""
    try:
        replace_file(path, (json.dumps(finite_json(document), indent=2) + "\n").encode())
    except OSError as error:
        log.error("cannot write the report %s: %s", path, error.strerror)
        return False
    return True
