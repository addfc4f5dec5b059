"""Who stalls, by what the members of failed rounds said that they lacked; and for how long it gets no seat."""

from __future__ import annotations

import itertools
import random

import pytest

from peer.protocol.identity import Identity
from peer.protocol.manifest import RoundSpec
from peer.protocol.weights import WeightRule
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.round.giving_up import Lack
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.trust.stalls import FACTOR, GROUPS_KEPT, MAX_REMEMBERED, MISSED_IN_A_ROW, StallBook

LOST_S = 5.0
HONEST, LIAR = ("a", "b", "c"), "x"
FOUR = (*HONEST, LIAR)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Chain:
    """`rounds`: of each peer; 20 of the others. Probation ends with 10."""

    def __init__(self, **rounds):
        self.rounds = rounds

    def rounds_of(self, peer_id):
        return self.rounds.get(peer_id, 20)

    def fresh(self, peer_id):
        return self.rounds_of(peer_id) == 0

    def newcomer(self, peer_id):
        return self.rounds_of(peer_id) < 10


class Books:
    """The books of some members of a group; rounds fail, and each hears what all others say."""

    def __init__(self, *owners, members=FOUR, **rounds):
        self.clock, self.members = Clock(), members
        self.books = {owner: StallBook(owner, Chain(**rounds), STANDARD, self.clock) for owner in owners or members}
        self._number = itertools.count()

    def fail(self, lost_s=LOST_S, **words):
        """A round fails: `words` are the stage and the members that a member lacks, as `a="contribution b c"`."""
        group, self.clock.now = str(next(self._number)), self.clock.now + lost_s
        for book in self.books.values():
            for member, text in words.items():
                stage, *names = text.split()
                book.told(group, self.members, member, Lack(stage, frozenset(names)), lost_s)
            self.clock.now += STANDARD.stall_words_s
            book.settle(group)

    def refused(self, owner="a"):
        return {peer_id for peer_id in self.members if self.books[owner].refuses(peer_id)}

    def commit(self, members=FOUR):
        for book in self.books.values():
            book.committed(members)

    def until_seated(self, peer_id, owner="a"):
        began = self.clock.now
        while self.books[owner].refuses(peer_id):
            self.clock.now += 1.0
        return self.clock.now - began


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
    books = Books(*HONEST)
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


def roster(seen, *, probation=10, min_group=2, max_group=8):
    rounds, rule = RoundSpec(min_group=min_group, max_group=max_group), WeightRule(probation_rounds=probation)
    return RosterAuthority(Identity.generate(), "0" * 64, rounds, rule, lambda: seen)


@pytest.mark.parametrize(
    ("known", "fresh", "admitted"), [(1, 5, 1), (2, 5, 1), (3, 5, 1), (5, 5, 1), (6, 5, 2), (20, 5, 2), (3, 0, 0)]
)
def test_a_quarter_of_the_seats_is_for_peers_without_a_round(known, fresh, admitted):
    old, new = [f"old{number}" for number in range(known - 1)], [f"new{number}" for number in range(fresh)]
    authority = roster(dict.fromkeys(old, 3))
    authority._seen()[authority._identity.peer_id] = 3
    surplus = authority.surplus([*new, *old], "0" * 64)
    assert surplus < set(new) or not fresh
    assert len(new) - len(surplus) == admitted
    drawn = {frozenset(authority.surplus([*new, *old], f"{number:064x}")) for number in range(50)}
    assert len(drawn) > 1 or fresh == 0  # by lot: no crowd is always first


def test_at_the_beginning_and_in_private_runs_all_are_alike():
    for authority in (roster({}), roster({"old": 30}, probation=0)):
        assert authority.surplus([f"new{number}" for number in range(7)], "0" * 64) == set()
        assert not authority.fresh("new1")
        assert not authority.newcomer("new1")
    assert roster({"old": 30}).newcomer("new1")
    assert roster({"old": 30, "young": 9}).newcomer("young")
    assert not roster({"old": 9, "young": 2}).newcomer("young")  # no peer has passed probation


def test_as_many_fresh_peers_as_make_a_group_get_a_seat():
    authority = roster({"old": 3}, min_group=4)  # this peer is one of them
    assert len(authority.surplus(["old", "new1", "new2", "new3"], "0" * 64)) == 1
