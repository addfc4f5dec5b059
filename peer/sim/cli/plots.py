"""Loss over tokens and over traffic: one line per recipe, the mean over its seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from peer.errors import UserError
from peer.system.output_files import replace_file

Axis = Literal["tokens", "bytes_sent_per_peer"]

WIDTH_INCHES, DPI = 12.0, 120
LINE_INCHES = 0.225          # of one label at the right
# Okabe and Ito (2008) without the yellow, then three of Tol's (2021) that differ from them; black is the reference's.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#882255", "#999933", "#332288")
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v")      # five and nine have no common factor: 45 lines differ
LABEL_CHARS = 36
REFERENCE_COLOUR = "#000000"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The mean curve of one label; `final` is the loss on all of the validation data."""

    label: str
    x: tuple[float, ...]
    losses: tuple[float, ...]
    final: float | None


def draw(path: Path, document: Mapping[str, Any], axis: Axis) -> None:
    """Write a PNG of a report's curves.

    Args:
        axis: what to draw the loss over; traffic is drawn on a logarithmic axis.

    Raises:
        UserError: the file cannot be written.
    """
    lines = mean_lines(document["rows"], axis)
    labels = [_folded(line.label) for line in lines]
    height = max(5.5, 1.2 + LINE_INCHES * sum(label.count("\n") + 1 for label in labels))
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (line, label) in enumerate(zip(lines, labels, strict=True)):
        _draw_line(axes, line, label, number, line.label == document["best_baseline"])
    _dress(axes, document, axis, lines)
    if lines:
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9,
            title="final loss, recipe", alignment="left", handlelength=3.2,
        )
    picture = BytesIO()
    figure.savefig(picture, format="png")
    try:
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise UserError(f"picture {path}: cannot be written: {error.strerror}", "choose another file") from None


def mean_lines(rows: Sequence[Mapping[str, Any]], axis: Axis) -> list[Curve]:
    """One line per label that has a curve, the lowest final loss first."""
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    lines = [line for label, own in by_label.items() if (line := _mean_line(label, own, axis)).x]
    return sorted(lines, key=lambda line: (line.final is None, line.final or 0.0))


def _mean_line(label: str, rows: Sequence[Mapping[str, Any]], axis: Axis) -> Curve:
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
    return Curve(label=label, x=tuple(x), losses=tuple(losses), final=sum(finals) / len(finals) if finals else None)


def _draw_line(axes: Axes, line: Curve, label: str, number: int, reference: bool) -> None:
    colour = REFERENCE_COLOUR if reference else COLOURS[number % len(COLOURS)]
    style = "-" if reference else STYLES[number // len(COLOURS) % len(STYLES)]
    final = "  -    " if line.final is None else f"{line.final:.3f}"
    axes.plot(
        line.x, line.losses, color=colour, linestyle=style, linewidth=2.4 if reference else 1.5,
        marker=MARKERS[number % len(MARKERS)], markersize=4.0, markevery=_marks(len(line.x)),
        label=f"{final}  {label}", zorder=3 if reference else 2,
    )


def _marks(points: int) -> list[int]:
    """About ten points of a line, the last one always."""
    return sorted({points - 1 - index for index in range(0, points, max(1, points // 10))})


def _folded(label: str) -> str:
    """Lines of at most about LABEL_CHARS, broken behind a colon or a comma."""
    lines = [""]
    for piece in re.findall(r"[^:,]*[:,]?", label):
        if lines[-1] and len(lines[-1]) + len(piece) > LABEL_CHARS:
            lines.append("")
        lines[-1] += piece
    return "\n          ".join(lines)


def _dress(axes: Axes, document: Mapping[str, Any], axis: Axis, lines: Sequence[Curve]) -> None:
    seeds = len({row["seed"] for row in document["rows"]})
    mean = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    parameters = document["task"]["parameters"]
    what = "tokens" if axis == "tokens" else "bytes sent by each peer"
    axes.set_title(f"Validation loss over {what}", fontsize=12, fontweight="bold", loc="left", pad=22)
    network = document["settings"]["network"]["name"]
    axes.annotate(
        f"{document['peers']} peers, {parameters:,} parameters, {network} network, {mean}",
        (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", fontsize=9.5, color="#444444",
    )
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("tokens of all peers together" if axis == "tokens" else "bytes sent by each peer (log)")
    if lines:
        low, high = _limits(lines)
        axes.set_ylim(low, high)
        if axis == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            _scale_to_traffic(axes, lines, high)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _limits(lines: Sequence[Curve]) -> tuple[float, float]:
    """From just below the best to where half of the lines are soon after the start, and most of them at the end.

    What matters is at the ends of the lines; what rises above the upper limit leaves the picture.
    """
    start = max(line.losses[0] for line in lines)
    ends = sorted(min(line.losses[-1], start) for line in lines)
    early = sorted(line.losses[min(1, len(line.losses) - 1)] for line in lines)
    low = min(min(line.losses) for line in lines)
    high = max(early[len(early) // 2], ends[round(0.95 * (len(ends) - 1))], low + 0.01)
    return low - 0.04 * (high - low), high + 0.05 * (high - low)


def _scale_to_traffic(axes: Axes, lines: Sequence[Curve], high: float) -> None:
    """A logarithmic axis around the points that are in the picture."""
    shown = [x for line in lines for x, loss in zip(line.x, line.losses, strict=True) if loss <= high]
    axes.set_xscale("log")
    axes.set_xlim(min(shown) / 1.5, max(shown) * 1.5)
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    if max(shown) < 20 * min(shown):
        axes.xaxis.set_minor_formatter(EngFormatter(unit="B"))
