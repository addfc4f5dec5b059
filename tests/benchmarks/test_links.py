"""What the benchmark of shaped links makes of its samples."""

from __future__ import annotations

import contextlib

import pytest

from benchmarks.figures import ResumableRows
from benchmarks.links import SECONDS_OF_LINE, Meter, ShapedLine, build_parser, exchange, kinds, measure
from benchmarks.links_report import SHARE, LinkRow, LinkSample, draw, figures, line
from peer.errors import UserError


def measured(what: str = "node, TCP, 1 stream", mbit: int = 100, of_line: float = 0.95, plain: float | None = 96.0):
    payload = mbit * of_line
    return LinkRow(
        mbit=mbit, rtt_ms=50.0, what=what, bytes=1, seconds=(1.0,), payload_mbit=payload, of_line=of_line,
        of_plain=payload / plain if plain else None, peers_cpu_seconds=1.5, relay_cpu_seconds=0.25,
        load_average_1_min=3.14,
    )  # fmt: skip


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


def test_rows_of_an_earlier_sitting_are_taken_over(tmp_path) -> None:
    path, said = tmp_path / "rows.jsonl", []
    arguments = build_parser().parse_args(f"--mbit 100 --streams 1 --resume {path}".split())
    kept = ResumableRows(LinkSample, path, {"seed": 17, "repeats": 3, "delay_ms": 25.0, "buffer_mib": 16})
    names = [what for what, _ in kinds(ShapedLine(100, arguments), arguments)]
    for number, what in enumerate(names):
        seconds = (1.0, 1.0 + number, 9.0)
        costs = {"peers_cpu_seconds": 1.0, "relay_cpu_seconds": 0.5, "load_average_1_min": 0.1}
        kept.keep(LinkSample(mbit=100, rtt_ms=50.0, what=what, bytes=10_000_000, seconds=seconds, **costs))
    report = measure(arguments, said.append)
    shares = [0.8 / (1 + number) for number in range(len(names))]
    assert [row["of_line"] for row in report.more["rows"]] == pytest.approx(shares)
    assert report.notes.endswith(f"Rows measured in an earlier session (`--resume`): {len(names)}.")
    assert len(said) == len(names) == 8


def test_an_exchange_sends_as_much_as_the_other_rows(monkeypatch) -> None:
    asked = []

    @contextlib.contextmanager
    def peers(*_):
        yield Meter(None, None, repeats=3)

    monkeypatch.setattr(Meter, "of", lambda meter, size, _: asked.append(meter.repeats * size))
    for mbit in (100, 500):
        line = ShapedLine(mbit, build_parser().parse_args([]))
        monkeypatch.setattr(line, "peers", peers)
        exchange(line)
        assert asked[-1] == pytest.approx(3 * line.bytes_of(SECONDS_OF_LINE), rel=0.02)


@pytest.mark.parametrize("words", ["--repeats 0", "--mbit 0", "--buffer-mib 0"])
def test_numbers_out_of_range(words: str) -> None:
    with pytest.raises(UserError, match="must be at least"):
        measure(build_parser().parse_args(words.split()), print)
