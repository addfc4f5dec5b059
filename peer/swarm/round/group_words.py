"""The words with which members end groups: this peer signs one for each group, and compares what others have signed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from peer.outer.round import RoundAborted
from peer.protocol.evidence import TwoWords
from peer.protocol.identity import Identity
from peer.protocol.wire import AbortMessage, HeardWords
from peer.protocol.word import HeardWord, SignedWord, Word
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.runtime.expiring import BoundedMap

GROUPS_KEPT = 16
BY_WORDS = ("word", "waiting", "roster")  # stages that count only with the word of another, or for one listener


@dataclass
class _Heard:
    """What this peer has heard in one group. A word on a roster differs for each listener: those are kept apart."""

    members: frozenset[str]
    words: dict[str, SignedWord] = field(default_factory=dict)
    of_rosters: dict[str, SignedWord] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)  # the members that have shown what they heard
    convicted: set[str] = field(default_factory=set)
    shown_by: dict[str, set[str]] = field(default_factory=dict)  # whose word has not come to this peer itself


class GroupWords:
    """Those of the last groups of one peer in its run."""

    def __init__(self, identity: Identity, run_id: str) -> None:
        self._identity, self._run_id = identity, run_id
        self._own: BoundedMap[str, SignedWord] = BoundedMap(GROUPS_KEPT)
        self._heard: BoundedMap[str, _Heard] = BoundedMap(GROUPS_KEPT)
        self._news = asyncio.Event()

    # -- what this peer says -------------------------------------------------------------------------------------------

    def provable(self, group: str, lack: Lack) -> Lack:
        """What this peer can say, of what it lacks: that it gave up for a word only with that word."""
        shown = self._cause(group, lack) is not None
        return replace(lack, shown=shown, stage="stream" if lack.stage == "word" and not shown else lack.stage)

    def message(self, group: str, abort: RoundAborted) -> AbortMessage:
        """The message to the other members of this group. All receive the same word, the first one."""
        message = AbortMessage(reason=abort.reason[:300], culprit=abort.culprit)
        if not isinstance(abort, StalledError):
            return message
        if abort.lack.stage == "roster":  # it names its listener
            return message.model_copy(update={"word": self._signed(group, abort.lack)})
        own = self._own.get(group)
        if own is None:
            own = self._own[group] = self._signed(group, abort.lack)
        heard = self._heard.get(group)
        words = () if heard is None else [*heard.words.items(), *heard.of_rosters.items()]
        cause = next((HeardWord(member=name, word=word) for name, word in words if word.signature == own.cause), None)
        return message.model_copy(update={"word": own, "heard": cause})

    def _cause(self, group: str, lack: Lack) -> SignedWord | None:
        """The word for which this peer gives up."""
        heard, names = self._heard.get(group), _named(lack)
        if len(names) != 1:
            return None
        (name,) = names
        if name == self._identity.peer_id:
            return self._own.get(group)
        return None if heard is None else heard.words.get(name) or heard.of_rosters.get(name)

    def _signed(self, group: str, lack: Lack) -> SignedWord:
        lack, cause = self.provable(group, lack), self._cause(group, lack)
        word = Word(
            run_id=self._run_id, group=group, lacks=lack.stage, lacking=tuple(sorted(lack.names)),
            delayed_by=tuple(sorted(lack.delayed_by)), round=lack.round, cause=cause.signature if cause else None,
            waited=lack.waited,
        )  # fmt: skip
        return SignedWord.of(self._identity, word)

    # -- what it hears -------------------------------------------------------------------------------------------------

    def hear(
        self, group: str, members: Collection[str], remote: str, message: AbortMessage, *, first: bool = False
    ) -> tuple[Lack | None, list[TwoWords]]:
        """Note what a member of this group says, and what it has heard.

        Args:
            first: in the group's first round, before which alone a roster may be missing.

        Returns:
            what it lacks, None if it has not signed that, or has not shown the word for which it gave up; and proofs
            that a member said two things.
        """
        if group not in self._heard:
            self._heard[group] = _Heard(frozenset(members))
        heard, found, lack = self._heard[group], list[TwoWords](), None
        signed = {(self._identity.peer_id, own.signature)} if (own := self._own.get(group)) is not None else set()
        for member, word in _words(remote, message):
            if (first or word.lacks != "roster") and self._note(group, heard, member, word, found):
                signed.add((member, word.signature))
                lack = _said(word, signed) if word is message.word else None
        self._news.set()
        return lack, found

    async def one_of(self, group: str, members: Collection[str], timeout_s: float) -> str | None:
        """One of these members whose word has been heard in a group, or comes in time."""

        def said() -> str | None:
            heard = self._heard.get(group)
            return min(heard.words.keys() & set(members), default=None) if heard is not None else None

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while said() is None:
                    self._news.clear()
                    await self._news.wait()
        return said()

    def shown(self, group: str) -> HeardWords | None:
        """All that this peer has heard in a group, for its other members: one may have said another thing to each."""
        heard = self._heard.get(group)
        if heard is None or not heard.words:
            return None
        words = tuple(HeardWord(member=member, word=word) for member, word in sorted(heard.words.items()))
        return HeardWords(group=group, words=words)

    def awaits(self, member: str) -> bool:
        """Whether this member may show what it has heard: in a group that is kept, and not yet."""
        return any(member in heard.members - heard.compared for heard in self._heard.values())

    def await_no_more(self, member: str) -> None:
        """What it shows cannot be read."""
        for heard in self._heard.values():
            heard.compared.add(member)

    def compare(self, remote: str, message: HeardWords) -> tuple[dict[str, Lack], list[TwoWords]]:
        """What another member has heard in a group. Each is compared once.

        Returns:
            what members lack whose words have not come to this peer, but to most others: an accomplice alone would
            clear one that was silent; and proofs that a member said two things.
        """
        heard, found, learned = self._heard.get(message.group), list[TwoWords](), dict[str, Lack]()
        if heard is not None and remote in heard.members - heard.compared:
            heard.compared.add(remote)
            for one in message.words:
                new = one.member not in heard.words
                if not self._note(message.group, heard, one.member, one.word, found):
                    continue
                if new:
                    heard.shown_by[one.member] = set()
                if (by := heard.shown_by.get(one.member)) is not None and remote != one.member:
                    by.add(remote)
                    lack = Lack.said(one.word)
                    most = 2 * len(by) > len(heard.members) - 2  # of all but that member and this peer
                    if most and lack is not None and lack.stage not in BY_WORDS:
                        learned[one.member] = lack
        return learned, found

    def _note(self, group: str, heard: _Heard, member: str, word: SignedWord, found: list[TwoWords]) -> bool:
        """-> whether this member has signed it; appends the proof that it has signed another one as well."""
        kept = heard.of_rosters if word.lacks == "roster" else heard.words
        first = kept.get(member)
        if first == word:
            return True
        if member not in heard.members or not word.is_of(member, self._run_id, group):
            return False
        first = kept.setdefault(member, word)
        if member not in heard.convicted and first.conflicts(word):
            heard.convicted.add(member)
            found.append(TwoWords(run_id=self._run_id, group=group, member=member, first=first, second=word))
        return True


def _words(remote: str, message: AbortMessage) -> Iterator[tuple[str, SignedWord]]:
    if message.heard is not None and message.heard.member != remote:
        yield message.heard.member, message.heard.word
    if message.word is not None:
        yield remote, message.word


def _said(word: SignedWord, signed: Collection[tuple[str, str]]) -> Lack | None:
    """What a member lacks by its own word; `signed`: (member, signature) of those that it may have given up for."""
    if (lack := Lack.said(word)) is None:
        return None
    lack = replace(lack, shown=any((name, word.cause) in signed for name in _named(lack)) and len(_named(lack)) == 1)
    return None if lack.stage == "word" and not lack.shown else lack


def _named(lack: Lack) -> frozenset[str]:
    """The member for whose word it gave up."""
    return {"word": lack.names, "waiting": lack.delayed_by}.get(lack.stage, frozenset())
