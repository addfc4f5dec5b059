"""Folders as peers leave them: metrics, status and report, with numbers that a test can compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peer.telemetry.status import write_status
from tests.telemetry.rows import row

NUMEL = 1000


class Recorder:
    """Writes one peer's folder; `now` is the unix time of the next event."""

    def __init__(self, root: Path, nickname: str, now: float = 100.0) -> None:
        self.nickname, self.now = nickname, now
        self.folder = root / nickname
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: Any) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "time": self.now, **fields}) + "\n")

    def start(self, at_round: int = 0) -> None:
        self.write("start", peer_id=f"id-{self.nickname}", nickname=self.nickname, run_id="0" * 64, round=at_round)

    def step(self, loss: float | None, tokens: int) -> None:
        self.write("step", step=tokens // 10, round=0, loss=loss, tokens=tokens, tokens_per_s=10.0)

    def validation(self, at_round: int, loss: float) -> None:
        self.write("validation", round=at_round, loss=loss, tokens=0, step=0, swarm_tokens=0)

    def round(self, number: int, status: str = "committed", bytes_sent: int = 1500, **fields: Any) -> None:
        document = {
            "status": status, "round": number, "lineage_id": f"{number:064x}", "members": ["id-alpha", "id-bravo"],
            "phase": None, "reason": None, "culprit": None, "alone": False, "bytes_sent": bytes_sent,
            "bytes_received": 2 * bytes_sent, "seconds": {"total": 0.5}, "state_digest": f"{number + 256:064x}",
        }
        self.write("round", **{**document, **fields})

    def status(self, **changes: Any) -> None:
        write_status(self.folder / "status.json", [row(nickname="zulu"), row(nickname=self.nickname, **changes)], "run")

    def report(self, last_round: int, **changes: Any) -> None:
        document = {
            "id": f"id-{self.nickname}", "nickname": self.nickname, "round": last_round, "joined_at_round": 0,
            "tokens": 9000, "bytes_sent": 111, "bytes_received": 222, "seconds_waiting": 1.5, "seconds_training": 30.25,
            "lineage_id": "a" * 64, "state_digest": "b" * 64, "numel": NUMEL, "sample": "def f():\n    pass",
            "export_path": str(self.folder / "export"),
        }
        (self.folder / "report.json").write_text(json.dumps({**document, **changes}))
