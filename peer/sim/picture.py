"""Loss over tokens and over traffic: one line per recipe, the mean over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from peer.errors import UserError

Axis = Literal["tokens", "bytes_sent_per_peer"]

WIDTH_INCHES, DPI = 12.0, 120
LINE_INCHES = 0.225          # of one label at the right
# Okabe and Ito (2008) without the yellow, then three of Tol's (2021) that differ from them; black is the reference's.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#882255", "#999933", "#332288")
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
REFERENCE_COLOUR = "#000000"


@dataclass(frozen=True, kw_only=True)
class Line:
    """The mean curve of one label; `final` is the loss on all of the validation data."""

    label: str
    x: tuple[float, ...]
    losses: tuple[float, ...]
    final: float | None


def draw(path: Path, document: Mapping[str, Any], axis: Axis) -> None:
    """Write a PNG of a report's curves.

    Args:
        path: of the PNG.
        document: see `peer.sim.report.Report.document`.
        axis: what to draw the loss over; traffic is drawn on a logarithmic axis.

    Raises:
        UserError: the file cannot be written.
    """
    lines = mean_lines(document["rows"], axis)
    height = max(5.5, 1.6 + LINE_INCHES * len(lines))
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, line in enumerate(lines):
        _draw_line(axes, line, number)
    _dress(figure, axes, document, axis, lines)
    if lines:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9, title="final loss, recipe",
                      alignment="left", handlelength=3.2)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"picture {path}: cannot be written: {error.strerror}", "choose another file") from None


def mean_lines(rows: Sequence[Mapping[str, Any]], axis: Axis) -> list[Line]:
    """One line per label that has a curve, the lowest final loss first."""
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    lines = [line for label, own in by_label.items() if (line := _mean_line(label, own, axis)).x]
    return sorted(lines, key=lambda line: (line.final is None, line.final or 0.0))


def _mean_line(label: str, rows: Sequence[Mapping[str, Any]], axis: Axis) -> Line:
    curves = [row["curve"] for row in rows if row["curve"]]
    x, losses = [], []
    for points in zip(*curves, strict=False):
        values = [point["val_loss"] for point in points]
        place = sum(point[axis] for point in points) / len(points)
        if None in values or (axis == "bytes_sent_per_peer" and place <= 0):
            continue
        x.append(place)
        losses.append(sum(values) / len(values))
    finals = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    return Line(label=label, x=tuple(x), losses=tuple(losses), final=sum(finals) / len(finals) if finals else None)


def _draw_line(axes: Axes, line: Line, number: int) -> None:
    reference = line.label == "ddp"
    colour = REFERENCE_COLOUR if reference else COLOURS[number % len(COLOURS)]
    style = "-" if reference else STYLES[number // len(COLOURS) % len(STYLES)]
    final = "   -  " if line.final is None else f"{line.final:.3f}"
    axes.plot(
        line.x, line.losses, color=colour, linestyle=style, linewidth=2.4 if reference else 1.6,
        label=f"{final}  {line.label}", zorder=3 if reference else 2,
    )
    axes.plot(line.x[-1:], line.losses[-1:], "o", color=colour, markersize=4.5, zorder=4)


def _dress(figure: Figure, axes: Axes, document: Mapping[str, Any], axis: Axis, lines: Sequence[Line]) -> None:
    seeds = len(document["seeds"])
    mean = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    parameters = document["task"]["parameters"]
    what = "tokens" if axis == "tokens" else "bytes sent by each peer"
    title = f"Validation loss over {what}: {document['peers']} peers, {parameters:,} parameters, {mean}"
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    axes.set_ylabel("loss (nats per token)")
    if axis == "tokens":
        axes.set_xlabel("tokens of all peers together")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axes.set_xscale("log")
        axes.set_xlabel("bytes sent by each peer (log)")
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        if lines and max(line.x[-1] for line in lines) < 20 * min(line.x[0] for line in lines):
            axes.xaxis.set_minor_formatter(EngFormatter(unit="B"))
    axes.set_ylim(*_limits(lines))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _limits(lines: Sequence[Line]) -> tuple[float | None, float | None]:
    """From just below the best to where most were soon after the start: what matters is at the end of the lines.

    Half of the lines are above the upper limit at their second point; what rises above it leaves the picture.
    """
    if not lines:
        return None, None
    ends = [line.losses[-1] for line in lines]
    early = sorted(line.losses[min(1, len(line.losses) - 1)] for line in lines)
    low = min(min(line.losses) for line in lines)
    high = max(early[len(early) // 2], sorted(ends)[len(ends) // 2], low + 0.01)
    return low - 0.04 * (high - low), high + 0.05 * (high - low)
