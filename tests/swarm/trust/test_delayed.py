"""Words of members that were delayed, or could not begin; and what liars can make of such words."""

from __future__ import annotations

import pytest

from peer.swarm.round.giving_up import Lack
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.trust.stalled import HONEST, LIAR, LOST_S, Books


def pairs(*each):
    return {frozenset(pair.split()) for pair in each}


@pytest.mark.parametrize("others", [3, 7, 15])
def test_who_has_joined_one_member_alone_is_in_dispute_with_that_one(others):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR))
    waiting = dict.fromkeys(honest[1:], "waiting x")
    for _ in range(2):
        books.fail(m0=f"contribution {' '.join(honest[1:])}", **waiting, x="stream m0")
    for owner in honest[-2:]:
        assert set(books.books[owner]._disputes) == pairs("m0 x")


@pytest.mark.parametrize("others", [3, 7, 15])
def test_one_lying_word_does_not_convict_a_slow_member_that_all_wait_for(others):
    """x says that it has begun, when m0 is about to join."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR), x=15)
    waiting = dict.fromkeys(honest[1:], "waiting m0")
    for _ in range(2):
        books.fail(1.0, x=f"contribution {' '.join(honest[1:])}", **waiting, m0="word x")
    for owner in honest[-2:]:
        assert set(books.books[owner]._disputes) == pairs("m0 x")
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("stage", ["contribution", "reduced", "vote", "join"])
def test_who_alone_waits_for_a_member_has_no_excuse(stage):
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(**dict.fromkeys(HONEST, f"{stage} x"), x="waiting a")
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}
        assert books.books[owner].shuns(LIAR)


@pytest.mark.parametrize("stage", ["contribution", "reduced", "vote"])
def test_who_stalls_one_member_and_waits_for_it_is_in_dispute_with_it(stage):
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(a=f"{stage} x", b="word a", c="word a", x="waiting a")
    for owner in HONEST:
        assert set(books.books[owner]._disputes) == pairs("a x")
        assert books.refused(owner) == {LIAR}


def test_who_ends_a_round_and_says_that_it_waits_is_the_one_that_ended_it():
    books = Books(*HONEST)
    for _ in range(2):
        books.fail(**dict.fromkeys(HONEST, "word x"), x="waiting a")
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("others", [4, 5, 7, 15])
@pytest.mark.parametrize("early", [1, 2])
def test_one_lying_word_parts_no_two_honest_members_while_some_train(others, early):
    """The early ones have joined, the others train and are silent; x says that it has begun."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR), x=15)
    for names in (honest[:early], honest[:1], honest):
        said = dict.fromkeys(honest[:early], f"waiting {' '.join(honest[early:])}")
        books.fail(1.0, **said, x=f"contribution {' '.join(names)}")
        for owner in honest[-2:]:
            assert all(LIAR in pair for pair in books.books[owner]._disputes)
            assert not books.refused(owner) & set(honest[:early])


def test_who_waits_blames_no_member_by_it():
    books = Books(*HONEST)
    for _ in range(3):
        books.fail(a="waiting x", b="waiting x", c="waiting x", x="waiting a")
    for owner in HONEST:
        assert (books.refused(owner), set(books.books[owner]._disputes)) == (set(), set())


@pytest.mark.parametrize("stage", ["reduced", "vote"])
def test_who_was_delayed_is_in_dispute_with_what_delayed_it_and_no_other(stage):
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(b=f"{stage} a", c=f"{stage} a", x=f"{stage} a", a="stream x by x")
    for owner in HONEST:
        assert set(books.books[owner]._disputes) == pairs("a x")
        assert books.refused(owner) == {LIAR}


def test_who_leaves_after_a_slow_line_s_contribution_pays_with_it():
    books = Books(*HONEST)
    books.fail(b="reduced a", c="reduced a", a="stream x by c", x="word a")
    for owner in HONEST:
        assert set(books.books[owner]._disputes) == pairs("a x", "a c")
        assert books.refused(owner) == set()


def test_who_stalls_and_says_that_it_was_delayed_is_in_dispute_as_if_it_had_lacked_that():
    books, plain = Books(*HONEST, x=15), Books(*HONEST, x=15)
    for victim in HONEST * 2:
        books.fail(**dict.fromkeys(HONEST, "reduced x"), x=f"stream {victim} by {victim}")
        plain.fail(**dict.fromkeys(HONEST, "reduced x"), x=f"contribution {victim}")
    for owner in HONEST:
        assert LIAR in books.refused(owner)
        assert books.until_seated(LIAR, owner) >= plain.until_seated(LIAR, owner) - LOST_S


