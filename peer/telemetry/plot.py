"""One picture of a run: how every peer's loss fell, what happened meanwhile, and what the swarm's anchor gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from peer.system.output_files import replace_file

WIDTH_INCHES, HEIGHT_INCHES, DPI = 11.0, 5.0, 120
WIDTH_PIXELS, HEIGHT_PIXELS = int(WIDTH_INCHES * DPI), int(HEIGHT_INCHES * DPI)
SMOOTHING = 0.7
# Okabe and Ito, "Color universal design" (2008); black is kept for the anchor, yellow is too pale for a line.
PEER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
ANCHOR_COLOUR, EVENT_COLOUR = "#000000", "#666666"


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """Loss (nats per token) of the anchor of `round`, measured `time_s` seconds after the start."""

    time_s: float
    round: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class PlotEvent:
    """Something that happened `time_s` seconds after the start, in a word or two."""

    time_s: float
    label: str


def smooth(losses: Sequence[float], momentum: float = SMOOTHING) -> list[float]:
    """Exponential moving average with bias correction, so that the first values are not drawn to zero.

    Source: Kingma and Ba, "Adam" (2015), section 3.
    """
    average, weight, out = 0.0, 0.0, []
    for loss in losses:
        average = momentum * average + (1 - momentum) * loss
        weight = momentum * weight + (1 - momentum)
        out.append(average / weight)
    return out


def plot_run(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    validation: Sequence[PlotPoint],
    events: Sequence[PlotEvent],
    title: str,
) -> None:
    """Write a PNG of WIDTH_PIXELS x HEIGHT_PIXELS.

    Args:
        series: training loss per peer: (seconds since the start, nats per token) in order of time.
        validation: the anchor's validation loss, one point a round.
        events: drawn as vertical lines over the training loss.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    _draw_training(left, series, validation)
    _draw_events(left, events)
    _draw_validation(right, validation)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(6, len(labels)), frameon=False, fontsize=9)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


def _draw_training(
    axes: Axes, series: Mapping[str, Sequence[tuple[float, float]]], validation: Sequence[PlotPoint]
) -> None:
    for number, (name, points) in enumerate(series.items()):
        if not points:
            continue
        colour = PEER_COLOURS[number % len(PEER_COLOURS)]
        times, losses = [time_s for time_s, _ in points], [loss for _, loss in points]
        axes.plot(times, losses, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(times, smooth(losses), color=colour, linewidth=1.8, label=f"{name}, training")
    if validation:
        axes.plot(
            [point.time_s for point in validation], [point.loss for point in validation], "o", color=ANCHOR_COLOUR,
            markersize=5, label="anchor, validation",
        )
    _style(axes, "Training loss of each peer", "seconds since the start")
    axes.set_ylabel("loss (nats per token)")


def _draw_events(axes: Axes, events: Sequence[PlotEvent]) -> None:
    for event in events:
        axes.axvline(event.time_s, color=EVENT_COLOUR, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            event.label, (event.time_s, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -5),
            textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8.5, color=EVENT_COLOUR,
        )


def _draw_validation(axes: Axes, validation: Sequence[PlotPoint]) -> None:
    ordered = sorted(validation, key=lambda point: point.round)
    axes.plot(
        [point.round for point in ordered], [point.loss for point in ordered], "o-", color=ANCHOR_COLOUR,
        markersize=5, linewidth=1.2,
    )
    for point, offset in ((ordered[0], (8, 2)), (ordered[-1], (6, 9))) if len(ordered) > 1 else ():
        axes.annotate(
            f"{point.loss:.3f}", (point.round, point.loss), xytext=offset, textcoords="offset points", fontsize=9,
            ha="left" if point is ordered[0] else "right",
        )
    _style(axes, "Validation loss of the anchor", "round (0: before training)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _style(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel(x_label)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
