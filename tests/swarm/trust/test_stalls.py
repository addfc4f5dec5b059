"""Who stalls, by what the members of failed rounds said that they lacked."""

from __future__ import annotations

import itertools
import random

import pytest

from peer.swarm.round.giving_up import Lack
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.trust.debts import FACTOR
from tests.swarm.trust.stalled import FOUR, HONEST, LIAR, LOST_S, Books


@pytest.mark.parametrize("excuse", [None, "vote a b c", "contribution a"])
def test_who_withholds_what_it_reduced_is_refused_whatever_it_says(excuse):
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(**dict.fromkeys(HONEST, "reduced x"), **({"x": excuse} if excuse else {}))
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("rounds", [15, 25])
def test_who_stalls_one_member_alone_parts_company_with_it(says_so, rounds):
    books = Books(*HONEST, x=rounds)
    for _ in range(2):
        books.fail(a="contribution x", b="reduced a", c="reduced a", **({"x": "reduced a"} if says_so else {}))
    assert books.refused("a") == {LIAR}  # the victim knows
    # the others leave out the one that the chain knows less
    assert books.refused("b") == books.refused("c") == ({LIAR} if rounds < 20 else {"a"})


def test_who_picks_its_victims_one_by_one_is_found_out():
    books = Books(*HONEST, x=25)
    for victim in HONEST:
        others = {other: f"reduced {victim}" for other in FOUR if other != victim}
        books.fail(**{**others, victim: "contribution x"})
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}
        assert books.books[owner].shuns(LIAR)


@pytest.mark.parametrize("stage", ["stream", "join", "contribution", "reduced", "vote"])
def test_neither_one_nor_two_liars_of_four_get_an_honest_member_shunned(stage):
    for liars in (("x",), ("x", "c")):
        books = Books("a", "b")
        for _ in range(10):
            books.fail(**dict.fromkeys(liars, f"{stage} a"))
        for owner in ("a", "b"):
            assert not any(books.books[owner].shuns(peer_id) for peer_id in FOUR)


@pytest.mark.parametrize(("count", "liars"), [(5, 2), (8, 4), (16, 9), (33, 20)])
def test_up_to_two_thirds_of_the_others_name_nobody(count, liars):
    names = [f"m{number}" for number in range(count)]
    books = Books(names[-1], members=tuple(names))
    for _ in range(5):
        books.fail(**dict.fromkeys(names[:liars], f"contribution {names[-2]}"))
        assert not books.books[names[-1]].shuns(names[-2])
        books.clock.now += STANDARD.dispute_s


@pytest.mark.parametrize("near", ["h", "gh", "fgh", "efgh"])
def test_members_that_are_cut_off_together_refuse_none_of_each_other(near):
    members = tuple("abcdefgh")
    far = "".join(each for each in members if each not in near)
    rounds = {each: 20 + number for number, each in enumerate(members)}
    here, there = Books(*near, members=members, **rounds), Books(*far, members=members, **rounds)
    for _ in range(3):
        here.fail(**dict.fromkeys(near, f"contribution {' '.join(far)}"))
        there.fail(**dict.fromkeys(far, f"contribution {' '.join(near)}"))
    beyond = set(far) if len(near) == len(far) else set()  # no half is told by the numbers that it is the smaller one
    assert [here.refused(owner) for owner in near] == [beyond] * len(near)
    assert [there.refused(owner) for owner in far] == [set(near)] * len(far)


@pytest.mark.parametrize("others", [6, 14, 62])
@pytest.mark.parametrize("accomplice", [False, True])
def test_who_picks_its_victims_in_turn_costs_little_with_an_accomplice_that_makes_it_look_like_a_cut(
    others, accomplice
):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest, members=(*honest, LIAR, "y"))
    began, turns, failures = books.clock.now, itertools.cycle(range(others)), 0
    while books.clock.now < began + 3600.0:
        if 2 * sum(books.books[owner].refuses(LIAR) for owner in honest) >= others:
            books.clock.now += LOST_S  # it gets no seat, and the others make a round
            books.commit(honest)
            continue
        victim = next(turns)
        words = {"y": f"contribution {honest[(victim + others // 2) % others]}"} if accomplice else {}
        books.fail(**{honest[victim]: f"contribution {LIAR}"}, **words)
        failures += 1
    assert failures * LOST_S < 0.08 * 3600.0


