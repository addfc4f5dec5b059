"""The page of a simulated run as a process of its own: peers that report, a chain that grows, and the real server."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from bootstrap.page.board import Board
from bootstrap.page.listening import listen
from bootstrap.page.run_card import RunCard
from bootstrap.page.server import PageServer
from peer.explain.history import FILE_NAME, History
from peer.explain.report import PeerReport
from peer.explain.swarm_state import SwarmState
from peer.outer.recipe.plan import RunPlan
from peer.outer.record import RoundRecord
from peer.protocol.manifest import RunManifest
from peer.protocol.records import PEER_TTL_S, PeerRecord
from peer.protocol.reports import TrainerFigures, ValidationPoint
from peer.swarm.state.run_control import RunControl
from peer.system.death_signal import die_with_parent

LOOK_S = 2.0  # as the reader of a run looks
ROUND_S = 5.0
GROUP = 16
LETTERS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # of base58
MANIFEST = RunManifest.model_validate({
    "name": "benchmark", "model": {"architecture": "llama", "config": {"hidden_size": 8}}, "genesis": "0" * 64,
    "rounds": {"total": 1_000_000},
})  # fmt: skip


class SimulatedRun:
    """So many peers, each of which reports every `period_s`; a group of them makes a round every few seconds."""

    def __init__(self, peers: int, period_s: float, rng: random.Random) -> None:
        self._ids = ["12D3KooW" + "".join(rng.choices(LETTERS, k=44)) for _ in range(peers)]
        self._rng = rng
        self._period_s, self._turn, self.round = period_s, 0, 0
        self.records: dict[str, PeerRecord] = {}
        self.reports: dict[str, PeerReport] = {}

    def step(self, now: float) -> None:
        """The peers whose turn it is report; a round ends now and then."""
        due = max(1, round(len(self._ids) * LOOK_S / self._period_s))
        if now // ROUND_S != (now - LOOK_S) // ROUND_S:
            self.round += 1
        for place in range(self._turn, self._turn + due) if self.records else range(len(self._ids)):
            self._report(place % len(self._ids), now)
        self._turn += due

    def _report(self, place: int, now: float) -> None:
        peer_id, wave, tokens = self._ids[place], self._rng.uniform(1, 2), self._turn * 4096 + self._rng.randrange(4096)
        self.records[peer_id] = PeerRecord(
            run_id=MANIFEST.run_id, nickname=f"peer-{place}", state="training", round=self.round,
            lineage_id=MANIFEST.run_id, lineage_weight=self.round * 10**6, step=self._turn, tokens=tokens,
            tokens_per_s=1000 * wave, loss=2 * wave, bytes_sent=245 * tokens, bytes_received=244 * tokens,
            serial=int(now * 1e6), expires_at=now + PEER_TTL_S,
        )  # fmt: skip
        start = self.round * GROUP % len(self._ids)
        members = tuple((self._ids * 2)[start : start + GROUP])
        ended = RoundRecord(
            status="committed", round=self.round, lineage_id=f"{self.round:064x}", members=members, peer_id=peer_id,
            weights=(65_536,) * len(members), stood=True, ended_at=now,
            seconds={"match": 0.4, "exchange": 1.1, "commit": 0.1, "total": 1.7},
        )  # fmt: skip
        validation = ValidationPoint(round=self.round, tokens=self.round * 10**6, loss=2.2 * wave)
        self.reports[peer_id] = PeerReport(
            since=1.8e9 + place, rounds=(ended,) if peer_id in members else (),
            figures=TrainerFigures(device="NVIDIA H100", utilisation=wave / 2, mfu=0.4, validation=validation),
        )  # fmt: skip


async def serve(run: SimulatedRun, folder: Path) -> None:
    """Until it is killed; the port is the first line of the output."""
    state, history = SwarmState(), History(folder / FILE_NAME)
    control = RunControl.of(folder, MANIFEST, "benchmark")
    card = RunCard(RunPlan.of(MANIFEST), "benchmark", ("/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW",), control)
    board = Board(card, cast(Any, SimpleNamespace(traffic={})), state, None, history)
    listener = listen(("127.0.0.1", 0))
    PageServer(board, listener).start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    while True:
        began = time.monotonic()
        run.step(time.time())
        state.take(run.records, run.reports)
        await board.look()
        await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))


def main() -> None:
    """Process entry."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_server", description="started by benchmarks.page")
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--period", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    with tempfile.TemporaryDirectory(prefix="atoll-page-") as name:
        uvloop.run(serve(SimulatedRun(arguments.peers, arguments.period, random.Random(arguments.seed)), Path(name)))


if __name__ == "__main__":
    main()
