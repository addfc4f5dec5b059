"""The order of the slices."""

from __future__ import annotations

import pytest

LONGEST_FIRST = (
    "test_no_honest_peer_stands_on_a_forged_lineage",
    "test_floods_cost_little_memory_give_it_back_and_hide_no_peer",
    "test_a_member_that_stalls_costs_little_and_so_do_fresh_ones",
    "test_secrets_stay_where_they_are_and_hostile_strings_are_text",
    "test_honest_peers_go_on_under_attack",
    "test_newcomers_find_the_members_in_a_crowd",
    "test_join_refuses_what_a_manifest_may_not_ask",
    "test_a_partition_heals_and_whoever_yields_says_what_it_gives_up",
)
"""Each of these takes from 40 s to 110 s: no worker is left with one when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort those of this folder."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.name.partition("[")[0], len(place)))