@pytest.mark.parametrize(("others", "most"), [(3, 0.12), (7, 0.12), (15, 0.13), (31, 0.15)])
@pytest.mark.parametrize("training_s", [1.0, 30.0])
@pytest.mark.parametrize("all_first", [False, True])
@pytest.mark.parametrize("losses", [(LOST_S,), (9.0, 1.0), (9.0, *[1.0] * 8)], ids=len)
def test_who_stalls_each_victim_again_once_their_debt_has_passed_costs_an_eighth_of_the_time(
    others, most, training_s, all_first, losses
):
    """It stays below disputes with most; `all_first`: stalls all once its own debt has passed, which ends disputes.

    `losses`: of one victim after the other, again and again.
    """
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[:3], members=(*honest, LIAR), x=25)
    book, clock, lost_s, loss = books.books["m0"], books.clock, 0.0, itertools.cycle(losses)
    began, stalled_at = clock.now, dict.fromkeys(honest, 0.0)

    def passed(*peers):
        return book._debts.left_s(frozenset(peers)) < LOST_S

    while clock.now < began + 3600.0:
        disputes = {pair for pair in book._disputes if LIAR in pair}
        able = [victim for victim in honest if passed(victim, LIAR)
                and 3 * len({*disputes, frozenset({victim, LIAR})}) <= 2 * others]  # fmt: skip
        if books.refused("m0") or not (able or (all_first and passed(LIAR))):
            clock.now += training_s
            books.commit(tuple({*honest, LIAR} - books.refused("m0")))
        elif all_first and passed(LIAR):
            books.fail(**dict.fromkeys(honest, "contribution x"))
            lost_s += LOST_S
        else:
            victim = min(able, key=lambda each: stalled_at[each])
            stalled_at[victim], seconds = clock.now, next(loss)
            books.fail(seconds, **dict.fromkeys((*honest, LIAR), f"reduced {victim}") | {victim: "contribution x"})
            lost_s += seconds
    assert 0.01 < lost_s / (clock.now - began) < (most if len(losses) == 1 else most + 0.02)


