"""A run as it is published, without a network."""

from __future__ import annotations

from peer.explain.report import PeerReport
from peer.explain.swarm_state import SwarmState
from peer.protocol.records import PeerRecord
from peer.protocol.reports import TrainerFigures
from tests.explain.samples import ALPHA, BRAVO, CHARLIE, DAY

RUN = "a" * 64
NAMES = {ALPHA: "alpha", BRAVO: "bravo", CHARLIE: "charlie"}


class Watched:
    """A run as it is published, and its reader; time passes when told."""

    def __init__(self, fragments=1):
        self.now, self.serial = DAY + 100.0, 1
        self.state = SwarmState(fragments, lambda: self.now)
        self.records, self.reports = {}, {}

    def peer(self, peer_id, nickname=None, **changes):
        values = {"state": "training", "round": 4, "lineage_id": RUN, "lineage_weight": 4000, "tokens_per_s": 10.0}
        self.serial += 1
        self.records[peer_id] = PeerRecord(
            run_id=RUN, nickname=nickname or NAMES[peer_id], serial=self.serial, expires_at=self.now + 15.0,
            **{**values, **changes},
        )  # fmt: skip

    def report(self, peer_id, *rounds, **figures):
        told = tuple(record.model_copy(update={"peer_id": peer_id}) for record in rounds)
        self.reports[peer_id] = PeerReport(since=DAY, figures=TrainerFigures(**figures), rounds=told)

    def look(self):
        self.state.take(self.records, self.reports)
        return self.state

    def views(self):
        return {view.nickname: view for view in self.look().peers}
