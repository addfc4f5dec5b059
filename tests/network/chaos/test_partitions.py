"""Small slices of the campaigns over namespaces: a partition that heals, links that are bad."""

from __future__ import annotations

from pathlib import Path
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
    counts = links.run(tmp_path, conditions=("loss 5",), rounds=3, timeout_s=8)
    assert counts["conditions"] == counts["one_state"] == 1
    assert counts["late"] == 0, counts["late_ones"]
    assert counts["committed"] > 0