@pytest.mark.parametrize("others", [3, 7, 15])
def test_who_stalls_all_and_then_half_of_them_costs_an_eighth_of_the_time(others):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[:3], members=(*honest, LIAR), x=25)
    book, clock, lost_s, half = books.books["m0"], books.clock, 0.0, honest[: (others + 1) // 2]
    began = clock.now
    while clock.now < began + 3600.0:
        debts = {frozenset({LIAR}): honest, frozenset({LIAR, half[0]}): half}
        able = [victims for owing, victims in debts.items() if book._debts.left_s(owing) < LOST_S]
        if able and not books.refused("m0"):
            books.fail(**dict.fromkeys(honest, f"reduced {half[0]}") | dict.fromkeys(able[0], "contribution x"))
            lost_s += LOST_S
        else:
            clock.now += 1.0
            books.commit(tuple({*honest, LIAR} - books.refused("m0")))
    assert 0.01 < lost_s / (clock.now - began) < 0.14


def test_a_short_failure_does_not_make_a_long_one_forgotten():
    books = Books("b", x=25)
    for lost_s in (9.0, 1.0):
        books.fail(lost_s, a="contribution x", b="reduced a", c="reduced a")
        books.commit()
    books.fail(5.0, c="contribution x", a="reduced c", b="reduced c")
    assert books.books["b"]._debts.left_s(frozenset({"c", "x"})) == FACTOR * (5.0 + 2 * 9.0)


def test_a_short_failure_owes_no_more_than_such_failures_with_most_members_would():
    """A member that two cuts had cost 18 s declined a group with another: that one had no seat for minutes."""
    books = Books("b", x=25)
    for _ in range(2):
        books.fail(9.0, a="contribution x", b="reduced a", c="reduced a")
        books.commit()
    books.fail(1.0, c="contribution x", a="reduced c", b="reduced c")
    most = 0.6 * len(FOUR) * 1.0
    assert books.books["b"]._debts.left_s(frozenset({"c", "x"})) == pytest.approx(FACTOR * (1.0 + 2 * most))


@pytest.mark.parametrize(("liars", "most"), [(2, 0.25), (3, 0.4)])
def test_liars_of_eight_keep_out_for_a_part_of_the_time_who_has_a_hiccup_every_two_minutes(liars, most):
    """Each liar accuses m0 again as soon as the debt of the two has passed, so that no member refuses the liar."""
    honest, bad = [f"m{number}" for number in range(8 - liars)], [f"x{number}" for number in range(liars)]
    members, rng = (*honest, *bad), random.Random(3)
    books = Books(honest[-1], members=members, m0=2000, **dict.fromkeys(bad, 15))
    (book,), clock, out_s, hiccup = books.books.values(), books.clock, 0.0, 0.0
    began = clock.now
    while clock.now < began + 3600.0:
        for liar in bad if not book.refuses("m0") else ():
            if book._debts.left_s(frozenset({liar, "m0"})) < 1.0 and not book.refuses(liar):
                books.fail(1.0, **{liar: "contribution m0"})
        if clock.now > hiccup and not book.refuses("m0"):
            hiccup = clock.now + rng.uniform(70.0, 170.0)
            books.fail(9.0, m0=f"contribution {rng.choice(honest[1:])}")
        clock.now += 10.0
        out_s += 10.0 * book.refuses("m0")
        books.commit(tuple(name for name in members if not book.refuses(name)))
    assert out_s < most * (clock.now - began)


@pytest.mark.parametrize("near", [4, 5, 6])
@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_is_cut_again_and_again_makes_no_member_refuse_one_of_its_side(near, seed):
    members, rng = tuple("abcdefgh"), random.Random(seed)
    books = Books(members=members)
    for cut in range(12):
        for side in sides(rng.sample(members, 8), near):
            far = " ".join(set(members) - set(side))
            first, *others = rng.sample(side, len(side))
            for owner in side:
                book = books.books[owner]
                for member in rng.sample([first, *others], len(side)):  # a word may come before the one that it names
                    lack = f"contribution {far}" if member == first or rng.random() < 0.5 else f"word {first}"
                    stage, *names = lack.split()
                    book.told(str(cut), members, member, Lack(stage, frozenset(names)), LOST_S)
                book.settle(str(cut))
                assert not books.refused(owner) & set(side), (cut, owner, side)
        books.clock.now += 2 * FACTOR * LOST_S
        books.commit(members)


def sides(members, near):
    return members[:near], members[near:]


def test_who_was_refused_before_is_refused_although_this_peer_is_cut_off_with_it():
    members = tuple("abcdefgh")
    books = Books("f", members=members)
    for _ in range(2):
        books.fail(**dict.fromkeys("abcdefg", "contribution h"))
    assert books.refused("f") == {"h"}
    books.fail(**dict.fromkeys("fgh", "contribution a b c d e"))
    assert books.refused("f") == {"h"}


def test_a_member_that_leaves_without_a_word_is_named_by_those_that_hear_of_it_from_others():
    books = Books(*HONEST)
    for _ in range(2):
        books.fail(2.0, a="word b", b="word c", c="stream x")
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}


def test_who_gives_up_and_blames_a_member_is_alone_in_dispute_with_it():
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(2.0, x="stream a", a="word x", b="word x", c="word x")
    assert [books.refused(owner) for owner in HONEST] == [{LIAR}] * 3
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(2.0, x="word a", a="word x", b="word x", c="word x")  # in a circle
    assert [books.refused(owner) for owner in HONEST] == [{LIAR}] * 3


