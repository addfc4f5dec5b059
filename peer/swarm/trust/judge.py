"""Judges evidence: the offender and the offence, or why it proves nothing. Trusts signatures and arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.protocol.evidence import Evidence, Reduction, SignedRoots, SignedSlice, TwoJoins, TwoReductions, TwoWords
from peer.protocol.records import open_sealed, parse_json
from peer.protocol.statements import (
    NO_RESIDUAL,
    ReducedSeal,
    Sitting,
    climb,
    has_reduced,
    has_sent,
    inputs_of,
    leaf_of,
    path_of,
    residual_of,
)
from peer.protocol.wire import JoinMessage
from peer.swarm.group.roster import JOIN_DOMAIN
from peer.swarm.round.signatures import ReductionProof
from peer.swarm.trust.recompute import Recomputer
from peer.swarm.trust.verdict import NoEvidenceError, RightError, Verdict


class _PayloadsMissingError(NoEvidenceError):
    """It may prove something with the payloads."""


@dataclass(frozen=True)
class Judge:
    """Knows the arithmetic of one run.

    Attributes:
        run_id: evidence of other runs proves nothing here.
    """

    run_id: str
    recomputer: Recomputer

    def judge(self, evidence: Evidence, payloads: Sequence[Payload] | None = None) -> Verdict:
        """The verdict of evidence.

        Args:
            payloads: of the slice of a `Reduction`, of these `sizes`.

        Raises:
            NoEvidenceError: it proves nothing; or not without the payloads.
            ElsewhereError: not to this peer.
        """
        finding = evidence.finding
        try:
            if isinstance(finding, TwoJoins):
                return self._two_joins(finding)
            if isinstance(finding, TwoWords):
                return self._two_words(finding)
            if isinstance(finding, TwoReductions):
                return self._two_reductions(finding)
            return self._reduction(finding, payloads)
        except NoEvidenceError:
            raise
        except ProtocolError as error:
            raise NoEvidenceError(str(error)) from None

    def needs(self, evidence: Evidence) -> list[int]:
        """Lengths of the payloads that the proof needs; raises NoEvidenceError if it proves nothing with any."""
        try:
            self.judge(evidence)
        except _PayloadsMissingError:
            finding = evidence.finding
            assert isinstance(finding, Reduction)
            sitting = finding.sitting
            place = sitting.place(finding.reducer)
            return self.recomputer.sizes(sitting, place, finding.slice_index)
        return []

    def roots(self, reduction: Reduction) -> SignedRoots:
        """What the reducer signed, if it is consistent; raises NoEvidenceError, ProtocolError if not."""
        sitting, place = reduction.sitting, reduction.sitting.place(reduction.reducer)
        count = len(self.recomputer.wire(sitting).broadcast_bytes(len(sitting.members), place))
        self._check_run(sitting)
        if reduction.slice_index >= count or len(reduction.inputs) != len(sitting.members):
            raise NoEvidenceError(f"slice {reduction.slice_index} of {count}, {len(reduction.inputs)} inputs")
        if reduction.output.signature is None:
            raise NoEvidenceError("the reducer has signed nothing")
        residue = reduction.residue
        if (residue is None) != (self.recomputer.recipe.feedback is None):
            raise NoEvidenceError("residual proof present without error feedback, or missing with it")
        entries = [(_climb(one, reduction.slice_index, count), _signature(one)) for one in reduction.inputs]
        outputs = _climb(reduction.output, reduction.slice_index, count)
        left = NO_RESIDUAL
        if residue is not None:
            shard = self.recomputer.shard(sitting, place)
            left = residual_of(residue.since, shard, bytes.fromhex(residue.root))
        seal = ReducedSeal(inputs_of(entries), left, _signature(reduction.output))
        if not has_reduced(sitting, reduction.reducer, outputs, seal):
            raise NoEvidenceError("the reducer has not signed this")
        return signed_roots(seal, outputs)

    def _check_run(self, sitting: Sitting) -> None:
        if sitting.run_id != self.run_id:
            raise NoEvidenceError(f"of another run: {sitting.run_id[:12]}")

    def _two_joins(self, finding: TwoJoins) -> Verdict:
        signers, joins = [], []
        for text in (finding.first, finding.second):
            signer, payload = open_sealed(JOIN_DOMAIN, bytes.fromhex(text))
            signers.append(signer)
            joins.append(parse_json(JoinMessage, payload))
        one, other = joins
        if len(set(signers)) != 1 or one.run_id != self.run_id or one.group is None:
            raise NoEvidenceError("not two joins of one member of a persistent group of this run")
        if _round_of(one) != _round_of(other) or one == other:
            raise NoEvidenceError("two joins that do not conflict")
        return Verdict(signers[0], f"signed two conflicting joins for round {one.round + 1} (equivocation)")

    def _two_words(self, finding: TwoWords) -> Verdict:
        if finding.run_id != self.run_id:
            raise NoEvidenceError(f"of another run: {finding.run_id[:12]}")
        if not finding.first.conflicts(finding.second):
            raise NoEvidenceError("two words that do not conflict")
        if not all(word.is_of(finding.member, self.run_id, finding.group) for word in (finding.first, finding.second)):
            raise NoEvidenceError("the member has not signed both words")
        return Verdict(finding.member, "gave two reasons to two members as it ended a round (equivocation)")

    def _two_reductions(self, finding: TwoReductions) -> Verdict:
        self._check_run(finding.sitting)
        finding.sitting.place(finding.reducer)
        one, other = finding.first, finding.second
        if one.model_copy(update={"signature": other.signature}) == other:
            raise NoEvidenceError("twice the same reduction")
        for roots in (one, other):
            seal = ReducedSeal(*map(bytes.fromhex, (roots.inputs, roots.residual, roots.signature)))
            if not has_reduced(finding.sitting, finding.reducer, bytes.fromhex(roots.outputs), seal):
                raise NoEvidenceError("the reducer has not signed this")
        return Verdict(finding.reducer, f"signed two results in round {finding.sitting.round + 1} (equivocation)")

    def _reduction(self, finding: Reduction, payloads: Sequence[Payload] | None) -> Verdict:
        self.roots(finding)
        sitting, place = finding.sitting, finding.sitting.place(finding.reducer)
        what = f"in round {sitting.round + 1}, slice {finding.slice_index} of its shard"
        count = len(self.recomputer.wire(sitting).broadcast_bytes(len(sitting.members), place))
        for member, one in zip(sitting.members, finding.inputs, strict=True):
            root = _climb(one, finding.slice_index, count)
            if member.peer_id == finding.reducer:
                continue
            if not has_sent(sitting, member.peer_id, finding.reducer, root, _signature(one)):
                return Verdict(finding.reducer, f"reduced what {member.peer_id} never signed, {what}")
        if not self.recomputer.can_audit(sitting, place):
            raise NoEvidenceError("slices of that size cannot be shown")
        if finding.residue is not None:
            if finding.residue.since > sitting.round:
                return Verdict(finding.reducer, f"signed a residual that begins later, {what}")
            self.recomputer.origins(finding, finding.residue)
        if payloads is None:
            raise _PayloadsMissingError("it proves nothing without the payloads")
        sizes = self.recomputer.sizes(sitting, place, finding.slice_index)
        if [len(payload) for payload in payloads] != sizes:
            raise NoEvidenceError("payloads of other sizes")
        inputs = payloads[: len(sitting.members)]
        if [leaf_of(payload).hex() for payload in inputs] != [one.leaf for one in finding.inputs]:
            raise NoEvidenceError("payloads without a signature")
        offence = self.recomputer.offence(finding, payloads)
        if offence is not None:
            return Verdict(finding.reducer, f"{offence}, {what}")
        raise RightError("the reduction is right")


def reduction_of(kept: ReductionProof, index: int) -> Reduction:
    """What this peer signed about one slice of its shard."""
    def proof(leaves: Sequence[bytes], signature: bytes) -> SignedSlice:
        path = tuple(digest.hex() for digest in path_of(leaves, index, index + 1))
        return SignedSlice(leaf=leaves[index].hex(), path=path, signature=signature.hex() or None)

    return Reduction(
        sitting=kept.sitting,
        reducer=kept.reducer,
        slice_index=index,
        inputs=tuple(proof(leaves, seal) for leaves, seal in zip(kept.leaves, kept.signatures, strict=True)),
        output=proof(kept.outputs, kept.seal.signature),
        residue=kept.residual.residue(index) if kept.residual is not None else None,
    )


def signed_roots(seal: ReducedSeal, outputs: bytes) -> SignedRoots:
    """The seal of a shard with this root, as evidence."""
    return SignedRoots(
        inputs=seal.inputs.hex(), outputs=outputs.hex(), residual=seal.residual.hex(), signature=seal.signature.hex()
    )


def _climb(one: SignedSlice, index: int, count: int) -> bytes:
    return climb([bytes.fromhex(one.leaf)], index, count, map(bytes.fromhex, one.path))


def _signature(one: SignedSlice) -> bytes:
    return bytes.fromhex(one.signature or "")


def _round_of(join: JoinMessage) -> tuple[str, int, int, str, str | None]:
    return join.run_id, join.fragment, join.round, join.parent, join.group
