"""Records of one peer, alpha, as its agent would have kept them; `at` is the second of the day at which one ended."""

from __future__ import annotations

from typing import Any

from peer.outer.record import RoundRecord

ALPHA, BRAVO, CHARLIE, DELTA = (
    f"12D3KooW{'2' * 38}{end}" for end in ("ALPHA1", "BRAV22", "CHAR33", "DELT44")
)  # as long as real ids are
NICKNAMES = {ALPHA: "alpha", BRAVO: "bravo", CHARLIE: "charlie"}
DAY = 1_767_225_600.0  # 2026-01-01, 00:00:00 UTC
SECONDS = {"match": 0.012, "exchange": 0.071, "commit": 0.008, "install": 0.019, "total": 0.11}
LINEAGE = "a1" * 32


def _record(status: str, round: int, at: float, **fields: Any) -> RoundRecord:
    document = {
        "status": status, "round": round, "lineage_id": LINEAGE, "ended_at": DAY + at, "peer_id": ALPHA,
        "nicknames": NICKNAMES,
    }
    return RoundRecord.model_validate({**document, **fields})


def committed(round: int, at: float, members: tuple[str, ...] = (ALPHA, BRAVO, CHARLIE), **fields: Any) -> RoundRecord:
    """A committed round of the persistent group."""
    document = {
        "group_id": "b2" * 32, "members": members, "weights": (5120, 5120, 4096)[: len(members)], "stood": True,
        "seconds": SECONDS, "bytes_sent": 1_234_567, "bytes_received": 1_230_000, "cosine": 0.8312,
        "update_digest": "c3" * 32, "state_digest": "d4" * 32,
    }
    return _record("committed", round, at, **{**document, **fields})


def aborted(round: int, at: float, phase: str, reason: str, **fields: Any) -> RoundRecord:
    """An aborted round after which the peer tries again."""
    return _record("aborted", round, at, **{"phase": phase, "reason": reason, "instead": "retry", **fields})


def gossiped(round: int, at: float, members: tuple[str, ...], drawn: tuple[str, ...], **fields: Any) -> RoundRecord:
    """A gossip round of those of the drawn who came."""
    seconds = {"match": 0.012, "exchange": 0.071, "total": 0.11}
    document = {"group_id": "b2" * 32, "members": members, "drawn": drawn, "weights": (5120, 4096)[: len(members)]}
    return _record("committed", round, at, **{**document, "seconds": seconds, "bytes_sent": 1_234_567, **fields})


def alone(round: int, at: float) -> RoundRecord:
    """A try that found no peer."""
    seconds = {"total": 4.0}
    return aborted(round, at, "match", "1 of at least 2 peers", alone=True, instead="wait", seconds=seconds)


def caught_up(round: int, at: float, reason: str, **fields: Any) -> RoundRecord:
    """The state came from others."""
    return _record("caught_up", round, at, reason=reason, **fields)


def banned(round: int, at: float, culprit: str, reason: str) -> RoundRecord:
    """This peer has proof against another."""
    return _record("banned", round, at, culprit=culprit, reason=reason)


GROUP = {"members": (ALPHA, BRAVO, CHARLIE), "weights": (5120, 5120, 4096)}
STORY = [
    alone(1, 1.0),
    alone(1, 20.5),
    committed(1, 40.0, (ALPHA, BRAVO), stood=False, seconds={**SECONDS, "match": 0.412, "total": 0.51}),
    committed(2, 42.0, stood=False, regrouped="others want to take part"),
    committed(3, 44.0),
    aborted(4, 48.0, "exchange", f"{CHARLIE} closed the stream", culprit=CHARLIE, **GROUP, stood=True,
            seconds={"match": 0.01, "total": 2.31}, bytes_sent=600_000, bytes_received=450_123),
    committed(4, 49.9, (ALPHA, BRAVO), stood=False),
    aborted(5, 60.0, "commit", "1 of 2 votes by the deadline", members=(ALPHA, BRAVO), weights=(5120, 5120),
            stood=True, seconds={"match": 0.01, "exchange": 0.08, "total": 10.4}),
    aborted(5, 75.0, "match", f"{BRAVO} sends no roster", culprit=BRAVO, seconds={"total": 3.2},
            regrouped=f"{BRAVO} did not come within 7 s"),
    aborted(5, 80.0, "match", f"{DELTA} is on a heavier lineage", culprit=DELTA, behind=True, instead="catch_up",
            seconds={"total": 0.05}),
    caught_up(8, 80.4, f"replayed 4 rounds from {DELTA}", donor=DELTA, replayed=4),
    caught_up(40, 7300.0, f"took the snapshot of round 40 from {BRAVO}; left a1a1a1a1a1a1 at round 8, unsent progress "
              "is kept", donor=BRAVO, snapshot_round=40),
    aborted(41, 7301.0, "exchange", "deadline passed waiting for the mean of \x1b[31mEVE", **GROUP, stood=True,
            seconds={"match": 0.01, "total": 125.0}),
]  # fmt: skip