def test_who_withholds_its_join_is_not_excused_by_what_it_lacks_of_that_member_then():
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(a="join x", b="contribution a", c="contribution a", x="contribution a")
    for owner in HONEST:
        assert set(books.books[owner]._disputes) == pairs("a x")
        assert books.refused(owner) == {LIAR}


def test_who_joins_late_shares_the_cost_with_the_one_it_named():
    books = Books(*HONEST, x=15)
    for _ in range(2):
        for book in books.books.values():
            book.rejoined(books.members, {"a": LOST_S, "b": LOST_S}, {"a": {"x"}, "b": set()})
    for owner in HONEST:
        assert set(books.books[owner]._disputes) == pairs("a x")
        assert books.refused(owner) == {LIAR}


def test_a_late_joiner_that_names_several_is_not_heard():
    books = Books(*HONEST)
    for _ in range(3):
        for book in books.books.values():
            book.rejoined(books.members, {"x": LOST_S}, {"x": {"a", "b"}})
    for owner in HONEST:
        assert (books.refused(owner), set(books.books[owner]._disputes)) == (set(), set())


@pytest.mark.parametrize("others", [3, 7, 15])
def test_whose_round_was_ended_while_it_waited_is_in_dispute_with_the_one_that_ended_it(others):
    """x joined all but m0, which heard no join of it; some heard m0 first, the others those."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR))
    said = {"m1": "word m0"} | dict.fromkeys(honest[2:], "word m1")
    for lie in ("word m0", "contribution m0", "reduced m0", "stream m0"):
        books.fail(m0="waiting x by x", **said, x=lie)
        for owner in honest[-2:]:
            assert set(books.books[owner]._disputes) == pairs("m0 x")


@pytest.mark.parametrize("lie", ["word m1", "waiting m1 by m1"])
@pytest.mark.parametrize("others", [3, 7, 15])
def test_a_circle_with_a_member_that_waited_has_the_liar_pay_too(others, lie):
    """x ends the round for m0 alone, which still waits, and says that m1 did so for it: no member can tell who lies."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR), x=15)
    for _ in range(2):
        books.fail(m0="waiting x by x", m1="word m0", **dict.fromkeys(honest[2:], "word m1"), x=lie)
        for owner in honest[-2:]:
            assert set(books.books[owner]._disputes) == pairs("m0 x", "m0 m1", "m1 x")
    for owner in honest[-2:]:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("lie", ["contribution m0", "reduced m0", "stream m0", "word m0"])
@pytest.mark.parametrize("others", [3, 7, 15])
def test_who_has_another_end_the_round_for_a_member_that_waits_is_in_dispute(others, lie):
    """x joined all but m0, and gave up to m1 alone, which passed that on."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR))
    for _ in range(2):
        books.fail(m0="waiting x by m1", m1="word x", **dict.fromkeys(honest[2:], "word m1"), x=lie)
        for owner in honest[-2:]:
            found = set(books.books[owner]._disputes)
            assert found
            assert all(LIAR in pair for pair in found) or len(found) == 3


def test_who_withholds_its_join_from_all_is_not_excused_by_another_that_ended_the_round():
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(**dict.fromkeys(HONEST, "join x"), x="waiting a by b")
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}
        assert set(books.books[owner]._disputes) == set()


def test_who_stalls_and_says_that_another_ended_its_round_is_in_dispute_with_that_one_alone():
    """As one that says what it lacks: the pair has the liar in it."""
    books = Books(*HONEST, x=15)
    for _ in range(2):
        books.fail(**dict.fromkeys(HONEST, "contribution x"), x="waiting a by b")
    for owner in HONEST:
        assert all(LIAR in pair for pair in books.books[owner]._disputes)
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("lie", ["contribution m0", "word m0", "word m1", None])
@pytest.mark.parametrize("others", [3, 7, 15])
def test_who_has_no_roster_is_in_dispute_with_its_leader_whatever_that_says(others, lie):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR))
    liar = {} if lie is None else {LIAR: lie}
    for _ in range(2):
        books.fail(m0="roster x", m1="word m0", **dict.fromkeys(honest[2:], "word m1"), **liar)
        books.fail(m0="roster x", **dict.fromkeys(honest[1:], "contribution m0"), **liar)
    for owner in honest[-2:]:
        assert set(books.books[owner]._disputes) == pairs("m0 x")


def test_who_may_stall_has_no_seat_until_a_member_without_a_roster_had_its_time():
    books = Books("a")
    book, words_s = books.books["a"], STANDARD.stall_words_s + STANDARD.late_roster_s
    book.told("group", books.members, "a", Lack("stream", frozenset({LIAR})), LOST_S)
    books.clock.now += 0.95 * words_s
    assert book.refuses(LIAR)
    books.clock.now += 0.1 * words_s
    assert not book.refuses(LIAR)
