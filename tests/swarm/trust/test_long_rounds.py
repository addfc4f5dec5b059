"""Rounds that are committed, but that a member has made long: who gets no seat for it."""

from __future__ import annotations

import pytest

from peer.swarm.round.lateness import Waited
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.trust.debts import FACTOR
from tests.swarm.trust.stalled import FOUR, HONEST, LIAR, LOST_S, Books

BETWEEN_S = 1.0  # from the end of a long round to the next one's begin
COST_S = LOST_S + STANDARD.least_waste_s  # of one that is late: a group forms again


@pytest.mark.parametrize("stage", ["contribution", "reduced"])
def test_who_is_late_for_all_is_refused_from_its_second_time_on_and_shunned_by_none(stage):
    books = Books(*HONEST, x=25)
    for time in range(2):
        books.long(**dict.fromkeys(HONEST, f"{stage} x"))
        for owner in HONEST:
            assert books.refused(owner) == ({LIAR} if time else set())
    assert not any(books.books[owner].shuns(LIAR) for owner in HONEST)  # others may not have waited for it
    assert books.until_seated(LIAR) == pytest.approx(FACTOR * COST_S - LOST_S, abs=1.0)


@pytest.mark.parametrize("on_time", [0, 1, 3])
def test_who_is_late_now_and_then_costs_a_seventh_of_the_time_at_most(on_time):
    books, lost_s, began = Books(*HONEST, x=25), 0.0, 1000.0
    while books.clock.now < began + 3600.0:
        if LIAR in books.refused():
            books.clock.now += BETWEEN_S
            continue
        books.long(after_s=BETWEEN_S, **dict.fromkeys(HONEST, "reduced x"))
        lost_s += LOST_S
        books.clock.now += on_time * BETWEEN_S
    assert lost_s < 3600.0 / FACTOR + 2 * LOST_S


def test_who_was_late_once_is_seated_at_once_and_forgiven_after_seven_times_what_it_cost():
    books = Books(*HONEST, x=25)
    for _ in range(4):
        books.long(**dict.fromkeys(HONEST, "reduced x"))
        assert books.refused() == set()
        books.clock.now += FACTOR * COST_S


@pytest.mark.parametrize("word", ["contribution x", "by x"])
def test_who_waited_for_a_contribution_is_not_to_blame_for_its_shard(word):
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.long(a=word, b="reduced a", c="reduced a", x="reduced a")
    assert books.refused("b") == books.refused("c") == {LIAR}
    assert books.refused("a") == ({LIAR} if word.startswith("contribution") else set())  # what cost it nothing is none


def test_who_blames_another_for_its_own_shard_gains_no_more_than_where_a_round_fails():
    late, failed = Books(*HONEST, x=25), Books(*HONEST, x=25)
    for _ in range(2):
        late.long(a="reduced x", b="reduced x", c="reduced x", x="contribution a")
        failed.fail(a="reduced x", b="reduced x", c="reduced x", x="contribution a")
    for owner in HONEST:
        assert late.refused(owner) == failed.refused(owner)


def test_a_word_on_a_member_for_which_nobody_else_waited_counts_nowhere():
    books = Books(*HONEST, x=25)
    for _ in range(10):
        books.long(x="contribution a")  # no other waited
        books.long(b="reduced c", x="contribution a")  # or for another member
    assert not any("a" in books.refused(owner) for owner in HONEST)
    assert not books.books["a"].refuses(LIAR)


def test_two_members_late_for_one_other_each_are_no_cut_of_the_network():
    books = Books(*HONEST, x=25)
    for _ in range(2):
        books.long(a="contribution x", b="contribution c")
    assert books.refused("a") == {LIAR}
    assert books.refused("b") == {"c"}


def test_a_newcomer_may_be_late_once():
    books = Books(*HONEST, x=1)
    books.long(**dict.fromkeys(HONEST, "contribution x"))
    assert books.refused() == set()
    books.long(**dict.fromkeys(HONEST, "contribution x"))
    assert books.refused() == {LIAR}


def test_newcomers_that_are_late_one_after_the_other_keep_fresh_ones_out_for_a_while():
    books = Books(*HONEST, x=1, **{f"x{number}": 0 for number in range(3)})
    books.long(**dict.fromkeys(HONEST, "contribution x"))
    assert all(books.books[owner].refuses("x0") for owner in HONEST)
    books.clock.now += STANDARD.fresh_pause_s
    assert not any(books.books[owner].refuses("x0") for owner in HONEST)


def test_of_two_members_none_is_to_blame():
    books = Books("a", members=("a", "x"))
    for _ in range(4):
        books.long(a="contribution x")
    assert books.refused() == set()


def test_who_is_late_at_both_stages_of_a_round_was_late_once():
    books = Books(*HONEST)
    late = {LIAR: 3.0}
    for owner, book in books.books.items():
        said = Waited(dict.fromkeys(late, 0.0), dict.fromkeys(late, 0.0))
        book.waited(FOUR, Waited(late, late), {other: said for other in HONEST if other != owner})
        assert books.refused(owner) == set()
        debt_s = FACTOR * (3.0 + 3.0 + STANDARD.least_waste_s)
        assert book._debts.left_s(frozenset({LIAR})) == pytest.approx(debt_s)
