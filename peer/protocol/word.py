"""What a member says of a round that it gives up. It signs one such word for a group: two that differ convict it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.protocol.identity import Identity, verify
from peer.protocol.lineage import SignatureHex
from peer.protocol.manifest import Digest, PeerIdText, Spec
from peer.protocol.records import dump_json

WORD_DOMAIN = "word"
Stage = Literal["word", "stream", "waiting", "roster", "join", "contribution", "reduced", "vote"]
Names = Annotated[tuple[PeerIdText, ...], Field(max_length=64)]


class Word(Spec):
    """`lacks`: the first stage that failed, and `lacking`: of which members; `delayed_by`: who had delayed this member
    by then. Claims, which no peer believes alone.
    """

    run_id: Digest
    group: Digest
    lacks: Stage
    lacking: Names
    delayed_by: Names


class SignedWord(Spec):
    """A word with the signature of the member that says it; run and group are known where it is said."""

    lacks: Stage
    lacking: Names
    delayed_by: Names = ()
    signature: SignatureHex

    @classmethod
    def of(cls, identity: Identity, word: Word) -> SignedWord:
        """Sign it."""
        signature = identity.sign(WORD_DOMAIN, dump_json(word)).hex()
        return cls(lacks=word.lacks, lacking=word.lacking, delayed_by=word.delayed_by, signature=signature)

    def is_of(self, member: str, run_id: str, group: str) -> bool:
        """Whether this member has signed it, for this group."""
        word = Word(run_id=run_id, group=group, lacks=self.lacks, lacking=self.lacking, delayed_by=self.delayed_by)
        return verify(member, WORD_DOMAIN, dump_json(word), bytes.fromhex(self.signature))

    def conflicts(self, other: SignedWord) -> bool:
        """Whether an honest member cannot have signed both for one group. A word on a roster names its listener."""
        mine, theirs = ((one.lacks, one.lacking, one.delayed_by) for one in (self, other))
        return mine != theirs and "roster" not in (self.lacks, other.lacks)


class HeardWord(Spec):
    """Another member's word."""

    member: PeerIdText
    word: SignedWord