def test_words_of_strangers_late_words_and_second_thoughts_do_not_count():
    books = Books("a")
    (book,) = books.books.values()
    for number in range(4):
        for member in ("y", "z", "x", "x"):
            book.told(str(number), FOUR, member, Lack("contribution", frozenset({"b", "stranger"})), LOST_S)
        book.settle(str(number))
        for member in HONEST:
            book.told(str(number), FOUR, member, Lack("contribution", frozenset({"x"})), LOST_S)
    assert not book.shuns("b")
    assert not book.shuns("x")
    assert not any(map(book.refuses, "yz"))


def test_nobody_of_two_is_named():
    books = Books(members=("a", "x"))
    for _ in range(5):
        books.fail(a="contribution x", x="contribution a")
    assert not books.books["a"].shuns("x")


@pytest.mark.parametrize(("told_others", "shuns"), [("contribution a", False), ("vote a", True), ("reduced b", True)])
def test_a_member_behind_a_line_that_is_cut_is_shunned_until_its_word_comes_by_others(told_others, shuns):
    """It alone heard nothing: it would decline each group with that member, and the others blame both for that."""
    books = Books("a")
    for number in range(2):
        books.fail(a="contribution x", b="reduced a x", c="reduced a x")
        assert books.books["a"].shuns(LIAR) == (number == 1)  # as most saw, by what came to this peer
    stage, name = told_others.split()
    books.books["a"].explained("1", LIAR, Lack(stage, frozenset({name}), round=-1))
    assert books.books["a"].shuns(LIAR) == shuns
    assert books.refused("a") == {LIAR}


@pytest.mark.parametrize("waited", [False, True])
def test_who_gives_up_for_a_word_at_the_deadline_is_not_excused_by_it(waited):
    """It withholds its contribution, hears the first victim, and ends the round for that one's word: each failure was
    then a dispute with another member, and it took four of them until it was refused.
    """
    books = Books(*HONEST, x=25)
    for first in ("a", "b"):
        said = dict.fromkeys(HONEST, f"{'waited ' * waited}contribution x")
        books.fail(**said, x=f"word {first} shows -1")
    assert {owner: books.refused(owner) for owner in HONEST} == dict.fromkeys(HONEST, {LIAR} if waited else set())


def test_a_liar_that_claims_to_have_waited_is_believed_by_no_other():
    """It tells one member alone that it gives up, and that member all others, long before the deadline."""
    books = Books("a", "b", "x", c=25)
    for _ in range(4):
        books.fail(c="waited contribution x", a="word x shows -1", b="word x shows -1", x="word c shows -1")
        assert not any(books.books[owner].shuns("x") for owner in ("a", "b"))
    assert "c" in books.refused("x")


def test_a_leader_that_seats_one_stranger_after_the_other_is_refused_itself():
    """Each has a key of its own, and stalls once: no leader, and no key, would ever be at fault."""
    books = Books("b", "c", x=0, y=0, z=0)
    books.fail(**dict.fromkeys(HONEST, "reduced x"))
    for book in books.books.values():
        assert all(map(book.shuns, "xyz"))
        for stranger in "yz":
            book.seated("a", stranger)
            assert not book.refuses("a")
        book.seated("a", "y")
        assert book.refuses("a")


def test_strangers_have_a_seat_again_once_a_round_was_made_and_half_of_the_pause_is_over():
    books = Books("b", "c", x=0, y=0)
    books.fail(lost_s=1.0, **dict.fromkeys(HONEST, "reduced x"))
    book = books.books["b"]
    books.clock.now += 0.9 * STANDARD.fresh_pause_s
    assert book.shuns("y")  # a leader may hold each group a little
    books.commit()
    assert not book.shuns("y")
    books.fail(**dict.fromkeys(HONEST, "reduced x"))
    books.commit()
    assert book.shuns("y")
    books.clock.now += STANDARD.fresh_pause_s / 2
    assert not book.shuns("y")
