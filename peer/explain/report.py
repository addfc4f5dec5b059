"""What a peer publishes for those who watch a run: figures of its trainer and the records of its newest rounds."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError
from peer.outer.record import RoundRecord
from peer.protocol.identity import Identity
from peer.protocol.manifest import Spec
from peer.protocol.records import Seconds, parse_json
from peer.protocol.reports import TrainerFigures, report_place, seal_report, unpack_report

MAX_ROUNDS = 24
MAX_REASON_CHARS = 200


class PeerReport(Spec):
    """One report; every word is its signer's claim and is only displayed.

    Attributes:
        since: unix seconds when this peer joined.
        rounds: the newest, oldest first.
    """

    since: Seconds
    figures: TrainerFigures = TrainerFigures()
    rounds: Annotated[tuple[RoundRecord, ...], Field(max_length=MAX_ROUNDS)] = ()


def pack_report(identity: Identity, run_id: str, serial: int, report: PeerReport) -> bytes | None:
    """Signed record bytes, with as many of the newest rounds as fit; None if not even the figures do."""
    rounds = [_slim(record) for record in report.rounds[-MAX_ROUNDS:]]
    for kept in sorted({len(rounds), *(len(rounds) * part // 4 for part in (3, 2, 1)), 2, 1, 0}, reverse=True):
        shorter = report.model_copy(update={"rounds": tuple(rounds[len(rounds) - min(kept, len(rounds)) :])})
        if (blob := seal_report(identity, run_id, serial, _text(shorter))) is not None:
            return blob
    return None


def open_report(blob: bytes, owner: str, run_id: str) -> tuple[int, PeerReport]:
    """Signed record bytes -> (serial, report).

    Raises:
        ProtocolError: malformed, of another run, or not signed by `owner`.
    """
    signer, of_run, serial = report_place(blob)
    if signer != owner or of_run != run_id:
        raise ProtocolError(f"report of {signer} under {owner}, run {of_run[:12]}")
    report = parse_json(PeerReport, unpack_report(blob))
    return serial, report.model_copy(
        update={"rounds": tuple(record.model_copy(update={"peer_id": owner}) for record in report.rounds)}
    )


def _text(report: PeerReport) -> bytes:
    return json.dumps(report.model_dump(mode="json", exclude_defaults=True), separators=(",", ":")).encode()


def _slim(record: RoundRecord) -> RoundRecord:
    """Without what a watcher finds elsewhere: nicknames are in the peers' records, digests in the chain."""
    reason, seconds = record.reason, {phase: round(value, 3) for phase, value in record.seconds.items()}
    return record.model_copy(
        update={
            "nicknames": {}, "update_digest": None, "state_digest": None, "peer_id": None, "seconds": seconds,
            "cosine": None if record.cosine is None else round(record.cosine, 3),
            "reason": None if reason is None else reason[:MAX_REASON_CHARS], "audits": record.audits[:2],
        }
    )  # fmt: skip
