"""For how long a member that stalls gets no seat, what that costs the others, and what ends it."""

from __future__ import annotations

import itertools
import random

import pytest

from peer.swarm.round.giving_up import Lack
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.trust.debts import FACTOR, MAX_REMEMBERED
from peer.swarm.trust.stalls import GROUPS_KEPT, MISSED_IN_A_ROW, StallBook
from tests.swarm.trust.stalled import HONEST, LIAR, LOST_S, Books, Chain, Clock


def test_who_stalls_all_is_refused_from_the_second_time_on_for_longer_and_longer():
    books, waits = Books(*HONEST), []
    for _ in range(6):
        books.fail(**dict.fromkeys(HONEST, "contribution x"))
        assert all(books.refused(owner) <= {LIAR} for owner in HONEST)
        waits.append(books.until_seated(LIAR))
    assert waits[0] == 0.0
    assert waits[1] > 2 * FACTOR * LOST_S
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(waits[2:]))
    wasted = 4 * LOST_S
    assert wasted / (sum(waits) + wasted) < 0.05
    for _ in range(10):
        books.fail(**dict.fromkeys(HONEST, "contribution x"))
    assert books.until_seated(LIAR) <= STANDARD.longest_refusal_s


def test_a_machine_that_sleeps_now_and_then_is_back_at_once():
    books = Books(*HONEST)
    for _ in range(20):
        books.fail(**dict.fromkeys(HONEST, "contribution x"))
        assert books.refused() == set()
        books.commit()
        books.clock.now += FACTOR * LOST_S
    books.fail(**dict.fromkeys(HONEST, "contribution x"))
    books.commit()
    books.clock.now += 20.0
    books.fail(**dict.fromkeys(HONEST, "contribution x"))
    assert books.until_seated(LIAR) <= FACTOR * LOST_S - 20.0


def test_who_stalls_every_other_round_costs_a_seventh_of_the_time():
    books, began, stalls = Books("a"), Clock.now, 0
    while books.clock.now < began + 3600.0:
        books.fail(**dict.fromkeys(HONEST, "contribution x"))
        stalls += 1
        books.until_seated(LIAR)
        books.clock.now += 0.5
        books.commit()
    assert stalls * LOST_S / (books.clock.now - began) < 1 / 6


@pytest.mark.parametrize("missed", [False, True])
def test_rounds_that_a_peer_has_missed_count_too(missed):
    """Else it alone refused for ten minutes a peer that all others have let in again, and was in no round meanwhile."""
    books = Books("a")
    for _ in range(6):
        books.fail(**dict.fromkeys(HONEST, f"contribution {LIAR}"))
        if missed:
            books.books["a"].missed(("b", "c", LIAR))
            books.commit(HONEST)
    assert books.books["a"].shuns(LIAR) == (not missed)  # where another leads
    assert books.refused() == {LIAR}  # where it leads itself
    assert (books.until_seated(LIAR) > 6 * FACTOR * LOST_S) == (not missed)


def test_a_peer_that_misses_rounds_in_a_row_refuses_none_of_those_that_make_them():
    """It alone had seen them lead and form no group: it followed none of them, and was in no round for minutes."""
    book = StallBook("a", Chain(), STANDARD, Clock())
    for leader in ("b", "c", "x"):
        for _ in range(2):
            book.cost(leader, 20.0)
    for _ in range(MISSED_IN_A_ROW - 1):
        book.missed(("b", "c", "d"))
    book.committed(("a", "d"))
    for _ in range(MISSED_IN_A_ROW - 1):
        book.missed(("b", "c", "d"))
    assert [peer_id for peer_id in "bcdx" if book.refuses(peer_id)] == ["b", "c", "x"]
    book.missed(("b", "d"))
    assert [peer_id for peer_id in "bcdx" if book.refuses(peer_id)] == ["c", "x"]
    assert book.take_news() == {"c", "x"}
    book.cost("b", 20.0)  # what it owed it owes still
    assert book.refuses("b")


