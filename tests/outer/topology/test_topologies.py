"""Who averages with whom."""

from __future__ import annotations

import itertools
import math

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import UserError
from peer.outer.topology.topologies import (
    AllPeers,
    BandwidthMatching,
    Groups,
    Links,
    Neighbours,
    RandomPairs,
    Topology,
)

ALL: list[Topology] = [
    AllPeers(),
    RandomPairs(),
    RandomPairs(odd="triple"),
    Groups(size=2),
    Groups(size=3),
    Neighbours(graph="ring"),
    Neighbours(graph="torus"),
    BandwidthMatching(),
    BandwidthMatching(quantile=0.8, refresh=3),
]
members_of = st.lists(st.integers(0, 15), unique=True, max_size=12)


def links_of(size: int, seed: int = 0) -> Links:
    rates = torch.rand(size, size, generator=torch.Generator().manual_seed(seed)).add(0.01).tolist()
    return Links(up=(10.0,) * size, down=(10.0,) * size, pair=tuple(map(tuple, rates)))


def averaged(topology: Topology, rounds: range, values: dict[int, float], seed: int = 5) -> dict[int, float]:
    for round in rounds:
        for group in topology.groups(round, list(values), seed, None):
            mean = math.fsum(values[member] for member in group) / len(group)
            values |= dict.fromkeys(group, mean)
    return values


def connected(members: list[int], edges: list[tuple[int, ...]]) -> bool:
    graph = networkx.Graph()
    graph.add_nodes_from(members)
    for group in edges:
        networkx.add_path(graph, group)
    return networkx.is_connected(graph)


@pytest.mark.parametrize("topology", ALL, ids=repr)
@given(members=members_of, round=st.integers(0, 40), seed=st.integers(0, 2**31), measured=st.booleans())
@settings(max_examples=40)
def test_groups_partition_the_members_and_do_not_depend_on_their_order(
    topology: Topology, members: list[int], round: int, seed: int, measured: bool
) -> None:
    links = links_of(16, seed % 100) if measured else None
    groups = topology.groups(round, members, seed, links)
    assert sorted(itertools.chain(*groups)) == sorted(members)
    assert groups == sorted(groups)
    assert all(group == tuple(sorted(group)) for group in groups)
    assert groups == topology.groups(round, members[::-1], seed, links)


def test_the_draw_is_the_same_on_every_platform() -> None:
    assert RandomPairs().groups(3, range(7), 1, None) == [(0, 1), (2, 3), (4, 5), (6,)]
    assert RandomPairs().groups(4, range(7), 1, None) == [(0, 6), (1, 5), (2, 3), (4,)]
    assert Groups(size=3).groups(0, range(9), 1, None) != Groups(size=3).groups(1, range(9), 1, None)
    ring = Neighbours(graph="ring")
    assert len({tuple(ring.groups(round, range(5), 1, None)) for round in range(50)}) == 5
    links = Links(up=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), down=(9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0))
    assert [BandwidthMatching(refresh=3).groups(round, range(7), 1, links) for round in range(3)] == [
        [(0,), (1, 6), (2, 5), (3, 4)],
        [(0, 1), (2, 4), (3, 5), (6,)],
        [(0, 4), (1, 3), (2, 6), (5,)],
    ]


@pytest.mark.parametrize(("odd", "sizes"), [("alone", [1, 2, 2]), ("triple", [2, 3])])
def test_an_odd_member_is_alone_or_in_a_triple(odd: str, sizes: list[int]) -> None:
    groups = RandomPairs(odd=odd).groups(0, range(5), 9, None)  # type: ignore[arg-type]
    assert sorted(map(len, groups)) == sizes
    assert RandomPairs(odd="triple").groups(0, [4], 9, None) == [(4,)]


def test_random_pairs_meet_everybody() -> None:
    met = {group for round in range(60) for group in RandomPairs().groups(round, range(6), 0, None)}
    assert len(met) == 15


@pytest.mark.parametrize(
    ("size", "count", "sides"),
    [(2, 8, (2, 2, 2)), (4, 16, (4, 4)), (4, 12, (4, 3)), (3, 12, (3, 2, 2)), (8, 5, (5,)), (3, 1, ())],
)
@pytest.mark.parametrize("first", [0, 1, 7])
def test_full_grids_mix_exactly_in_the_logarithm_of_the_rounds(
    size: int, count: int, sides: tuple[int, ...], first: int
) -> None:
    topology = Groups(size=size)
    assert topology.sides(count) == sides
    assert len(sides) == math.ceil(math.log(count, size) - 1e-9)
    values = averaged(topology, range(first, first + len(sides)), {member: 3.0 * member**2 for member in range(count)})
    mean = 3.0 * sum(member**2 for member in range(count)) / count
    assert list(values.values()) == pytest.approx([mean] * count, rel=1e-12)


@given(count=st.integers(1, 40), size=st.integers(2, 9), round=st.integers(0, 20))
def test_grid_groups_are_never_too_large(count: int, size: int, round: int) -> None:
    assert max(map(len, Groups(size=size).groups(round, range(count), 0, None))) <= size


