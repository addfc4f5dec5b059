"""What members sign as they end a round: one word each for a group, compared by all that hear of it."""

from __future__ import annotations

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.evidence import Evidence, TwoWords
from peer.protocol.identity import Identity
from peer.protocol.wire import AbortMessage
from peer.protocol.word import HeardWord, SignedWord, Word
from peer.swarm.round.giving_up import Lack, StalledError, no_roster
from peer.swarm.round.group_words import GroupWords
from peer.swarm.trust.judge import Judge
from peer.swarm.trust.verdict import NoEvidenceError

RUN, GROUP = "a" * 64, "b" * 64
A, B, C, X = (Identity.generate() for _ in range(4))
MEMBERS = [identity.peer_id for identity in (A, B, C, X)]
ABORT = RoundAborted("exchange", "it failed")


def lacking(*names, stage="contribution"):
    return StalledError(ABORT, Lack(stage, frozenset(name.peer_id for name in names)))


def signed(identity, other, group=GROUP, run=RUN, lacks="contribution"):
    word = Word(run_id=run, group=group, lacks=lacks, lacking=(other.peer_id,), delayed_by=())
    return SignedWord.of(identity, word)


def word_of(identity, abort, heard=()):
    """The message of a member that has heard these before."""
    words = GroupWords(identity, RUN)
    for one, message in heard:
        words.hear(GROUP, MEMBERS, one.peer_id, message)
    return words.message(GROUP, abort)


def test_all_are_told_the_first_word_whatever_follows():
    words = GroupWords(A, RUN)
    first = words.message(GROUP, lacking(X))
    assert Lack.said(first.word) == Lack("contribution", frozenset({X.peer_id}))
    assert words.message(GROUP, lacking(B, stage="reduced")).word == first.word
    assert words.message("c" * 64, lacking(B)).word.lacking == (B.peer_id,)
    assert words.message(GROUP, ABORT).word is None
    listening = GroupWords(C, RUN)
    assert listening.hear(GROUP, MEMBERS, A.peer_id, first) == (Lack.said(first.word), [])
    assert listening.hear(GROUP, MEMBERS, B.peer_id, first) == (None, [])
    assert listening.hear("c" * 64, MEMBERS, A.peer_id, first) == (None, [])
    assert listening.hear(GROUP, MEMBERS, A.peer_id, words.message(GROUP, ABORT)) == (None, [])


def test_that_a_roster_is_missing_is_said_to_each_listener_and_no_other_word_is_lost():
    words = GroupWords(A, RUN)
    told = [words.message(GROUP, no_roster(one.peer_id)) for one in (B, C)]
    assert [message.word.lacking for message in told] == [(B.peer_id,), (C.peer_id,)]
    assert not told[0].word.conflicts(told[1].word)
    assert words.message(GROUP, lacking(X)).word.lacks == "contribution"
    hearing = GroupWords(B, RUN)
    for message in told:
        assert hearing.hear(GROUP, MEMBERS, A.peer_id, message, first=True) == (Lack.said(message.word), [])
        assert hearing.hear(GROUP, MEMBERS, A.peer_id, message) == (None, [])  # the group has had a round: it has one


def test_who_gave_up_for_a_word_shows_it_and_two_that_differ_convict():
    lies = {one: word_of(X, lacking(other)) for one, other in ((A, B), (B, C))}
    words = GroupWords(A, RUN)
    assert words.hear(GROUP, MEMBERS, X.peer_id, lies[A])[1] == []
    passed_on = word_of(B, lacking(X, stage="word"), [(X, lies[B])])
    assert passed_on.heard == HeardWord(member=X.peer_id, word=lies[B].word)
    (found,) = words.hear(GROUP, MEMBERS, B.peer_id, passed_on)[1]
    assert (found.member, found.first, found.second) == (X.peer_id, lies[A].word, lies[B].word)
    assert Judge(RUN, None).judge(Evidence(finding=found)).culprit == X.peer_id


def test_of_two_words_that_others_pass_on_one_is_enough_to_compare():
    """This peer has heard nothing of the liar itself."""
    words = GroupWords(A, RUN)
    found = []
    for one, other in ((B, C), (C, B)):
        message = word_of(one, lacking(X, stage="word"), [(X, word_of(X, lacking(other)))])
        found += words.hear(GROUP, MEMBERS, one.peer_id, message)[1]
    assert [finding.member for finding in found] == [X.peer_id]


