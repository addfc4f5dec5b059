"""Small slices of the campaigns over namespaces: a partition that heals, links that are bad."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.network.chaos import links, partitions

pytestmark = pytest.mark.timeout(300)  # on busy cores each process takes its time to start


STREAMED = {"recipe": "name: streaming-diloco, compressor: int8, schedule: {num_fragments: 2}", "layers": 2}


@pytest.mark.parametrize("options", [{}, pytest.param({**STREAMED, "steps": 8}, marks=pytest.mark.long)], ids=str)
def test_a_partition_heals_and_whoever_yields_says_what_it_gives_up(tmp_path: Path, options: dict[str, Any]) -> None:
    # within how many rounds is a matter of how long they are: here they are shorter than finding one another again
    counts = partitions.run(tmp_path, trials=1, shares=((2, 2),), rounds_apart=1, **{"steps": 4, **options})
    assert counts["trials"] == counts["split"] == counts["yielded"] == counts["one_state"] == 1
    assert counts["unexplained_tokens"] == 0


def test_rounds_over_bad_links_end_by_their_deadline(tmp_path: Path) -> None:
    # with more loss, members refuse each other for minutes: that is the campaign's
    counts = links.run(tmp_path, conditions=("loss 2",), rounds=3, timeout_s=8)
    assert counts["conditions"] == counts["one_state"] == 1
    assert counts["late"] == 0, counts["late_ones"]
    assert counts["committed"] > 0


def test_a_round_that_failed_here_and_held_this_peers_contribution_is_given_up_with_the_others() -> None:
    def committed(round: int, lineage_id: str) -> SimpleNamespace:
        return SimpleNamespace(status="committed", round=round, lineage_id=lineage_id, members=("me", "it"),
                               weights=(64, 32), reason=None, snapshot_round=None)  # fmt: skip

    def yields(ours: int) -> SimpleNamespace:
        reason = f"dropped 2 rounds from 5 on, 192 tokens ({ours} ours)"
        return SimpleNamespace(status="caught_up", round=6, lineage_id="other", reason=reason, snapshot_round=6)

    other = SimpleNamespace(committed=[committed(5, "a"), committed(6, "b")])
    for ours, wrong in [(64, 0), (128, 0), (96, 32), (0, 64)]:
        records = [committed(5, "a"), yields(ours)]
        me: Any = SimpleNamespace(peer_id="me", records=records, committed=records[:1])
        assert partitions.unexplained(me, 0, [me, other]) == wrong


def test_seats_are_counted_once_a_round_that_was_committed() -> None:
    def record(status: str, lineage_id: str, members: str) -> Any:
        return SimpleNamespace(status=status, lineage_id=lineage_id, members=tuple(members))

    records = [record("committed", "a", "pqr"), record("committed", "a", "pqr"), record("aborted", "a", "pqrs")]
    assert links.seats([*records, record("committed", "b", "pqrs")]) == {"a": 3, "b": 4}
    row = {"condition": "loss 2", "late_ones": [], "longest_s": 1.0, "back_s": 0.1, "places": 8, "seats": 7}
    rows = [{**dict.fromkeys(("ended", "committed", "aborted", "late", "one_state"), 1), **row}]
    assert links.count(rows)["seats"] == {"loss 2": 7}
