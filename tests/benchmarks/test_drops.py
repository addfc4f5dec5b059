"""What counts as a dropped contribution."""

from __future__ import annotations

from benchmarks.drops import judged
from peer.outer.record import Drop, RoundRecord


def record(round: int, *dropped: Drop) -> RoundRecord:
    return RoundRecord(
        status="committed", round=round, lineage_id="a" * 64, members=("p", "q", "r", "s"), dropped=dropped
    )


def test_a_contribution_is_dropped_by_the_share_of_the_slices_that_it_was_left_out_of() -> None:
    half = Drop(peer_id="q", slices=1, of=2, reason="direction")
    found = judged([record(1), record(1, half), record(2), record(2, half, half.model_copy(update={"peer_id": "r"}))])
    assert found == {"rounds": 2, "judged": 16, "dropped": 1.5 / 16}
