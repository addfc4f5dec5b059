"""What members that stall say to hide it: excuses, words to one member alone, circles, cuts that are none."""

from __future__ import annotations

import random

import pytest

from peer.swarm.round.giving_up import Lack
from peer.swarm.trust.debts import FACTOR
from tests.swarm.trust.stalled import HONEST, LIAR, LOST_S, Books


@pytest.mark.parametrize(
    ("stage", "excuse"), [("reduced", "contribution x"), ("vote", "reduced x"), ("vote", "contribution x")]
)
def test_who_names_itself_has_no_excuse(stage, excuse):
    """Else one member stalled every round: what the others lacked was excused, and its own word led to no dispute."""
    books = Books(*HONEST, x=25)
    for _ in range(2):
        books.fail(x=excuse, **dict.fromkeys(HONEST, f"{stage} x"))
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("lie", ["contribution m0", "join m0", "stream m0", "word m0"])
@pytest.mark.parametrize("others", [3, 7, 15, 31])
def test_who_lies_to_one_member_alone_gets_no_member_blamed_that_passes_it_on(lie, others):
    """m0 hears the lie first, and gives up for it; the others hear of that from m0, and then the same lie from x."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR), x=15)
    for _ in range(2):
        books.fail(1.0, m0="word x", **dict.fromkeys(honest[1:], "word m0"), x=lie)
    for owner in honest[-2:]:
        assert books.refused(owner) == {LIAR}
        assert not books.books[owner].shuns(LIAR)  # two members accuse each other, no more


@pytest.mark.parametrize("rounds", [15, 20, 25])
@pytest.mark.parametrize("others", [2, 3, 7, 15])
def test_explanations_in_a_circle_cost_their_liar_a_seat_and_part_no_honest_pair(rounds, others):
    """x lies to one member alone, which gives up; the others hear of that, and x says that another gave up first."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR), x=rounds)
    for victim in (0, 1):
        words = dict.fromkeys(honest, f"word m{victim}") | {f"m{victim}": "word x"}
        books.fail(1.0, **words, x=f"word m{1 - victim}")
    for owner in honest[-2:]:
        assert not any(pair <= set(honest) for pair in books.books[owner]._disputes)
        if others > 2:  # most have heard of the victim first, and that one names x
            assert set(books.books[owner]._disputes) == {frozenset({LIAR, victim}) for victim in ("m0", "m1")}
    books.clock.now += FACTOR * 3.0
    assert [books.refused(owner) for owner in honest[-2:]] == [set(), set()]


