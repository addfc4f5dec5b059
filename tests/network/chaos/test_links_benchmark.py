"""The benchmark of shaped links over a short one: real peers in namespaces, a state transfer and an exchange."""

from __future__ import annotations

import pytest

from benchmarks import links
from benchmarks.links import ShapedLine, build_parser, exchange, state
from peer.outer.compress.registry import compressor

NUMEL, MBIT = 1_000_000, 400


@pytest.mark.long
def test_state_transfers_and_exchanges_cross_the_line(monkeypatch):
    wire = compressor("int8").wire_bytes(NUMEL)
    monkeypatch.setattr(links, "EXCHANGED", NUMEL)
    monkeypatch.setattr(links, "SECONDS_OF_LINE", 2 * 8e-6 * wire / MBIT)
    line = ShapedLine(MBIT, build_parser().parse_args(["--repeats", "2", "--delay-ms", "5"]))
    for row, payload, transfers in ((state(line, 8 * NUMEL), 8 * NUMEL, 2), (exchange(line), wire, 4)):
        assert row.bytes == payload
        assert len(row.seconds) == transfers
        assert min(row.seconds) > 8e-6 * payload / MBIT  # no faster than the line
        assert row.relay_cpu_seconds > 0
