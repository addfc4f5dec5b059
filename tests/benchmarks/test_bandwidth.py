"""The published table's grid, what a curve says about it, and one cell from the simulator."""

from __future__ import annotations

import pytest

from benchmarks import bandwidth
from benchmarks.bandwidth import GRID, Cell
from benchmarks.figures import BenchReport, describe_machine
from benchmarks.table import section
from peer.errors import UserError
from peer.outer.state.flat_layout import FlatLayout
from peer.sim.campaign.plan import load_task, meta_layout
from peer.sim.forecast.published_bandwidth import PAPER, SIZES, TARGETS, Size

TOY = Size(name="toy", layers=6, step_s=2.0)
TOY_LAYOUT = FlatLayout(
    names=tuple(f"layers.{index}.w" for index in range(6)), shapes=((10**6,),) * 6,
    offsets=tuple(range(0, 6 * 10**6, 10**6)), numel=6 * 10**6,
)


def cell(needed: float, ours: int, published: float) -> Cell:
    return Cell(size="1B", method="DiLoCo", target=0.9, needed=needed, ours=ours, published=published)


def test_the_grid_has_every_bandwidth_of_the_paper() -> None:
    assert len(GRID) == 50
    assert (GRID[0], GRID[-1]) == (0.1, 1000.0)
    for published in (value for rows in PAPER.values() for row in rows for value in row):
        assert GRID[bandwidth.nearest(published)] == pytest.approx(published, abs=0.06)


def test_steps_are_counted_on_the_grid_and_distances_off_it() -> None:
    place = bandwidth.nearest(13.3)
    assert cell(GRID[place + 1], place + 1, 13.3).steps == 1
    assert cell(GRID[place] * bandwidth.STEP**0.25, place + 1, 13.3).distance == pytest.approx(0.25)
    assert cell(GRID[place - 2], place - 2, 13.3).distance == pytest.approx(-2.0)


def test_a_curve_crosses_a_target_between_two_bandwidths() -> None:
    curve = [0.0] * 10 + [0.4, 0.6] + [1.0] * 38
    gbit_s, place = bandwidth.needed(curve, 0.5)
    assert place == 11
    assert gbit_s == pytest.approx((GRID[10] * GRID[11]) ** 0.5)
    assert bandwidth.needed(curve, 0.6) == (pytest.approx(GRID[11]), 11)
    assert bandwidth.needed([1.0] * 50, 0.5) == (GRID[0], 0)
    with pytest.raises(UserError, match="95% needs more than 1000 Gbit/s"):
        bandwidth.needed([0.9] * 50, 0.95)


def test_the_models_have_the_parameters_and_layers_of_the_table() -> None:
    for size in SIZES:
        manifest = load_task(size.manifest)
        assert manifest.model.config["num_hidden_layers"] == size.layers
        assert meta_layout(manifest).numel == pytest.approx(float(size.name[:-1]) * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "late_s"),
    [
        # A layer takes 16 Mbit / 32 Mbit/s = 0.5 s. Its passes backward take 2/9 s, those forward half as much.
        ("data-parallel", 100 * (6 * 0.5 - 5 * 2 / 9)),
        ("DiLoCo", 6 * 0.5 - 5 * 2 / 9),
        # Fragment 0 has layers 0, 2, 4, sent 8/9, 4/9, 0 s before the end; fragment 1 those above, needed 1/9 s later.
        ("streaming", 1.5 - 8 / 9 + 1.5 - 10 / 9 - 1 / 9),
        ("+ overlap", 0.0),
    ],
)
def test_one_cell_by_hand(method: str, late_s: float) -> None:
    share = bandwidth.utilisation(TOY, TOY_LAYOUT, method, 0.032)
    assert share == pytest.approx(200 / (200 + late_s))


def test_four_bits_and_their_scales_take_a_quarter_of_the_time() -> None:
    slow = 0.002
    wide = bandwidth.utilisation(TOY, TOY_LAYOUT, "+ overlap", slow)
    narrow = bandwidth.utilisation(TOY, TOY_LAYOUT, "+ FP4", slow * 4.125 / 16)
    assert narrow == pytest.approx(wide, rel=1e-3)
    assert narrow < 0.9


def test_the_table_stands_beside_the_papers() -> None:
    curve = [k / 49 for k in range(50)]
    cells = bandwidth.table({("1B", "DiLoCo"): curve})
    assert [cell.published for cell in cells] == list(PAPER["1B"][1])
    header, row = bandwidth.rows(cells)
    assert header == ("model", "method", "50%", "80%", "90%", "95%", "99%")
    assert row[:3] == ("1B", "DiLoCo", f"{GRID[25]:.1f} / 1.4 (+11)")
    assert len(row) == 2 + len(TARGETS)
    figures = {figure.name: figure for figure in bandwidth.figures(cells)}
    assert figures["cells within one grid step of the paper"].met is False
    assert figures["fp4 on the wire"].value == 4.125
    report = BenchReport(
        name="bandwidth", about="One against another", seed=3, figures=(), samples={}, machine=describe_machine(),
        table=(header, row), notes="How to read it.",
    )
    lines = section("bandwidth", report.to_dict(), picture=True).splitlines()
    assert "| model | method | 50% | 80% | 90% | 95% | 99% |" in lines
    assert "How to read it." in lines
    assert "![bandwidth](bandwidth.png)" in lines


def test_the_picture_is_drawn(tmp_path) -> None:
    bandwidth.draw(tmp_path / "b.png", {("1B", "DiLoCo"): [k / 49 for k in range(50)]})
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
