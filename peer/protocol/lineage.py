"""The chain of updates: links, certificates, fork choice.

A link names everything that a committed round decided. Its hash is the next lineage id; the signatures of at least
two thirds of the roster over that hash are its certificate.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import FailFast, Field, model_validator

from peer.errors import ProtocolError
from peer.protocol.identity import verify
from peer.protocol.manifest import Digest, PeerIdText, Spec
from peer.protocol.ranges import ClaimRule, RangesText
from peer.protocol.records import Count, dump_json
from peer.protocol.spec import Message
from peer.protocol.weights import WeightRule

VOTE_DOMAIN = "vote"
SignatureHex = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def quorum(members: int) -> int:
    """Signatures that commit a round of `members`: at least two thirds."""
    return (2 * members + 2) // 3


class Member(Spec):
    """One member of a roster: its peer id, and the weight of its contribution in tokens (already capped). `share`:
    where members do not all do the same, cells of the vector that it reduces, or values of a block that it sends.
    `ranges`: of the data that it claims its contribution was trained on.
    """

    peer_id: PeerIdText
    tokens: Annotated[int, Field(ge=1, lt=2**40)]
    share: Annotated[int, Field(ge=0, lt=2**32)] = 0
    ranges: RangesText = ""


def shares_of(roster: Iterable[Member]) -> tuple[int, ...]:
    """What the members do, in roster order; none where all do the same."""
    shares = tuple(member.share for member in roster)
    return shares if any(shares) else ()


class Link(Spec):
    """One committed round.

    Attributes:
        state_digest: of the outer state that the update starts from. So no member hashes a state while others wait: the
            state after the update is hashed while trainers continue, and certified by the next link.
        residuals: with error feedback, what each reducer signed of its residual, in roster order.
    """

    run_id: Digest
    fragment: Annotated[int, Field(ge=0, lt=65536)] = 0
    round: Count
    parent: Digest
    roster: Annotated[tuple[Member, ...], Field(min_length=1, max_length=64), FailFast()]
    update_digest: Digest
    state_digest: Digest
    residuals: Annotated[tuple[Digest, ...], Field(max_length=64), FailFast()] = ()

    @model_validator(mode="after")
    def _one_for_each_member(self) -> Link:
        if len({member.peer_id for member in self.roster}) != len(self.roster):
            raise ValueError("a roster names a peer twice")
        if len(self.residuals) not in (0, len(self.roster)):
            raise ValueError(f"{len(self.residuals)} residuals of {len(self.roster)} members")
        return self

    @property
    def id(self) -> str:
        """The lineage id that this link leads to."""
        return hashlib.sha256(b"atoll-link-4" + dump_json(self)).hexdigest()

    @property
    def weight(self) -> int:
        return sum(member.tokens for member in self.roster)

    def place(self, peer_id: str) -> int | None:
        """The index of this peer in the roster; None if it is not a member."""
        return next((place for place, member in enumerate(self.roster) if member.peer_id == peer_id), None)


class Certificate(Message):
    """A link and the signatures that make it real."""

    most_items: ClassVar[int] = 1 << 14

    link: Link
    signatures: Annotated[dict[PeerIdText, SignatureHex], Field(max_length=64)]

    def check(self) -> None:
        """Raise ProtocolError unless two thirds of the roster signed this link, and each signature is a member's."""
        members = {member.peer_id for member in self.link.roster}
        statement = bytes.fromhex(self.link.id)
        for peer_id, signature in self.signatures.items():
            if peer_id not in members or not verify(peer_id, VOTE_DOMAIN, statement, bytes.fromhex(signature)):
                raise ProtocolError(f"round {self.link.round} has no valid signature of {peer_id}")
        if len(self.signatures) < quorum(len(members)):
            raise ProtocolError(
                f"round {self.link.round} has {len(self.signatures)} signatures; {quorum(len(members))} are needed"
            )


@dataclass(frozen=True)
class Position:
    """The position of a peer in its lineage: rounds applied, the resulting lineage id, the tokens committed so far."""

    round: int
    lineage_id: str
    weight: int


@dataclass(frozen=True)
class RosterLimits:
    """What a run allows in one roster: so that the weight of a forged chain is bounded by its length.

    Attributes:
        min_members, max_members: group size.
        rule: what the members weigh.
        fragment: (rounds before) -> the fragment that a round is of.
        claims: what members may claim to have trained on.
    """

    min_members: int = 1
    max_members: int = 64
    rule: WeightRule = field(default_factory=WeightRule)
    fragment: Callable[[int], int] = field(default=lambda _: 0, repr=False)
    claims: ClaimRule = field(default_factory=ClaimRule)

    def check(self, link: Link, seen: Mapping[str, int]) -> None:
        """Raise ProtocolError when the link's roster is outside, or it is of another fragment than the schedule's.

        Args:
            seen: rounds that each peer was in before this one, on this lineage.
        """
        if link.fragment != self.fragment(link.round):
            raise ProtocolError(f"round {link.round} is of fragment {link.fragment}; not {self.fragment(link.round)}")
        if not self.min_members <= len(link.roster) <= self.max_members:
            raise ProtocolError(f"round {link.round} has {len(link.roster)} members; the run allows {self}")
        for member in link.roster:
            self.claims.check(member.peer_id, member.ranges, link.fragment)
        allowed = self.rule.weigh([(member.peer_id, member.tokens) for member in link.roster], seen)
        for member, tokens in zip(link.roster, allowed, strict=True):
            if member.tokens != tokens:
                raise ProtocolError(
                    f"round {link.round} has a weight of {member.tokens} for {member.peer_id}; the run allows {tokens}"
                )


def check_chain(
    certificates: Sequence[Certificate],
    run_id: str,
    parent: str,
    first_round: int,
    limits: RosterLimits | None = None,
    seen: Counter[str] | None = None,
) -> None:
    """Raise ProtocolError unless the certificates lead, link by link, on from `parent` at `first_round`.

    Args:
        limits: of rosters; None checks none.
        seen: rounds that each peer was in up to `parent`; those of the certificates are added as they pass.
    """
    seen = Counter() if seen is None else seen
    for offset, certificate in enumerate(certificates):
        link = certificate.link
        if link.run_id != run_id:
            raise ProtocolError(f"link of another run: {link.run_id[:12]}")
        if link.parent != parent or link.round != first_round + offset:
            raise ProtocolError(f"link of round {link.round} does not follow {parent[:12]} at {first_round + offset}")
        if limits is not None:
            limits.check(link, seen)
        certificate.check()
        seen.update(member.peer_id for member in link.roster)
        parent = link.id


def chain_weight(certificates: Iterable[Certificate]) -> int:
    """Committed tokens of a chain: what fork choice compares."""
    return sum(certificate.link.weight for certificate in certificates)


def heavier(weight: int, lineage_id: str, other_weight: int, other_id: str) -> bool:
    """True if the first of two lineages wins: more committed tokens; on a tie the lower id."""
    if weight != other_weight:
        return weight > other_weight
    return lineage_id < other_id
