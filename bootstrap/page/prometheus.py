"""`/metrics`: the figures of the run in Prometheus' text format; names and units by its conventions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bootstrap.page.board import Board

MAX_PEERS = 100  # with series of their own: those that contributed most
GAUGES = {
    "loss": ("atoll_training_loss", "Median training loss of the peers, in nats per token"),
    "validation": ("atoll_validation_loss", "Validation loss of the newest validated round, in nats per token"),
    "validated": ("atoll_validated_round", "The round of that validation"),
    "tokens_per_s": ("atoll_tokens_per_second", "Tokens per second that the peers train, by their own claims"),
    "committed_tokens_per_s": ("atoll_committed_tokens_per_second", "Tokens per second that rounds commit"),
    "utilisation": ("atoll_utilisation_ratio", "Mean share of the peers' time that goes into steps"),
    "done": ("atoll_progress_ratio", "How much of the run is done"),
    "eta_s": ("atoll_remaining_seconds", "How long the rest takes at the present pace"),
}
PEER_GAUGES = {
    "tokens_per_s": ("atoll_peer_tokens_per_second", "Tokens per second of one peer"),
    "loss": ("atoll_peer_training_loss", "Training loss of one peer, in nats per token"),
    "utilisation": ("atoll_peer_utilisation_ratio", "Share of one peer's time that goes into steps"),
    "round": ("atoll_peer_round", "The round at which one peer stands"),
}


class RunCollector:
    """Reads a board whenever Prometheus scrapes it."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        now, card = self._board.now(), self._board.card
        info = GaugeMetricFamily("atoll_run_info", "The run", labels=("run", "run_id", "recipe"))
        info.add_metric((card.plan.manifest.name, card.plan.manifest.run_id, card.plan.recipe.name), 1.0)
        yield info
        yield _counter("atoll_rounds", "Rounds that were committed", now["round"])
        yield _counter("atoll_tokens", "Tokens that were committed", now["tokens"])
        peers = GaugeMetricFamily("atoll_peers", "Peers of the run by state", labels=("state",))
        for state, count in now["states"].items():
            peers.add_metric((state,), count)
        yield peers
        events = CounterMetricFamily("atoll_events", "Rounds and other events in the history", labels=("status",))
        for status in ("committed", "aborted", "caught_up", "banned"):
            events.add_metric((status,), self._board.events_seen[status])
        yield events
        for key, (name, help_text) in GAUGES.items():
            if now[key] is not None:
                yield GaugeMetricFamily(name, help_text, now[key])
        yield _served(now["served"])
        yield from self._of_peers()

    def _of_peers(self) -> Iterator[Metric]:
        rows = [row for row in self._board.peers() if row["state"] != "gone"]
        rows = sorted(rows, key=lambda row: -(row.get("contributed") or row["tokens"]))[:MAX_PEERS]
        for key, (name, help_text) in PEER_GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=("peer", "peer_id"))
            for row in rows:
                if row[key] is not None:
                    gauge.add_metric((row["nickname"], row["peer_id"]), row[key])
            yield gauge


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value)


def _served(served: dict[str, Any]) -> Metric:
    traffic = CounterMetricFamily(
        "atoll_bootstrap_traffic_bytes", "Bytes over streams of this node", labels=("purpose", "direction")
    )
    for purpose, (sent, received) in served.items():
        traffic.add_metric((purpose, "sent"), sent)
        traffic.add_metric((purpose, "received"), received)
    return traffic


def render_metrics(board: Board) -> bytes:
    """The whole answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(board))
    return generate_latest(registry)
