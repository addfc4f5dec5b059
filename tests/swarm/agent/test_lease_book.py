"""Which shards a peer takes, keeps and gives up; the swarm of these tests is a dictionary of records."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from peer.protocol.coverage import SourceCoverage
from peer.protocol.data_spec import PARTS_PER_SHARD
from peer.protocol.ranges import MAX_LEASED, Range
from peer.swarm.agent.lease_book import LeaseBook, SeenLeases, lease_hash, parts_of

RUN = "run"
PATIENCE_S = 60.0


class Swarm:
    """Peers, their records, and one chain."""

    def __init__(self, shards: int, *peer_ids: str) -> None:
        self.chain, self.now = SourceCoverage(shards), 0.0
        self.records: dict[str, list[Range]] = {}
        self.books = {peer_id: LeaseBook(RUN, peer_id, PATIENCE_S) for peer_id in peer_ids}
        self.open: dict[str, list[Range]] = {peer_id: [] for peer_id in peer_ids}
        self.pending: dict[str, list[Range]] = {peer_id: [] for peer_id in peer_ids}
        self.number = 0

    def seen_by(self, peer_id: str) -> SeenLeases:
        seen = SeenLeases(self.chain.shards)
        seen.hear({other: one for other, one in self.records.items() if other != peer_id})
        return seen

    def update(self, peer_id: str, wanted: int = 2, *, publish: bool = True) -> tuple[list[Range], list[Range]]:
        book, self.number = self.books[peer_id], self.number + 1
        book.hear(self.open[peer_id], self.pending[peer_id], self.number - 1)
        taken, lost = book.update(self.chain, self.seen_by(peer_id), wanted, self.number, self.now)
        self.open[peer_id] = [piece for piece in self.open[peer_id] if piece not in lost] + taken
        if publish:
            self.records[peer_id] = book.leases
        return taken, lost

    def train(self, peer_id: str) -> None:
        """Of its first piece, to the end."""
        self.pending[peer_id].append(self.open[peer_id].pop(0))

    def commit(self, peer_id: str) -> int:
        """What it has trained is in the chain; -> parts that were there before."""
        again = sum(self.chain.add(*one) or 0 for one in self.pending[peer_id])
        self.pending[peer_id] = []
        return again


def piece(shard: int, epoch: int = 0) -> Range:
    return Range(epoch, *parts_of(shard))


def shards_in(pieces: list[Range]) -> list[int]:
    return [one.shard for one in pieces]


def test_peers_take_different_shards_and_hold_few_ranges() -> None:
    swarm = Swarm(1000, *"abcdefgh")
    for peer_id in swarm.books:
        swarm.update(peer_id, wanted=4)
    held = [shard for pieces in swarm.open.values() for shard in shards_in(pieces)]
    assert len(set(held)) == len(held) == 32
    for peer_id in swarm.books:
        first, *others = shards_in(swarm.open[peer_id])
        assert others == [first + 1, first + 2, first + 3]


def test_many_peers_that_look_at_the_same_moment_seldom_take_the_same_shard() -> None:
    names = [f"peer{number}" for number in range(200)]
    swarm = Swarm(10_000, *names)
    for shard in range(0, 10_000, 20):  # no row of free shards is longer than another
        swarm.chain.add(0, *parts_of(shard))
    taken = [swarm.update(name, wanted=1, publish=False)[0][0].shard for name in names]
    assert len(set(taken)) >= 195


def test_of_two_leases_of_a_shard_the_lower_hash_stands() -> None:
    swarm = Swarm(10, "a", "b")
    swarm.open = {"a": [piece(3), piece(4)], "b": [piece(4), piece(3)]}
    for peer_id in "ab":
        swarm.update(peer_id, wanted=0)
    for shard in (3, 4):
        winner = min("ab", key=lambda peer_id: lease_hash(RUN, (0, shard), peer_id))
        loser = "b" if winner == "a" else "a"
        swarm.update(winner, wanted=0)
        swarm.update(loser, wanted=0)
        assert piece(shard) in swarm.open[winner]
        assert piece(shard) not in swarm.open[loser]


def test_a_shard_is_held_until_the_chain_holds_it_and_then_let_go() -> None:
    swarm = Swarm(10, "a")
    (first, second), _ = swarm.update("a")
    swarm.train("a")
    swarm.update("a")
    assert {one.first for one in swarm.records["a"]} == {first.shard, second.shard, *shards_in(swarm.open["a"])}
    swarm.commit("a")
    swarm.update("a")
    assert first.shard not in [shard.first for shard in swarm.records["a"]]


def test_what_a_dead_peer_left_is_free_from_where_the_chain_shows() -> None:
    swarm = Swarm(1, "a", "b")
    swarm.update("a")
    swarm.chain.add(0, 0, 5)
    assert swarm.update("b") == ([], [])
    del swarm.records["a"]  # it has expired, or its peer has left
    assert swarm.update("b")[0] == [Range(0, 5, PARTS_PER_SHARD)]


def test_parts_that_others_have_certified_are_given_up() -> None:
    swarm = Swarm(2, "a")
    swarm.update("a")
    swarm.chain.add(0, *parts_of(1))
    _, lost = swarm.update("a")
    assert lost == [piece(1)]


def test_a_resumed_peer_keeps_what_no_other_has_trained_meanwhile() -> None:
    swarm = Swarm(10, "a")
    half = Range(0, 2 * PARTS_PER_SHARD + 4, 3 * PARTS_PER_SHARD)
    swarm.open["a"] = [half, piece(5), piece(7)]  # of its checkpoint
    swarm.chain.add(0, 2 * PARTS_PER_SHARD, half.first)  # its own
    swarm.chain.add(0, *parts_of(5))
    swarm.chain.add(0, 7 * PARTS_PER_SHARD + 8, 7 * PARTS_PER_SHARD + 9)
    _, lost = swarm.update("a", wanted=0)
    assert lost == [piece(5), piece(7)]
    assert swarm.open["a"] == [half]
    swarm.chain.add(0, half.first, half.first + 2)  # what it trains now is in the chain, and changes nothing
    assert swarm.update("a", wanted=0)[1] == []


def test_the_next_epoch_begins_when_nothing_is_free_and_half_is_covered() -> None:
    swarm = Swarm(4, "a", "b")
    swarm.update("a", wanted=4)
    assert swarm.update("b") == ([], [])  # nothing is free, and no claim of the next epoch would be believed
    swarm.train("a")
    swarm.train("a")
    swarm.commit("a")
    taken, _ = swarm.update("b", wanted=1)
    assert [one.epoch for one in taken] == [1]


def test_a_lease_that_does_not_advance_is_taken_over_only_when_nothing_is_free() -> None:
    swarm = Swarm(3, "a")
    swarm.records["slow"] = [Range(0, 1, 2)]
    for _ in range(2):
        swarm.update("a", wanted=1)
        swarm.train("a")
    swarm.commit("a")
    taken, _ = swarm.update("a", wanted=1)
    assert [one.epoch for one in taken] == [1]
    swarm.open["a"].clear()
    swarm.now = PATIENCE_S / 2
    swarm.chain.add(0, PARTS_PER_SHARD, PARTS_PER_SHARD + 1)  # it advances
    swarm.update("a", wanted=1)
    swarm.open["a"].clear()
    swarm.now = PATIENCE_S + 1
    assert [one.epoch for one in swarm.update("a", wanted=1)[0]] == [1]
    swarm.open["a"].clear()
    swarm.now = 2 * PATIENCE_S + 1
    assert swarm.update("a", wanted=1)[0] == [Range(0, PARTS_PER_SHARD + 1, 2 * PARTS_PER_SHARD)]
    assert swarm.update("a", wanted=1)[1] == []  # whatever its holder says now


def test_a_lease_of_an_earlier_epoch_is_taken_over_when_the_next_is_taken_too() -> None:
    swarm = Swarm(2, "a")
    swarm.chain.add(0, *parts_of(0))
    swarm.records["gone"] = [Range(0, 1, 2), Range(1, 0, 2)]
    for swarm.now in (0.0, PATIENCE_S / 2):
        assert swarm.update("a", wanted=1)[0] == []
    swarm.chain.add(1, 0, 1)  # the next epoch has begun: both are looked through each time
    for swarm.now in (PATIENCE_S, 1.1 * PATIENCE_S):
        swarm.open["a"].clear()
        assert swarm.update("a", wanted=1)[0] == [piece(1)]


def test_a_peer_that_leases_everything_holds_sixteen_shards() -> None:
    swarm = Swarm(1000, "a")
    swarm.records["greedy"] = [Range(0, 0, 1000), Range(1, 0, 1000)]
    assert swarm.seen_by("a").mask(0).sum() == MAX_LEASED
    for _ in range(1000 - MAX_LEASED):
        swarm.update("a", wanted=1)
        swarm.train("a")
        swarm.commit("a")
    assert swarm.chain.epochs[0].covered == (1000 - MAX_LEASED) * PARTS_PER_SHARD
    while not swarm.chain.epochs[0].done.all():
        swarm.update("a", wanted=1)
        swarm.open["a"].clear()
        swarm.now += PATIENCE_S
        if swarm.update("a", wanted=1)[0][0].epoch == 0:
            swarm.train("a")
            swarm.commit("a")
    assert swarm.chain.sums()[0].again == 0


def test_a_peer_holds_no_more_than_others_believe() -> None:
    swarm = Swarm(100, "a")
    for _ in range(30):
        swarm.update("a", wanted=8)
        if swarm.open["a"]:
            swarm.train("a")
    assert sum(one.end - one.first for one in swarm.records["a"]) == MAX_LEASED


def test_an_answer_that_the_trainer_has_not_heard_of_is_kept() -> None:
    swarm = Swarm(10, "a")
    book = swarm.books["a"]
    book.hear([], [], 0)
    taken, _ = book.update(swarm.chain, swarm.seen_by("a"), 2, 1, 0.0)
    book.hear([], [], 0)  # sent before
    assert book.update(swarm.chain, swarm.seen_by("a"), 2, 2, 0.0) == ([], [])
    book.hear([], [], 1)  # it knows, and does not want them: its progress was dropped
    assert len(taken) == len(book.update(swarm.chain, swarm.seen_by("a"), 2, 2, 0.0)[0]) == 2


@pytest.mark.parametrize("seed", range(3))
def test_kills_joins_and_stale_records_lose_no_shard(seed: int) -> None:
    rng, names = random.Random(seed), iter(f"peer{number}" for number in range(1000))
    swarm = Swarm(60, *(next(names) for _ in range(6)))
    alive, again = list(swarm.books), Counter[str]()
    while not swarm.chain.epochs[0].done.all():
        swarm.now += 1.0
        peer_id = rng.choice(alive)
        swarm.update(peer_id, publish=rng.random() < 0.5)  # a record that others read later
        if swarm.open[peer_id] and rng.random() < 0.7:
            swarm.train(peer_id)
        if rng.random() < 0.3:
            again[peer_id] += swarm.commit(peer_id)
        if rng.random() < 0.03:
            alive.remove(peer_id)
            swarm.records.pop(peer_id, None)
            newcomer = next(names)
            alive.append(newcomer)
            swarm.books[newcomer] = LeaseBook(RUN, newcomer, PATIENCE_S)
            swarm.open[newcomer], swarm.pending[newcomer] = [], []
        assert swarm.now < 5000
    sums = swarm.chain.sums()[0]
    assert (sums.never, sums.again) == (0, again.total() if len(swarm.chain.epochs) == 1 else sums.again)