@given(count=st.integers(2, 11))
@settings(max_examples=10)
def test_partly_filled_grids_converge_to_the_mean(count: int) -> None:
    values = averaged(Groups(size=3), range(300), {member: float(member) for member in range(count)})
    assert list(values.values()) == pytest.approx([(count - 1) / 2] * count, abs=1e-6)


def test_ring_and_torus_edges() -> None:
    assert Neighbours(graph="ring").edges([7, 1, 3, 9]) == [(1, 3), (1, 9), (3, 7), (7, 9)]
    assert Neighbours(graph="ring").edges([2, 5]) == [(2, 5)]
    assert Neighbours(graph="ring").edges([2]) == []
    torus = Neighbours(graph="torus").edges(range(12))
    assert len(torus) == 24
    assert (0, 4) in torus
    assert (0, 8) in torus
    assert (0, 3) in torus
    assert Neighbours(graph="torus").edges(range(7)) == Neighbours(graph="ring").edges(range(7))


@pytest.mark.parametrize("graph", ["ring", "torus"])
@given(count=st.integers(2, 16), round=st.integers(0, 100))
def test_neighbours_draw_a_maximal_matching_of_the_graph(graph: str, count: int, round: int) -> None:
    topology = Neighbours(graph=graph)  # type: ignore[arg-type]
    edges, groups = topology.edges(range(count)), topology.groups(round, range(count), 3, None)
    pairs = [group for group in groups if len(group) == 2]
    alone = {member for group in groups if len(group) == 1 for member in group}
    assert set(pairs) <= set(edges)
    assert not any(set(edge) <= alone for edge in edges)


def test_every_edge_is_drawn() -> None:
    topology = Neighbours(graph="torus")
    drawn = {group for round in range(60) for group in topology.groups(round, range(9), 0, None) if len(group) == 2}
    assert drawn == set(topology.edges(range(9)))


@given(
    count=st.integers(2, 11),
    refresh=st.integers(1, 6),
    quantile=st.sampled_from([0.0, 0.5, 0.9]),
    window=st.integers(0, 3),
    seed=st.integers(0, 50),
)
@settings(max_examples=60)
def test_the_pairs_of_every_window_connect_all(
    count: int, refresh: int, quantile: float, window: int, seed: int
) -> None:
    topology = BandwidthMatching(quantile=quantile, refresh=refresh)
    links, rounds = links_of(count, seed), max(refresh, math.ceil(math.log2(count)))
    used = [
        group
        for round in range(window * rounds, (window + 1) * rounds)
        for group in topology.groups(round, range(count), seed, links)
    ]
    assert connected(list(range(count)), used)


def test_slow_links_serve_only_to_connect_the_window() -> None:
    # Two islands of three with fast links inside, slow ones between: 6 of 15 pairs are fast.
    pair = tuple(tuple(100.0 if (a < 3) == (b < 3) else 1.0 for b in range(6)) for a in range(6))
    links = Links(up=(1000.0,) * 6, down=(1000.0,) * 6, pair=pair)
    topology = BandwidthMatching(quantile=0.6, refresh=10)
    slow = []
    for round in range(20):
        pairs = [group for group in topology.groups(round, range(6), 0, links) if len(group) == 2]
        slow += [round for a, b in pairs if (a < 3) != (b < 3)]
        assert len(pairs) >= 2
    assert set(slow) <= {8, 9, 18, 19}
    assert {round // 10 for round in slow} == {0, 1}


def test_links_between_members_are_as_fast_as_their_slowest_part() -> None:
    links = Links(up=(5.0, 9.0), down=(7.0, 3.0), pair=((0.0, 2.0), (4.0, 0.0)))
    assert (links.both_ways(0), links.both_ways(1), links.between([0, 1])[0, 1]) == (5.0, 3.0, 2.0)
    assert Links(up=(5.0, 9.0), down=(7.0, 3.0)).between([1, 0])[0, 1] == 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links(up=(1.0,), down=()), "1 up and 0 down"),
        (lambda: Links(up=(0.0,), down=(1.0,)), "0.0 bytes/s: must be finite and above 0"),
        (lambda: Links(up=(1.0, 1.0), down=(1.0, 1.0), pair=((1.0, 1.0),)), "must be 2 rows of 2"),
        (lambda: RandomPairs(odd="both"), "odd='both'"),  # type: ignore[arg-type]
        (lambda: Groups(size=1), "group_size=1: must be at least 2"),
        (lambda: Neighbours(graph="star"), "graph='star'"),  # type: ignore[arg-type]
        (lambda: BandwidthMatching(quantile=1.0), r"quantile=1.0: must be in \[0, 1\)"),
        (lambda: BandwidthMatching(refresh=0), "refresh=0: must be at least 1"),
        (lambda: BandwidthMatching().groups(0, [0, 5], 0, links_of(3)), "member 5: links describe only 0 to 2"),
    ],
)
def test_what_cannot_work_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=message) as error:
        make()
    assert error.value.hint
