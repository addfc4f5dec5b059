"""Bandwidth that keeps two datacentres busy: Streaming DiLoCo's table 4 (arXiv 2501.18512), computed again."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, run_benchmark
from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.outer.state.flat_layout import FlatLayout
from peer.sim.campaign.label import parse_label
from peer.sim.campaign.plan import load_task, meta_layout
from peer.sim.forecast.published_bandwidth import METHODS, PAPER, SIZES, TARGETS, Size
from peer.sim.forecast.steady import TOLERANCE, steady
from peer.sim.world.scenario import PeerProfile

NAME = "bandwidth"
ABOUT = "Gbit/s that two datacentres need for a utilisation, simulated, against the published simulation of H = 100"
GRID = tuple(10 ** (-1 + 4 * k / 49) for k in range(50))
"""Gbit/s, as in the paper, whose table names every bandwidth of it to one decimal."""
STEP = GRID[1] / GRID[0]
PERIOD = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the table, ours and theirs.

    Attributes:
        needed: Gbit/s at which our curve crosses the target.
        ours: place in `GRID`, the first that reaches the target.
        published: the paper's Gbit/s, as printed.
    """

    size: str
    method: str
    target: float
    needed: float
    ours: int
    published: float

    @property
    def paper(self) -> int:
        """Place in `GRID` of the published bandwidth."""
        return nearest(self.published)

    @property
    def steps(self) -> int:
        """Of the grid, from the paper's bandwidth to ours."""
        return self.ours - self.paper

    @property
    def distance(self) -> float:
        """The same, from the paper's to what is needed between the grid's bandwidths."""
        return math.log(self.needed / GRID[self.paper]) / math.log(STEP)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Simulates time alone: two peers, no latency, layers that are sent while the backward pass goes on.\n"
        "Utilisation is that of whole periods of 100 steps after the first.",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw utilisation over bandwidth to this PNG")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """All curves, and the table from them."""
    curves: dict[tuple[str, str], list[float]] = {}
    for size in SIZES:
        layout = meta_layout(load_task(size.manifest))
        for method in METHODS:
            curves[size.name, method] = [utilisation(size, layout, method, gbit_s) for gbit_s in GRID]
            say(f"{size.name}, {method}")
    cells = table(curves)
    if arguments.plot is not None:
        draw(arguments.plot, curves)
    samples = {
        "grid_gbit_s": GRID,
        "utilisation": {f"{size}, {method}": curve for (size, method), curve in curves.items()},
        "needed_gbit_s": {f"{cell.size}, {cell.method}, {cell.target:.0%}": cell.needed for cell in cells},
    }
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(cells), samples=samples, notes=NOTES,
        table=rows(cells),
    )


def utilisation(size: Size, layout: FlatLayout, method: str, gbit_s: float) -> float:
    """The share of computing of two datacentres in the periods after the first."""
    link = PeerProfile(up_bytes_s=gbit_s * 1e9 / 8, down_bytes_s=gbit_s * 1e9 / 8)
    recipe = parse_label(METHODS[method].format(fragments=size.layers // 3)).recipe()
    window = (2, 4) if method == "data-parallel" else (PERIOD, 3 * PERIOD)
    return steady(recipe, layout, (link, link), size.step_s, window).utilisation


def needed(curve: Sequence[float], target: float) -> tuple[float, int]:
    """Gbit/s at which a curve over the grid crosses the target, and the first place of the grid that reaches it.

    Raises:
        UserError: no bandwidth of the grid reaches it.
    """
    place = next((k for k, share in enumerate(curve) if share >= target - TOLERANCE), None)
    if place is None:
        raise UserError(f"a utilisation of {target:.0%} needs more than {GRID[-1]:.0f} Gbit/s")
    if place == 0:
        return GRID[0], 0
    before, after = curve[place - 1], curve[place]
    fraction = (target - before) / (after - before)
    return GRID[place - 1] * STEP ** min(1.0, fraction), place


def table(curves: Mapping[tuple[str, str], Sequence[float]]) -> list[Cell]:
    """Every number of the paper's table that there is a curve for."""
    cells = []
    for (size, method), curve in curves.items():
        published = PAPER[size][list(METHODS).index(method)]
        for target, paper in zip(TARGETS, published, strict=True):
            gbit_s, ours = needed(curve, target)
            cells.append(Cell(size=size, method=method, target=target, needed=gbit_s, ours=ours, published=paper))
    return cells


