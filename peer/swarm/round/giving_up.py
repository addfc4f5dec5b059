"""Why a round was given up: what did not come, and of whom; or another member said that it gives up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peer.outer.round import RoundAborted
from peer.protocol.wire import AbortMessage
from peer.protocol.word import SignedWord, Stage

MAY_BE_DELAYED: tuple[Stage, ...] = ("waiting", "reduced", "vote")


@dataclass(frozen=True)
class Lack:
    """What one member lacked when a round failed, or had late: the first stage that did, and of which members.

    `word`: that member gave up, and said why; `stream`: its stream ended, or broke the protocol, without a word;
    `waiting`: it had not joined, and still could: this accuses no member; `roster`: it has no roster of the
    group, which its leader has withheld.

    Attributes:
        delayed_by: the members that explain why this one was late itself; of one that waited, the one that ended the
            round for it.
        round: in which; -1: the first one of its group.
        shown: it has shown the word of the member that ended the round for it.
        waited: for contributions until its deadline: no word that came then explains that they did not.
    """

    stage: Stage
    names: frozenset[str]
    delayed_by: frozenset[str] = frozenset()
    round: int = field(default=-1, compare=False)
    shown: bool = field(default=False, compare=False)
    waited: bool = field(default=False, compare=False)

    @classmethod
    def said(cls, word: SignedWord | None) -> Lack | None:
        """What a member says that it lacks; None: it does not explain itself."""
        if word is None or not word.lacking:
            return None
        delayed_by = word.delayed_by if word.lacks in MAY_BE_DELAYED else ()
        waited = word.waited and word.lacks == "contribution"
        return cls(word.lacks, frozenset(word.lacking), frozenset(delayed_by), word.round, waited=waited)


class GaveUpError(RoundAborted):
    """A member gave the round up, and said why."""

    def __init__(self, remote: str, message: AbortMessage) -> None:
        super().__init__("exchange", f"{remote} gave up: {message.reason}", culprit=message.culprit)
        self.remote, self.message = remote, message


class StalledError(RoundAborted):
    """This peer gives a round up, and tells the others what it lacks."""

    def __init__(self, abort: RoundAborted, lack: Lack) -> None:
        super().__init__(abort.phase, abort.reason, abort.culprit)
        self.lack = lack


def no_roster(remote: str) -> StalledError:
    """For a member that exchanges in a group of which this peer has no roster. Who leads it, that member knows."""
    return StalledError(RoundAborted("match", "no roster of this group came"), Lack("roster", frozenset({remote})))


def seen_at(abort: RoundAborted, own_id: str, missing: Callable[[str], Lack | None]) -> Lack | None:
    """What this peer lacks when a round ends long before its deadline: what it saw first.

    Args:
        missing: (member) -> the first stage of which nothing of use has come from it.
    """
    if isinstance(abort, GaveUpError):
        return Lack("word" if Lack.said(abort.message.word) else "stream", frozenset({abort.remote}))
    if abort.culprit is None or abort.culprit == own_id:
        return None
    return missing(abort.culprit) or Lack("stream", frozenset({abort.culprit}))
