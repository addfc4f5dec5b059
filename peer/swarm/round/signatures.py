"""The signatures of one exchange: made, checked, and what is kept of them and of the payloads for audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer.outer.compress.base import Payload
from peer.outer.round import Group, RoundAborted
from peer.protocol.identity import Identity
from peer.protocol.statements import (
    NO_RESIDUAL,
    Leaves,
    ReducedSeal,
    Seal,
    Sitting,
    has_reduced,
    has_sent,
    inputs_of,
    root_of,
    seal_reduced,
)
from peer.protocol.word import Stage
from peer.swarm.round.reducer_residual import Attempt


class MalformedError(RoundAborted):
    """This peer saw itself that the culprit sent what no honest member sends, at the stage `useless`."""

    def __init__(self, reason: str, culprit: str, useless: Stage) -> None:
        super().__init__("exchange", reason, culprit, useless=useless)


class GroupsDifferError(RoundAborted):
    """Another member took part in another group than this peer: one of them equivocated, or it lies."""

    def __init__(self, remote: str) -> None:
        super().__init__("exchange", f"{remote} has other joins than this peer")
        self.remote = remote


@dataclass(frozen=True)
class ReductionProof:
    """What a reducer can show of its last exchange.

    Attributes:
        leaves: for each member in roster order, the digests of its slices.
        signatures: over them, of each member; empty for the reducer itself.
        outputs: digests of the reduced slices.
        payloads: for each member, its slices in order; empty if no auditor may ask for them.
        residual: what became of the reducer's residual, with error feedback.
    """

    sitting: Sitting
    reducer: str
    leaves: Sequence[Sequence[bytes]]
    signatures: Sequence[bytes]
    outputs: Sequence[bytes]
    seal: ReducedSeal
    payloads: Sequence[Sequence[Payload]]
    residual: Attempt | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads, and of the residual of before the round."""
        payloads = sum(len(content) for slices in self.payloads for content in slices)
        return payloads + (self.residual.nbytes if self.residual is not None else 0)

    def payloads_of(self, index: int) -> list[Payload]:
        """One slice, by member; with error feedback, then the proof of the residual."""
        residual = self.residual.payloads(index) if self.residual is not None else []
        return [*(slices[index] for slices in self.payloads), *residual]


@dataclass(frozen=True)
class ReducedShards:
    """What the others' reduced shards were, and their signatures: seal and slice digests by peer id."""

    sitting: Sitting
    reduced: Mapping[str, tuple[ReducedSeal, Sequence[bytes]]]


def sitting_of(group: Group) -> Sitting:
    """The exchange of a group, as all its members name it."""
    join = group.join
    return Sitting(run_id=join.run_id, round=join.round, parent=join.parent, group=group.id, members=group.members)


def close_reduction(
    identity: Identity, sitting: Sitting, leaves: Mapping[str, Leaves], seals: Mapping[str, Seal], outputs: Leaves,
    payloads: Sequence[Sequence[Payload]], residual: Attempt | None,
) -> ReductionProof:
    """Check what the others say they have sent, then sign what was made of it.

    Args:
        leaves: of each member's slices, this peer's own among them.
        seals: of the others.

    Raises:
        GroupsDifferError, MalformedError: a member was in another group, or signed something else than it sent.
    """
    for peer_id, seal in seals.items():
        if seal.digest != sitting.id:
            raise GroupsDifferError(peer_id)
    me, digests = identity.peer_id, [leaves[member.peer_id].digests for member in sitting.members]
    entries = []
    for member, slices in zip(sitting.members, digests, strict=True):
        root, signature = root_of(slices), seals[member.peer_id].signature if member.peer_id != me else b""
        if member.peer_id != me and not has_sent(sitting, member.peer_id, me, root, signature):
            raise MalformedError("its signature does not fit the contribution", member.peer_id, "contribution")
        entries.append((root, signature))
    left = residual.digest if residual is not None else NO_RESIDUAL
    own = seal_reduced(identity, sitting, inputs_of(entries), root_of(outputs.digests), left)
    signatures = [signature for _, signature in entries]
    return ReductionProof(sitting, me, digests, signatures, outputs.digests, own, payloads, residual)


def close_gathering(identity: Identity, sitting: Sitting, seals: Mapping[str, Seal], outputs: Leaves) -> ReductionProof:
    """Sign this peer's payload, once all others are bound to theirs by their signatures, which cannot be checked yet.

    Args:
        seals: of the others.
        outputs: the slices of this peer's payload.

    Raises:
        GroupsDifferError: a member was in another group.
    """
    for peer_id, seal in seals.items():
        if seal.digest != sitting.id:
            raise GroupsDifferError(peer_id)
    me, nothing = identity.peer_id, root_of(())
    signatures = [seals[member.peer_id].signature if member.peer_id != me else b"" for member in sitting.members]
    inputs = inputs_of([(nothing, signature) for signature in signatures])
    own = seal_reduced(identity, sitting, inputs, root_of(outputs.digests))
    return ReductionProof(sitting, me, [[] for _ in signatures], signatures, outputs.digests, own, ())


def hear(
    sitting: Sitting, seals: Mapping[str, ReducedSeal], leaves: Mapping[str, Leaves], residuals: bool
) -> ReducedShards:
    """Check the reducers' signatures over the shards that have come; raises MalformedError.

    Args:
        residuals: whether a reducer has one.
    """
    for peer_id, seal in seals.items():
        if not residuals and seal.residual != NO_RESIDUAL:
            raise MalformedError("it signed a residual where there is none", peer_id, "reduced")
        if not has_reduced(sitting, peer_id, root_of(leaves[peer_id].digests), seal):
            raise MalformedError("its signature does not fit the reduced shard", peer_id, "reduced")
    return ReducedShards(sitting, {peer_id: (seal, leaves[peer_id].digests) for peer_id, seal in seals.items()})