def test_members_show_each_other_all_that_they_heard_and_compare_it_once_a_member():
    """No word is passed on here: each listener gives up for its own reason."""
    lies = {one: word_of(X, lacking(other)) for one, other in ((A, B), (B, C))}
    books = {one: GroupWords(one, RUN) for one in (A, B)}
    for one, words in books.items():
        assert words.hear(GROUP, MEMBERS, X.peer_id, lies[one])[1] == []
        assert words.message(GROUP, lacking(X)).heard is None
    shown = books[B].shown(GROUP)
    assert shown.words == (HeardWord(member=X.peer_id, word=lies[B].word),)
    assert books[A].compare("a stranger", shown) == ({}, [])
    _, (found,) = books[A].compare(B.peer_id, shown)
    assert (found.member, found.first, found.second) == (X.peer_id, lies[A].word, lies[B].word)
    for member in (B, C):
        assert books[A].compare(member.peer_id, shown) == ({}, [])  # it is known by now
    assert books[A].shown("c" * 64) is None
    assert books[A].compare(B.peer_id, shown.model_copy(update={"group": "c" * 64})) == ({}, [])


def test_a_word_on_a_roster_hides_no_later_word():
    words = GroupWords(A, RUN)
    words.hear(GROUP, MEMBERS, X.peer_id, word_of(X, no_roster(A.peer_id)), first=True)
    assert words.shown(GROUP) is None
    found = []
    for other in (B, C):
        found += words.hear(GROUP, MEMBERS, X.peer_id, word_of(X, lacking(other)))[1]
    assert [finding.member for finding in found] == [X.peer_id]


def test_who_gave_up_for_a_word_has_said_nothing_without_that_word():
    first = word_of(B, lacking(X))
    shown = word_of(A, lacking(B, stage="word"), [(B, first)])
    assert shown.word.cause == first.word.signature

    def heard(message):
        return GroupWords(C, RUN).hear(GROUP, MEMBERS, A.peer_id, message)[0]

    assert heard(shown) == Lack("word", frozenset({B.peer_id}))
    assert heard(shown).shown
    assert heard(shown.model_copy(update={"heard": None})) is None
    other = HeardWord(member=B.peer_id, word=word_of(B, lacking(C)).word)
    assert heard(shown.model_copy(update={"heard": other})) is None
    assert heard(AbortMessage(reason="", word=signed(A, B, lacks="word"))) is None
    roster = word_of(A, no_roster(B.peer_id)).word
    itself = Word(run_id=RUN, group=GROUP, lacks="word", lacking=(A.peer_id,), cause=roster.signature)
    own = AbortMessage(reason="", word=SignedWord.of(A, itself), heard=HeardWord(member=A.peer_id, word=roster))
    assert GroupWords(C, RUN).hear(GROUP, MEMBERS, A.peer_id, own, first=True)[0] is None
    honest = word_of(A, lacking(B, stage="word"))  # of a member whose word was not signed
    assert (honest.word.lacks, honest.word.lacking) == ("stream", (B.peer_id,))


def test_a_word_that_its_member_has_not_signed_convicts_nobody():
    words = GroupWords(A, RUN)
    words.hear(GROUP, MEMBERS, X.peer_id, word_of(X, lacking(B)))
    own = signed(B, X, lacks="word")
    for forged in (signed(B, C), signed(X, C, group="c" * 64), signed(X, C, run="d" * 64)):
        message = word_of(B, lacking(X)).model_copy(
            update={"word": own, "heard": HeardWord(member=X.peer_id, word=forged)}
        )
        assert words.hear(GROUP, MEMBERS, B.peer_id, message)[1] == []
    stranger = Identity.generate()
    for other in (A, B):
        said = word_of(stranger, lacking(other))
        assert words.hear(GROUP, MEMBERS, stranger.peer_id, said) == (None, [])


@pytest.mark.parametrize("changes", [
    {"second": signed(X, B)}, {"second": signed(A, C)}, {"member": A.peer_id}, {"run_id": "d" * 64},
    {"group": "c" * 64}, {"second": signed(X, C, lacks="roster")}, {"second": signed(X, C, group="c" * 64)},
])  # fmt: skip
def test_words_that_may_both_stand_prove_nothing(changes):
    fields = {"run_id": RUN, "group": GROUP, "member": X.peer_id, "first": signed(X, B), "second": signed(X, C)}
    assert Judge(RUN, None).judge(Evidence(finding=TwoWords(**fields))).culprit == X.peer_id
    with pytest.raises(NoEvidenceError):
        Judge(RUN, None).judge(Evidence(finding=TwoWords(**fields | changes)))


def test_what_a_member_did_not_say_to_this_peer_it_learns_once_most_others_have_shown_it():
    """One alone may be its accomplice, and the only one that was told."""
    said = word_of(X, lacking(B, stage="contribution"))
    books = {one: GroupWords(one, RUN) for one in (A, B)}
    assert books[A].hear(GROUP, MEMBERS, B.peer_id, word_of(B, lacking(X)))[1] == []
    assert books[B].hear(GROUP, MEMBERS, X.peer_id, said)[1] == []
    shown = books[B].shown(GROUP)
    for member in (B, X, B):
        assert books[A].compare(member.peer_id, shown) == ({}, [])
    assert books[A].compare(C.peer_id, shown) == ({X.peer_id: Lack.said(said.word)}, [])
    assert books[A].compare(C.peer_id, shown) == ({}, [])
