"""A slice of the campaign of members that stall: one that was known before, and fresh ones one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.chaos import stalls

LEAST_KNOWN, LEAST_FRESH = 80.0, 50.0  # percent of the round rate


@pytest.mark.timeout(400)
def test_a_member_that_stalls_costs_little_and_fresh_ones_no_more_than_half(tmp_path: Path) -> None:
    counts = stalls.run(tmp_path / "swarm", seconds=45.0, hows=("reduced",))
    assert counts["share_known"] >= LEAST_KNOWN, counts
    assert counts["share_fresh"] >= LEAST_FRESH, counts
    assert counts["fresh_identities"] >= 2, counts
    assert counts["digests_compared"] > 0, counts
    assert counts["digest_mismatches"] == 0, counts