def nearest(gbit_s: float) -> int:
    """The place in the grid of a bandwidth that was rounded to one decimal."""
    return min(range(len(GRID)), key=lambda k: abs(GRID[k] - gbit_s))


def figures(cells: Sequence[Cell]) -> tuple[Figure, ...]:
    """How far the table is from the published one."""
    within = sum(abs(cell.steps) <= 1 for cell in cells)
    return (
        Figure(name="cells within one grid step of the paper", value=within, unit="", limit=len(cells), at_most=False),
        Figure(name="largest difference", value=max(abs(cell.steps) for cell in cells), unit="steps"),
        Figure(name="cells on the paper's bandwidth", value=sum(cell.steps == 0 for cell in cells), unit=""),
        Figure(name="cells one step above it", value=sum(cell.steps == 1 for cell in cells), unit=""),
        Figure(name="mean distance, off the grid", value=mean([cell.distance for cell in cells]), unit="steps"),
        Figure(name="largest distance, off the grid", value=max(abs(cell.distance) for cell in cells), unit="steps"),
        *(
            Figure(name=f"{name} on the wire", value=codec(name).wire_bytes(10**9) * 8 / 1e9, unit="bits/value")
            for name in ("bf16", "fp4")
        ),
    )


def mean(values: Sequence[float]) -> float:
    """The sum over how many there are."""
    return math.fsum(values) / len(values)


def rows(cells: Sequence[Cell]) -> tuple[tuple[str, ...], ...]:
    """The table with its header: ours / the paper's and the steps from there to ours."""
    header = ("model", "method", *(f"{target:.0%}" for target in TARGETS))
    lines: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        shown = f"{GRID[cell.ours]:.1f} / {cell.published:.1f} ({cell.steps:+d})"
        lines.setdefault((cell.size, cell.method), []).append(shown)
    return header, *((*names, *line) for names, line in lines.items())


NOTES = """\
Each cell is ours / the paper's in Gbit/s, and in brackets the number of steps between them on the paper's grid of
bandwidths, whose neighbours differ by a factor of 1.207. Ours is the first bandwidth of the grid that reaches the
utilisation. The paper's is nearly everywhere the one before: it may be the last that does not reach the utilisation, or
the paper sent 16% fewer bits than 16 for each parameter; the paper does not say. In the one cell that is two steps away
our curve needs 2.07 Gbit/s, just above the grid's 2.02. The paper does not give the sizes of its models' layers either:
ours are equal, and add up to the parameters in the model's name. Our FP4 carries a 16-bit scale for each 128 values."""


def draw(path: Path, curves: Mapping[tuple[str, str], Sequence[float]]) -> None:
    """Write a PNG with one panel per size; dots are the paper's."""
    picture = Picture(figsize=(13.0, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    sizes = list(dict.fromkeys(size for size, _ in curves))
    panels = picture.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for size, axes in zip(sizes, panels, strict=True):
        _panel(axes, size, {method: curve for (name, method), curve in curves.items() if name == size})
    panels[0].set_ylabel("share of the time that is computing")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside right upper", frameon=False)
    picture.suptitle("Utilisation of two datacentres over the bandwidth between them; dots: arXiv 2501.18512, table 4",
                     fontsize=12, fontweight="bold", x=0.01, ha="left")
    picture.savefig(path, format="png")


# Okabe and Ito (2008).
_COLOURS = ("#000000", "#E69F00", "#009E73", "#D55E00", "#0072B2")


def _panel(axes: Axes, size: str, curves: Mapping[str, Sequence[float]]) -> None:
    for method, colour in zip(METHODS, _COLOURS, strict=True):
        if method in curves:
            axes.plot(GRID, curves[method], color=colour, label=method)
            axes.plot(PAPER[size][list(METHODS).index(method)], TARGETS, "o", color=colour, markersize=4)
    axes.set_title(next(f"{known.name}, {known.step_s:g} s a step" for known in SIZES if known.name == size))
    axes.set_xscale("log")
    axes.set_xlabel("Gbit/s (log)")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
