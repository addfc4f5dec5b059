"""A row to vary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peer.telemetry.status import PeerRow

ROW = PeerRow(
    peer_id="12D3KooWalphaXYZ123", nickname="alpha", state="training", round=7, step=1280, tokens=163_840,
    tokens_per_s=4321.6, loss=2.34567, group_size=3, bytes_sent=1_234_567, bytes_received=987, seconds_waiting=12.4,
)


def row(**changes: Any) -> PeerRow:
    return replace(ROW, **changes)