@pytest.mark.parametrize("accomplices", [0, 2])
def test_who_stalls_a_victim_that_others_do_without_gains_no_failures_by_the_victims_return(accomplices):
    """The victim, which the chain knows less, comes back after each few rounds that it has missed; the others refuse it
    for what the pair has cost.
    """
    members = (*(f"m{number}" for number in range(6 + accomplices)), LIAR)
    books, victim = Books(members=members, m0=15), "m0"
    honest = members[: len(members) - 1 - accomplices]
    began, failures = books.clock.now, 0
    while books.clock.now < began + 3600.0:
        against = sum(books.books[one].refuses(victim) for one in honest)
        if books.books[victim].refuses(LIAR) or 2 * against > len(honest):
            books.clock.now += LOST_S
            for one in honest[1:]:
                books.books[one].committed(frozenset(members) - {victim})
            books.books[victim].missed(frozenset(members) - {victim})
            continue
        shield = dict.fromkeys(members[len(honest) : -1], f"reduced {victim}")
        books.fail(**dict.fromkeys(honest[1:], f"reduced {victim}"), **shield, **{victim: f"contribution {LIAR}"})
        failures += 1
    assert failures * LOST_S < 0.03 * 3600.0


def test_fresh_peers_cost_one_round_a_minute_together():
    books = Books("a", x=0, y=0)
    books.fail(**dict.fromkeys(HONEST, "contribution x"))
    assert books.refused() == {LIAR}
    assert books.until_seated("y") >= STANDARD.fresh_pause_s - STANDARD.stall_words_s - 1.0
    books.fail(2.0, **dict.fromkeys(HONEST, "contribution b"))  # a known one
    assert not books.books["a"].refuses("y")


def test_what_this_peer_saw_itself_counts_at_once_when_it_is_not_the_first_time():
    book = StallBook("a", Chain(), STANDARD, Clock())
    book.cost("x", 4.0)
    assert not book.refuses("x")
    assert book.take_news() == set()
    book.cost("x", 4.0)
    assert book.refuses("x")
    assert book.take_news() == {"x"}
    assert book.take_news() == set()
    assert not book.shuns("x")


@pytest.mark.long
def test_no_number_of_failures_fills_the_memory():
    names = [f"m{number}" for number in range(64)]
    book, rng = StallBook("m0", Chain(), STANDARD, Clock()), random.Random(3)
    for number in range(400):
        for member in rng.sample(names, 3):
            book.told(str(number), names, member, Lack("contribution", frozenset(names)), LOST_S)
        book.settle(str(number))
    assert len(book._failures) == GROUPS_KEPT
    assert len(book._debts) <= MAX_REMEMBERED
    assert len(book._disputes) <= MAX_REMEMBERED


def test_a_leader_that_seats_a_shunned_peer_owes_it_only_once_it_was_told():
    books = Books("a")
    (book,) = books.books.values()
    for _ in range(2):
        books.fail(**dict.fromkeys(HONEST, "contribution x"))
    assert book.shuns(LIAR)
    book.seated("b", LIAR)
    assert book._debts.left_s(frozenset({"b"})) == 0.0
    book.seated("c", LIAR)  # another leader was not there either
    assert book._debts.left_s(frozenset({"c"})) == 0.0
    book.seated("b", LIAR)
    assert book._debts.left_s(frozenset({"b"})) == pytest.approx(FACTOR * STANDARD.least_waste_s)
    book.seated("b", "c")  # a seat for a peer in good standing costs nothing
    assert book._debts.left_s(frozenset({"b"})) == pytest.approx(FACTOR * STANDARD.least_waste_s)


def test_a_leader_leaves_out_the_one_that_several_members_decline():
    """Of equal standing, the one that explains several disputes."""
    books = Books("h", members=("h", "f", "g", "x"))
    for _ in range(2):
        books.fail(1.0, f="stream x", g="stream x")
    assert books.refused("h") == {"x"}


def test_a_newcomer_refuses_no_old_member_at_the_first_time():
    books = Books("a", "x", members=("a", "x"), x=3)
    books.fail(a="contribution x", x="contribution a")
    assert books.refused("x") == set()
    assert books.refused("a") == {"x"}
