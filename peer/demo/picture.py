"""The demo's picture: what the peers recorded, as `peer.telemetry.plot` wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peer.demo.report import Observed, validation_losses
from peer.telemetry.plot import PlotEvent, PlotPoint, plot_run


def draw(path: Path, peers: Sequence[Observed], killed: Mapping[str, float]) -> None:
    """Write the PNG of a demo; time counts from the first peer's start.

    Args:
        killed: nickname -> unix seconds.
    """
    starts = [(event["time"], peer.nickname, event["round"]) for peer in peers for event in peer.of("start")[:1]]
    zero = min(time for time, _, _ in starts)
    series = {
        peer.nickname: [(event["time"] - zero, event["loss"]) for event in peer.of("step") if event["loss"] is not None]
        for peer in peers
    }
    validation = [
        PlotPoint(time_s=time - zero, round=number, loss=loss)
        for number, (time, loss) in sorted(validation_losses(peers).items())
    ]
    events = [PlotEvent(time_s=time - zero, label=f"{name} joined") for time, name, at_round in starts if at_round > 0]
    events += [PlotEvent(time_s=time - zero, label=f"{name} killed") for name, time in killed.items()]
    rounds = max(peer.round for peer in peers)
    plot_run(path, series, validation, events, f"Atoll demo: {rounds} rounds, {len(peers)} peers")
