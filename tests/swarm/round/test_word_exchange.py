"""Who may show words, and how often: a message of 64 words is the largest that a stranger could have read here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json
from peer.protocol.wire import MAX_WORDS_BYTES, AbortMessage, HeardWords, Kind
from peer.protocol.word import HeardWord, SignedWord, Word
from peer.swarm.round.group_words import GroupWords
from peer.swarm.round.word_exchange import WordExchange
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.runs import RUN

GROUP, OTHER = "a" * 64, "b" * 64
ME, ONE, TWO, STRANGER = (Identity.generate() for _ in range(4))
NAMES = tuple(sorted(Identity.generate().peer_id for _ in range(64)))


def signed(identity, lacks="contribution", group=GROUP, names=(ME.peer_id,)):
    return SignedWord.of(identity, Word(run_id=RUN, group=group, lacks=lacks, lacking=names, delayed_by=names))


def shows(*words):
    return dump_json(HeardWords(group=GROUP, words=[HeardWord(member=who.peer_id, word=word) for who, word in words]))


class Shown:
    """A stream on which one message comes."""

    def __init__(self, remote, body):
        self.remote, self.body, self.read = remote.peer_id, body, 0

    async def receive(self, limits, **_):
        self.read += 1
        assert len(self.body) <= limits[Kind.WORDS]
        return Kind.WORDS, self.body


@pytest.fixture
def listening():
    """-> (the exchange of a peer that has heard a word of one member in a group of three, what it finds)."""
    words, found = GroupWords(ME, RUN), []
    members = [ME.peer_id, ONE.peer_id, TWO.peer_id]
    words.hear(GROUP, members, ONE.peer_id, AbortMessage(reason="", word=signed(ONE)))
    return WordExchange(SimpleNamespace(timing=STANDARD), RUN, words, found.append), found


async def test_a_stranger_is_not_read(listening):
    exchange, found = listening
    stream = Shown(STRANGER, shows((ONE, signed(ONE, "vote"))))
    with pytest.raises(ProtocolError, match="was in no group"):
        await exchange._on_stream(stream)
    assert (stream.read, found) == (0, [])


async def test_a_member_is_read_once_a_group(listening):
    exchange, found = listening
    stream = Shown(TWO, shows((ONE, signed(ONE, "vote"))))
    await exchange._on_stream(stream)
    assert [finding.member for finding in found] == [ONE.peer_id]
    with pytest.raises(ProtocolError, match="was in no group"):
        await exchange._on_stream(stream)
    assert stream.read == 1


async def test_a_member_whose_words_cannot_be_read_is_read_no_more(listening):
    exchange, found = listening
    malformed = Shown(TWO, b'{"group": "' + GROUP.encode() + b'", "words": [0]}')
    for _ in range(2):
        with pytest.raises(ProtocolError):
            await exchange._on_stream(malformed)
    assert (malformed.read, found) == (1, [])


def test_the_words_of_64_members_that_name_all_others_fit():
    longest = [HeardWord(member=name, word=signed(ONE, names=NAMES)) for name in NAMES]
    cause = {"cause": "0" * 128, "round": 2**31}
    full = [one.model_copy(update={"word": one.word.model_copy(update=cause)}) for one in longest]
    assert 0.9 * MAX_WORDS_BYTES < len(dump_json(HeardWords(group=GROUP, words=full))) <= MAX_WORDS_BYTES
