"""The picture of `atoll data coverage`: each source in each epoch as one row, coloured by how often it was read."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from peer.protocol.coverage import Coverage
from peer.protocol.data_spec import PARTS_PER_SHARD

COLUMNS = 1000
COLOURS = ("#eeeeee", "#0072B2", "#D55E00")  # Okabe and Ito, 2008: never, once, more often
NAMES = ("never", "once", "more often")


def draw_coverage(coverage: Coverage, title: str) -> bytes:
    """A PNG. Of a large source a column is several parts: `never` if one of them is, else the most frequent count."""
    rows = [
        (f"source {number + 1}, epoch {epoch}", _row(source.epochs[epoch].counts), source.shards)
        for number, source in enumerate(coverage.sources) if source.shards for epoch in sorted(source.epochs)
    ]  # fmt: skip
    figure = Figure(figsize=(11.0, 1.2 + 0.8 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    places = figure.subplots(max(1, len(rows)), 1, squeeze=False)[:, 0]
    for axes, (name, row, shards) in zip(places, rows, strict=False):
        axes.imshow(
            row[None], aspect="auto", cmap=ListedColormap(COLOURS), vmin=0, vmax=2, extent=(0, shards, 0, 1),
            interpolation="nearest",
        )  # fmt: skip
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_yticks([])
    handles = [Patch(color=colour, label=f"trained on {name}") for colour, name in zip(COLOURS, NAMES, strict=True)]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _row(counts: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    columns = min(COLUMNS, len(counts) // PARTS_PER_SHARD or 1)
    edges = np.linspace(0, len(counts), columns, endpoint=False).astype(int)
    least, most = np.minimum.reduceat(counts, edges), np.maximum.reduceat(counts, edges)
    return np.where(least == 0, 0, np.minimum(most, 2)).astype(np.uint8)
