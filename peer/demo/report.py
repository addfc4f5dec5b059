"""What the peers of a demo left in their folders -> its report, its picture, and whether it went as expected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer.telemetry.metrics import read_metrics
from peer.telemetry.status import PeerRow, read_status

MIN_ROUNDS = 8
DemoEvent = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one peer has written so far. `events` is its metrics, `row` its own line of its status file."""

    nickname: str
    events: list[DemoEvent] = field(default_factory=list)
    row: PeerRow | None = None
    report: dict[str, Any] | None = None

    def of(self, kind: str) -> list[DemoEvent]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def committed(self) -> list[DemoEvent]:
        return [event for event in self.of("round") if event["status"] == "committed"]

    @property
    def round(self) -> int:
        """The last round it has committed or caught up to; 0 before the first."""
        reached = [event["round"] for event in self.of("round") if event["status"] != "aborted"]
        return max(reached + [event["round"] for event in self.of("start")], default=0)


def observe(nickname: str, folder: Path) -> Observed:
    """Read the folder of one peer; whatever is not there yet is empty."""
    try:
        report = json.loads((folder / "report.json").read_bytes())
    except (OSError, ValueError):
        report = None
    rows = [row for row in read_status(folder / "status.json") if row.nickname == nickname]
    metrics = read_metrics(folder / "metrics.jsonl")
    return Observed(nickname=nickname, events=metrics, row=rows[0] if rows else None, report=report)


def demo_report(peers: Sequence[Observed], killed: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a finished demo.

    Args:
        peers: in the order to list them; all but the killed have a report.
        killed: nickname -> unix seconds.

    Returns:
        losses in nats per token; bytes are those of the exchanges, without state transfers; a time is in unix seconds.
    """
    survivors = [peer.report for peer in peers if peer.report is not None]
    assert survivors
    validation = validation_losses(peers)
    return {
        "rounds": max(report["round"] for report in survivors),
        "val_loss_first": validation[min(validation)][1] if validation else None,
        "val_loss_last": validation[max(validation)][1] if validation else None,
        "tokens": sum(_tokens(peer) for peer in peers),
        "wire_bytes_per_parameter_per_round": _wire_bytes(peers, survivors[0]["numel"]),
        "export_path": next((report["export_path"] for report in survivors if report["export_path"]), None),
        "events": sorted(_events(peers, killed), key=lambda event: float(event["time"])),
        "peers": [_peer_entry(peer, killed) for peer in peers],
    }


def validation_losses(peers: Sequence[Observed]) -> dict[int, tuple[float, float]]:
    """round -> (unix seconds, loss) of the anchor, from the peer that measured it first (all measure the same)."""
    losses: dict[int, tuple[float, float]] = {}
    for peer in peers:
        for event in peer.of("validation"):
            if event["loss"] is None:
                continue
            before = losses.get(event["round"])
            if before is None or event["time"] < before[0]:
                losses[event["round"]] = (event["time"], event["loss"])
    return losses


def shortcomings(report: Mapping[str, Any], rounds: int) -> list[str]:
    """What did not go as a demo must; empty if all did.

    Args:
        rounds: how many the manifest asked for.
    """
    problems = []
    if report["rounds"] < max(MIN_ROUNDS, rounds):
        problems.append(f"the swarm made {report['rounds']} rounds, not {rounds}")
    alive = [peer for peer in report["peers"] if peer["left_at_round"] is None]
    digests = {peer["nickname"]: str(peer["state_digest"])[:12] for peer in alive}
    if len(set(digests.values())) != 1 or any(peer["state_digest"] is None for peer in alive):
        shown = ", ".join(f"{name} {digest}" for name, digest in digests.items())
        problems.append(f"the peers' states differ: {shown}")
    first, last = report["val_loss_first"], report["val_loss_last"]
    if first is None or last is None or not last < first:
        problems.append(f"the validation loss did not fall: {first} -> {last}")
    happened = {event["kind"] for event in report["events"]}
    problems += [f"no peer was seen to {kind}" for kind in ("join", "kill") if kind not in happened]
    if not any(peer["joined_at_round"] > 0 for peer in report["peers"]):
        problems.append("no peer joined during the run")
    return problems


def _wire_bytes(peers: Sequence[Observed], numel: int) -> float:
    """Bytes that a peer sends per parameter and committed round: the largest mean over the peers."""
    rates = [
        sum(event["bytes_sent"] for event in peer.committed) / len(peer.committed) / numel
        for peer in peers
        if peer.committed
    ]
    return max(rates, default=0.0)


def _events(peers: Sequence[Observed], killed: Mapping[str, float]) -> Iterator[DemoEvent]:
    for peer in peers:
        for event in peer.of("start")[:1]:
            yield _event(event["time"], "join", peer, event["round"], None)
        for event in peer.of("round"):
            if event["status"] == "aborted" and not event["alone"]:
                yield _event(event["time"], "abort", peer, event["round"], f"{event['phase']}: {event['reason']}")
        if peer.nickname in killed:
            yield _event(killed[peer.nickname], "kill", peer, peer.round, "SIGKILL")


def _event(time: float, kind: str, peer: Observed, round_number: int, reason: str | None) -> DemoEvent:
    return {"time": time, "kind": kind, "peer": peer.nickname, "round": round_number, "reason": reason}


def _tokens(peer: Observed) -> int:
    if peer.report is not None:
        return int(peer.report["tokens"])
    said = [event["tokens"] for event in peer.of("step")] + ([peer.row.tokens] if peer.row else [])
    return max(said, default=0)


def _peer_entry(peer: Observed, killed: Mapping[str, float]) -> dict[str, Any]:
    if peer.report is None:
        return _entry_of_lost(peer)
    keys = (
        "id", "nickname", "joined_at_round", "tokens", "bytes_sent", "bytes_received", "seconds_waiting",
        "seconds_training", "lineage_id", "state_digest",
    )
    left = peer.round if peer.nickname in killed else None
    return {**{key: peer.report[key] for key in keys}, "left_at_round": left}


def _entry_of_lost(peer: Observed) -> dict[str, Any]:
    """The entry of a peer without a report: what it last said. It trained whenever it did not wait."""
    start = peer.of("start")[0] if peer.of("start") else None
    rounds = peer.of("round")
    states = [event for event in rounds if event["status"] != "aborted"]
    waited = peer.row.seconds_waiting if peer.row else 0.0
    present = peer.events[-1]["time"] - start["time"] if start else 0.0
    return {
        "id": start["peer_id"] if start else None,
        "nickname": peer.nickname,
        "joined_at_round": start["round"] if start else 0,
        "left_at_round": peer.round,
        "tokens": _tokens(peer),
        "bytes_sent": sum(event["bytes_sent"] for event in rounds),
        "bytes_received": sum(event["bytes_received"] for event in rounds),
        "seconds_waiting": waited,
        "seconds_training": max(0.0, present - waited),
        "lineage_id": states[-1]["lineage_id"] if states else None,
        "state_digest": states[-1]["state_digest"] if states else None,
    }
