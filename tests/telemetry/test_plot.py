"""The picture is a PNG of the promised size, whatever there is to draw."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from peer.telemetry.plot import HEIGHT_PIXELS, WIDTH_PIXELS, PlotEvent, PlotPoint, plot_run, smooth

SERIES = {"alpha": [(0.0, 5.5), (1.0, 4.0), (2.0, 3.0)], "bravo": []}
POINTS = [PlotPoint(time_s=0.0, round=0, loss=5.5), PlotPoint(time_s=2.0, round=1, loss=3.0)]
EVENTS = [PlotEvent(time_s=1.0, label="bravo killed")]


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.parametrize(
    ("series", "validation", "events"), [(SERIES, POINTS, EVENTS), ({}, [], []), (SERIES, POINTS[:1], [])]
)
def test_png_of_the_given_size(
    tmp_path: Path,
    series: dict[str, list[tuple[float, float]]],
    validation: list[PlotPoint],
    events: list[PlotEvent],
) -> None:
    plot_run(tmp_path / "loss.png", series, validation, events, "a run")
    assert png_size(tmp_path / "loss.png") == (WIDTH_PIXELS, HEIGHT_PIXELS) == (1320, 600)


def test_smoothing_starts_at_the_first_value_and_follows() -> None:
    assert smooth([4.0]) == pytest.approx([4.0])
    assert smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    # (.7 * .3 * 1 + .3 * 0) / (1 - .7^2)
    assert smooth([1.0, 0.0])[1] == pytest.approx(0.21 / 0.51)
