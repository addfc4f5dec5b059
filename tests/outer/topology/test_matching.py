"""Matchings of graphs."""

from __future__ import annotations

import itertools

import networkx
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.outer.topology.matching import maximum_matching


@given(edges=st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda edge: edge[0] < edge[1])))
@settings(max_examples=300)
def test_matchings_are_valid_and_as_large_as_those_of_networkx(edges: set[tuple[int, int]]) -> None:
    pairs = maximum_matching(sorted(edges))
    assert {tuple(sorted(pair)) for pair in pairs} <= edges
    assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)
    assert len(pairs) == len(networkx.max_weight_matching(networkx.Graph(list(edges)), maxcardinality=True))