@pytest.mark.parametrize("circle", ["word m1", "vote m1", "reduced m0"])
@pytest.mark.parametrize("others", [3, 7, 15])
def test_who_ends_the_round_of_one_member_late_gets_it_blamed_by_no_other(circle, others):
    """m0 gave up for a word of x; that word of m0 comes when the others have missed its shard for long."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest[-2:], members=(*honest, LIAR), x=25)
    for _ in range(2):
        books.fail(3.0, **dict.fromkeys(honest[1:], "reduced m0") | {"m0": "word x"}, x=circle)
        assert not any(books.books[owner].shuns("m0") for owner in honest[-2:])
    own = [books.books[owner]._debts.left_s(frozenset({LIAR})) for owner in honest[-2:]]
    pair = [books.books[owner]._debts.left_s(frozenset({LIAR, "m0"})) for owner in honest[-2:]]
    assert min(map(max, own, pair)) > FACTOR * 3.0  # it owes for both failures


@pytest.mark.parametrize("lie", [
    "word m1 shows 6", "word m1 shows 5", "word m2 shows 6", "waiting m0 by m1 shows 6", "waiting m0 by m0 shows 6",
    "join m0 shows 6", "reduced m0 shows 6",
])  # fmt: skip
@pytest.mark.parametrize("waits", ["waiting m0 by m0 shows 6", "join m0 shows 6", "waiting m0 by m1 shows 6"])
@pytest.mark.parametrize("others", [3, 7])
def test_who_withholds_a_shard_from_one_member_is_in_dispute_with_that_one_alone(others, waits, lie):
    """The others have made that round, and wait for m0 to join the next one, which a short window may end before m0
    gives up. x shows a true word of one of them, or says what they say.
    """
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest, members=(*honest, LIAR), x=15)
    books.fail(3.0, m0="reduced x shows 5", **dict.fromkeys(honest[1:], waits) | {"m1": "join m0 shows 6"}, x=lie)
    for owner in honest:
        assert set(books.books[owner]._debts._debts) == {frozenset({"m0", LIAR})}


@pytest.mark.parametrize(("first", "passed"), [
    ("reduced x shows 5", "word m0 shows 5"), ("contribution x shows 5", "waiting x by m0 shows 5"),
])  # fmt: skip
@pytest.mark.parametrize("others", [3, 7])
def test_words_that_lead_back_to_the_member_that_spoke_first_excuse_nobody(others, first, passed):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest, members=(*honest, LIAR), x=15)
    books.fail(3.0, m0=first, **dict.fromkeys(honest[1:], passed), x="word m1 shows 5")
    for owner in honest:
        assert set(books.books[owner]._debts._debts) == {frozenset({"m0", LIAR})}


@pytest.mark.parametrize("others", [2, 3, 7])
def test_that_a_round_was_made_no_member_says_alone(others):
    """x joined m0 first, and contributed to it alone: m0 is past half of its time, the others are not."""
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest, members=(*honest, LIAR), x=15)
    late = " ".join([*honest[1:], LIAR])
    words = dict.fromkeys(honest[1:], "word x shows 5")
    books.fail(3.0, m0=f"reduced {late} shows 5", **words, x="join m0 shows 6")
    for owner in honest:
        assert set(books.books[owner]._debts._debts) == {frozenset({"m0", LIAR})}


def test_who_names_itself_as_the_one_that_ended_the_round_shows_nothing():
    books = Books(*HONEST, x=25)
    for _ in range(2):
        books.fail(x="waiting a by x shows 5", **dict.fromkeys(HONEST, "word x shows 5"))
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("number", [4, 6])
@pytest.mark.parametrize("others", [3, 7])
def test_a_word_of_another_round_excuses_nobody(others, number):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest, members=(*honest, LIAR), x=25)
    for _ in range(2):
        books.fail(3.0, **dict.fromkeys(honest, "reduced x shows 5"), x=f"word m1 shows {number}")
    for owner in honest:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("others", [3, 7])
def test_who_does_not_join_is_not_excused_by_a_round_that_others_have_made(others):
    honest = [f"m{number}" for number in range(others)]
    books = Books(*honest, members=(*honest, LIAR), x=15)
    books.fail(3.0, **dict.fromkeys(honest, "join x shows 6"), x="reduced m0 shows 5")
    for owner in honest:
        assert set(books.books[owner]._debts._debts) == {frozenset({"m0", LIAR})}


@pytest.mark.parametrize("spoken", [True, False])
@pytest.mark.parametrize(("others", "accomplices"), [(6, 1), (14, 1), (30, 1), (6, 2), (14, 3)])
def test_stalls_that_look_like_a_cut_cost_an_eighth_of_the_time(others, accomplices, spoken):
    """Half as many pairs as members, and no member in all of them: x stalls some, and the others invent theirs. Only
    pairs whose debt has passed; `spoken`: the attackers say something.
    """
    honest, bad = [f"m{number}" for number in range(others)], [LIAR, *(f"y{number}" for number in range(accomplices))]
    members, lost_s = (*honest, *bad), 0.0
    books = Books(*honest[:3], members=members, **dict.fromkeys(bad, 25))
    book, clock = books.books["m0"], books.clock
    began = clock.now
    while clock.now < began + 3600.0:
        seated = [member for member in members if member not in books.refused("m0")]
        free = {each: [m for m in honest if m in seated and book._debts.left_s(frozenset({each, m})) < LOST_S]
                for each in bad if each in seated}  # fmt: skip
        share = -(-len(members) // 2 // len(bad))
        if len(free) == len(bad) and all(len(victims) >= share for victims in free.values()):
            words = dict.fromkeys(seated, f"reduced {free[LIAR][0]}")
            words |= dict.fromkeys(free[LIAR][:share], f"contribution {LIAR}")
            for each in bad[1:]:
                words |= {each: f"contribution {' '.join(free[each][-share:])}"} if spoken else (
                    dict.fromkeys(free[each][-share:], f"contribution {each}"))
            books.fail(**{who: word for who, word in words.items() if spoken or who not in bad})
            lost_s += LOST_S
        else:
            clock.now += 1.0
            books.commit(tuple(seated))
    assert 0.002 < lost_s / (clock.now - began) < 0.14


@pytest.mark.parametrize("seed", range(20))
def test_members_that_hear_the_same_words_in_another_order_judge_alike(seed):
    rng, members = random.Random(seed), tuple("abcdefgh")
    books = Books("a", "b", members=members, **{each: rng.choice((15, 20, 25)) for each in members})
    for number in range(30):
        words = {each: f"{rng.choice(('contribution', 'reduced', 'word', 'stream'))} {rng.choice('cde')}"
                 for each in rng.sample(members, 7)}  # fmt: skip
        for book in books.books.values():
            for each in rng.sample(sorted(words), len(words)):
                stage, name = words[each].split()
                book.told(str(number), members, each, Lack(stage, frozenset(name)), LOST_S)
            book.settle(str(number))
        one, other = books.books.values()
        assert set(one._disputes) == set(other._disputes)
        assert all(one._debts.left_s(frozenset(each)) == other._debts.left_s(frozenset(each)) for each in members)
        books.clock.now += 30.0


@pytest.mark.parametrize("names", ["stranger", "stranger m0"])
def test_who_gives_up_for_a_stranger_blames_nobody_by_that(names):
    """Else the others, who heard of it, would be in dispute with a stranger, and it with none of them."""
    books = Books(*HONEST, x=25)
    for _ in range(2):
        books.fail(x=f"word {names}", a="contribution x", b="word x", c="word x")
    for owner in HONEST:
        assert books.refused(owner) == {LIAR}


@pytest.mark.parametrize("rounds", [15, 25])
@pytest.mark.parametrize("others", [3, 7, 15])
def test_two_members_that_name_each_other_make_no_circle_with_a_third(others, rounds):
    """x ends the round of half of the others by a word against these, and the rest hear of that from one or another.
    Those and x would be a circle in which most name no single one, and each would owe alone.
    """
    honest = [f"m{number}" for number in range(others)]
    told, rest = honest[: -(others // 2)], honest[-(others // 2) :]
    words = dict.fromkeys(told, "word x") | {name: f"word {told[at % len(told)]}" for at, name in enumerate(rest)}
    books = Books("m0", honest[-1], members=(*honest, LIAR), x=rounds)
    for _ in range(2):
        books.fail(**words, x=f"stream {' '.join(told)}")
    for owner, book in books.books.items():
        assert all(LIAR in pair for pair in book._disputes)
        assert not any(book.shuns(other) or book._debts.left_s(frozenset({other})) for other in honest)
        assert books.refused(owner) == ({LIAR} if owner == "m0" or rounds == 15 else set(told))
