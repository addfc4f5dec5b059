"""The live figures of a swarm as one peer sees them, and the small file in which it shares them with this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from peer.protocol.records import PeerRecord
from peer.system.output_files import replace_file


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """One peer in a table. `loss` is in nats per token, `tokens` and bytes count since it joined."""

    peer_id: str
    nickname: str
    state: str
    round: int
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    group_size: int
    bytes_sent: int
    bytes_received: int
    seconds_waiting: float

    @classmethod
    def from_record(cls, peer_id: str, record: PeerRecord) -> PeerRow:
        """A row of what a peer says of itself."""
        return cls(
            peer_id=peer_id,
            nickname=record.nickname,
            state=record.state,
            round=record.round,
            step=record.step,
            tokens=record.tokens,
            tokens_per_s=record.tokens_per_s,
            loss=record.loss,
            group_size=record.group_size,
            bytes_sent=record.bytes_sent,
            bytes_received=record.bytes_received,
            seconds_waiting=record.seconds_waiting,
        )


_ROWS = TypeAdapter(list[PeerRow])


def write_status(path: Path, rows: Sequence[PeerRow], run: str) -> None:
    """Replace the status file in one step, so that a reader never sees half of it.

    Not flushed to the disk: after a power failure last second's status is worthless.
    """
    document = {"run": run, "peers": [asdict(row) for row in rows]}
    replace_file(path, json.dumps(document).encode())


def read_status(path: Path) -> list[PeerRow]:
    """The rows of a status file; [] when it is absent or not whole."""
    try:
        document = json.loads(path.read_bytes())
        return _ROWS.validate_python(document["peers"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return []
