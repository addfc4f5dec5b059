"""What the benchmark of shaped links makes of its samples."""

from __future__ import annotations

import pytest

from benchmarks.links import SHARE, build_parser, draw, figures, line, measure
from peer.errors import UserError


def measured(what: str = "node, TCP, 1 stream", mbit: int = 100, of_line: float = 0.95, plain: float | None = 96.0):
    payload = mbit * of_line
    return {
        "mbit": mbit, "rtt_ms": 50.0, "what": what, "payload_mbit": payload, "of_line": of_line,
        "of_plain": payload / plain if plain else None, "peers_cpu_seconds": 1.5, "relay_cpu_seconds": 0.25,
        "load_average_1_min": 3.14,
    }  # fmt: skip


def test_a_row_as_text() -> None:
    assert line(measured()) == ("100", "50", "node, TCP, 1 stream", "95.0", "95%", "99%", "1.50", "0.25", "3.1")
    assert line(measured(plain=None))[5] == "-"


def test_the_goals_are_for_what_peers_use() -> None:
    rows = [measured("exchange"), measured("state transfer", of_line=0.89), measured(), measured("TCP")]
    assert [figure.limit for figure in figures(rows)] == [SHARE, SHARE, None, None]
    assert [figure.met for figure in figures(rows)] == [True, False, None, None]


def test_a_picture_is_drawn(tmp_path) -> None:
    draw(tmp_path / "plot.png", [measured(), measured("TCP"), measured(mbit=500)])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", ["--repeats 0", "--mbit 0", "--buffer-mib 0"])
def test_numbers_out_of_range(words: str) -> None:
    with pytest.raises(UserError, match="must be at least"):
        measure(build_parser().parse_args(words.split()), print)
