"""The words with which members end groups: this peer signs one for each group, and compares what others have signed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from peer.outer.round import RoundAborted
from peer.protocol.evidence import TwoWords
from peer.protocol.identity import Identity
from peer.protocol.wire import AbortMessage
from peer.protocol.word import HeardWord, SignedWord, Word
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.runtime.expiring import BoundedMap

GROUPS_KEPT = 16


class GroupWords:
    """Those of the last groups of one peer in its run."""

    def __init__(self, identity: Identity, run_id: str) -> None:
        self._identity, self._run_id = identity, run_id
        self._own: BoundedMap[str, SignedWord] = BoundedMap(GROUPS_KEPT)
        self._heard: BoundedMap[str, dict[str, SignedWord]] = BoundedMap(GROUPS_KEPT)

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
        cause = min(own.lacking, default="") if own.lacks == "word" else ""
        first = self._heard.get(group, {}).get(cause)
        heard = HeardWord(member=cause, word=first) if first is not None else None
        return message.model_copy(update={"word": own, "heard": heard})

    def hear(
        self, group: str, members: Collection[str], remote: str, message: AbortMessage
    ) -> tuple[Lack | None, list[TwoWords]]:
        """Note what a member of this group says, and what it has heard.

        Returns:
            what it lacks, None if it has not signed that; and proofs that a member said two things.
        """
        kept = self._heard.get(group)
        if kept is None:
            kept = self._heard[group] = {}
        lack, found = None, []
        for member, word in _words(remote, message):
            if member not in members or not word.is_of(member, self._run_id, group):
                continue
            if word is message.word:
                lack = Lack.said(message)
            first = kept.setdefault(member, word)
            if first.conflicts(word):
                found.append(TwoWords(run_id=self._run_id, group=group, member=member, first=first, second=word))
        return lack, found

    def _signed(self, group: str, lack: Lack) -> SignedWord:
        word = Word(
            run_id=self._run_id, group=group, lacks=lack.stage, lacking=tuple(sorted(lack.names)),
            delayed_by=tuple(sorted(lack.delayed_by)),
        )  # fmt: skip
        return SignedWord.of(self._identity, word)


def _words(remote: str, message: AbortMessage) -> Iterator[tuple[str, SignedWord]]:
    if message.word is not None:
        yield remote, message.word
    if message.heard is not None:
        yield message.heard.member, message.heard.word
