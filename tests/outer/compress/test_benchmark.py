"""The benchmark of the codecs: every row complete, sizes and errors those of the codecs."""

from __future__ import annotations

import pytest

from benchmarks.codecs import EXPRESSIONS, LIMITS, build_parser, layered, measure, row
from peer.outer.compress.registry import codec


def test_a_report_has_a_row_for_every_codec() -> None:
    report = measure(build_parser().parse_args(["--megabytes", "1", "--repeats", "1"]), lambda _: None)
    rows = report.samples["rows"]
    assert [r["codec"] for r in rows] == list(EXPRESSIONS)
    assert all(r["numel"] == 1 << 18 and r["encode_gb_s"] > 0 and r["decode_gb_s"] > 0 for r in rows)
    limits = {f.name: f.limit for f in report.figures if f.limit is not None}
    assert limits == {f"{name}, {way}": limit for name, limit in LIMITS.items() for way in ("encode", "decode")}


def test_a_row_states_size_error_and_ratio() -> None:
    x = layered(64, seed=1)
    found = row("int8", x, repeats=1)
    assert found["wire_bytes"] == codec("int8").wire_bytes(x.numel())
    assert found["bits_per_value"] == 8.125
    assert 0.002 < found["relative_error"] < 0.01
    seconds = {name: values[0] for name, values in found["seconds"].items()}
    assert found["copy_ratio"] == pytest.approx(2 * seconds["copy"] / (seconds["encode"] + seconds["decode"]))
