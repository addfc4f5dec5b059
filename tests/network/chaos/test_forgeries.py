"""Slices of the campaigns of forged lineages and of manifests that ask too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.chaos import asks, forgeries


@pytest.mark.timeout(400)
def test_no_honest_peer_stands_on_a_forged_lineage(tmp_path: Path) -> None:
    counts = forgeries.run(tmp_path, trials=len(forgeries.VARIANTS), seed=5, watch_s=4.0)
    assert min(counts["trials_by_variant"].values()) == 1, counts
    assert (counts["taken_over"], counts["signed_by_the_bootstrap"], counts["without_a_round"]) == (0, 0, 0), counts
    assert counts["claims_of_the_end"] >= 1
    assert counts["links_forged"] >= 20 * len(forgeries.VARIANTS)


@pytest.mark.timeout(300)
def test_join_refuses_what_a_manifest_may_not_ask(tmp_path: Path) -> None:
    names = ("a folder of the volunteer as data", "bart with a billion decoder layers", "65,536 sequences a batch",
             "escape sequences in a key")  # fmt: skip
    counts = asks.run(tmp_path, names=names)
    assert (counts["asks"], counts["granted"]) == (len(names), 0), counts
