"""A slice of the campaign of members that stall: one that was known before, and fresh ones one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.chaos import stalls

LEAST_KNOWN, LEAST_FRESH = 50.0, 25.0  # percent of the round rate; the campaign asks for 80 and 50 over longer times


@pytest.mark.timeout(400)
def test_a_member_that_stalls_costs_little_and_so_do_fresh_ones(tmp_path: Path) -> None:
    counts = stalls.run(tmp_path / "swarm", seconds=20.0, hows=("reduced",))
    assert counts["share_known"] >= LEAST_KNOWN, counts
    assert counts["share_fresh"] >= LEAST_FRESH, counts
    assert counts["fresh_identities"] >= 1, counts
    assert counts["digests_compared"] > 0, counts
    assert counts["digest_mismatches"] == 0, counts
