"""What a member says of a round that it gives up. It signs one such word for a group: two that differ convict it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from peer.protocol.identity import Identity, verify
from peer.protocol.lineage import SignatureHex
from peer.protocol.manifest import MAX_ROUNDS, Digest, PeerIdText, Spec
from peer.protocol.records import dump_json

WORD_DOMAIN = "word"
Stage = Literal["word", "stream", "waiting", "roster", "join", "contribution", "reduced", "vote"]
Names = Annotated[tuple[PeerIdText, ...], Field(max_length=64), FailFast()]


class Said(Spec):
    """`lacks`: the first stage that failed, and `lacking`: of which members; `delayed_by`: who had delayed this member
    by then, or ended the round while it waited. `round`: in which; -1: the group's first. `cause`: the signature of the
    word of another for which it gave up, so that no words are the causes of each other in a circle. `waited`: for these
    contributions until its deadline. Claims, which no peer believes alone.
    """

    lacks: Stage
    lacking: Names
    delayed_by: Names = ()
    round: Annotated[int, Field(ge=-1, le=MAX_ROUNDS)] = -1
    cause: SignatureHex | None = None
    waited: bool = False


class Word(Said):
    """What is signed."""

    run_id: Digest
    group: Digest


class SignedWord(Said):
    """A word with the signature of the member that says it; run and group are known where it is said."""

    signature: SignatureHex

    @classmethod
    def of(cls, identity: Identity, word: Word) -> SignedWord:
        """Sign it."""
        signature = identity.sign(WORD_DOMAIN, dump_json(word)).hex()
        return cls(**word.model_dump(exclude={"run_id", "group"}), signature=signature)

    def is_of(self, member: str, run_id: str, group: str) -> bool:
        """Whether this member has signed it, for this group."""
        word = Word(**self._said(), run_id=run_id, group=group)
        return verify(member, WORD_DOMAIN, dump_json(word), bytes.fromhex(self.signature))

    def conflicts(self, other: SignedWord) -> bool:
        """Whether an honest member cannot have signed both for one group. A word on a roster names its listener."""
        return self._said() != other._said() and "roster" not in (self.lacks, other.lacks)

    def _said(self) -> dict[str, Any]:
        return self.model_dump(exclude={"signature"})


class HeardWord(Spec):
    """Another member's word."""

    member: PeerIdText
    word: SignedWord
