"""Judges evidence: who is guilty of what, or why it shows nothing. Believes signatures and arithmetic, no word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload, PayloadError
from peer.outer.recipes import Recipe
from peer.outer.reduce import bound, reduce_range
from peer.protocol.evidence import Evidence, Reduction, SignedRoots, TwoJoins, TwoReductions, Unit
from peer.protocol.records import open_sealed, parse_json
from peer.protocol.statements import Sitting, climb, has_reduced, has_sent, inputs_of, leaf_of, path_of
from peer.protocol.wire import JoinMessage
from peer.swarm.cut import GatheredCut, ReducedCut
from peer.swarm.roster import JOIN_DOMAIN
from peer.swarm.seals import Kept

MAX_AUDIT_BYTES = 64 * 2**20  # of payloads: whoever verifies holds them in memory
EXACT_CODECS = frozenset({"fp32", "fp16", "bf16", "int8", "int4", "fp4"})


class NoEvidenceError(ProtocolError):
    """It shows nobody's guilt."""


@dataclass(frozen=True)
class Verdict:
    """Whom evidence convicts, and of what, for a person."""

    culprit: str
    deed: str


@dataclass(frozen=True)
class Judge:
    """Knows the arithmetic of one run.

    Attributes:
        run_id: evidence of other runs shows nothing here.
        cut: what is exchanged, and how it is cut.
        recipe: how it is reduced.
    """

    run_id: str
    cut: ReducedCut | GatheredCut
    recipe: Recipe

    @property
    def exact(self) -> bool:
        """Whether everybody can recompute a reduction to the bit.

        Not with error feedback, whose residual only the reducer knows; not with codecs that add up a block in an order
        which depends on the processor. Where payloads are gathered, nobody reduces: there is nothing to audit.
        """
        if isinstance(self.cut, GatheredCut):
            return False
        return self.recipe.feedback is None and self.cut.codec.name in EXACT_CODECS

    def can_audit(self, members: int, place: int) -> bool:
        """Whether units of that part can be shown and recomputed within what is allowed for an audit."""
        units = self.cut.unit_bytes(members, place)
        return self.exact and bool(units) and members * units[0] <= MAX_AUDIT_BYTES

    def judge(self, evidence: Evidence, payloads: Sequence[Payload] | None = None) -> Verdict:
        """Whom it convicts.

        Args:
            payloads: of the unit of a `Reduction`, one for each member.

        Raises:
            NoEvidenceError: it shows nothing; or not without the payloads.
        """
        finding = evidence.finding
        try:
            if isinstance(finding, TwoJoins):
                return self._two_joins(finding)
            if isinstance(finding, TwoReductions):
                return self._two_reductions(finding)
            return self._reduction(finding, payloads)
        except NoEvidenceError:
            raise
        except ProtocolError as error:
            raise NoEvidenceError(str(error)) from None

    def needs(self, evidence: Evidence) -> list[int]:
        """Lengths of the payloads without which it shows nothing; raises NoEvidenceError if nothing would help."""
        try:
            self.judge(evidence)
        except _PayloadsMissingError:
            finding = evidence.finding
            assert isinstance(finding, Reduction)
            members = len(finding.sitting.members)
            size = self.cut.unit_bytes(members, finding.sitting.place(finding.reducer))[finding.unit]
            return [size] * members
        return []

    def roots(self, reduction: Reduction) -> SignedRoots:
        """What the reducer signed, if all of it hangs together; raises NoEvidenceError, ProtocolError if not."""
        sitting, place = reduction.sitting, reduction.sitting.place(reduction.reducer)
        count = len(self.cut.unit_bytes(len(sitting.members), place))
        self._check_run(sitting)
        if reduction.unit >= count or len(reduction.inputs) != len(sitting.members):
            raise NoEvidenceError(f"unit {reduction.unit} of {count}, {len(reduction.inputs)} inputs")
        if reduction.output.signature is None:
            raise NoEvidenceError("the reducer has signed nothing")
        entries = [(_climb(unit, reduction.unit, count), _signature(unit)) for unit in reduction.inputs]
        inputs, outputs = inputs_of(entries), _climb(reduction.output, reduction.unit, count)
        if not has_reduced(sitting, reduction.reducer, inputs, outputs, _signature(reduction.output)):
            raise NoEvidenceError("the reducer has not signed this")
        return SignedRoots(inputs=inputs.hex(), outputs=outputs.hex(), signature=reduction.output.signature)

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
            raise NoEvidenceError("not two joins of one member of a standing group of this run")
        if _round_of(one) != _round_of(other) or one == other:
            raise NoEvidenceError("two joins that may both stand")
        return Verdict(signers[0], f"joined round {one.round + 1} with two faces")

    def _two_reductions(self, finding: TwoReductions) -> Verdict:
        self._check_run(finding.sitting)
        finding.sitting.place(finding.reducer)
        one, other = finding.first, finding.second
        if (one.inputs, one.outputs) == (other.inputs, other.outputs):
            raise NoEvidenceError("twice the same reduction")
        for roots in (one, other):
            digests = (bytes.fromhex(roots.inputs), bytes.fromhex(roots.outputs))
            if not has_reduced(finding.sitting, finding.reducer, *digests, bytes.fromhex(roots.signature)):
                raise NoEvidenceError("the reducer has not signed this")
        return Verdict(finding.reducer, f"told two results in round {finding.sitting.round + 1}")

    def _reduction(self, finding: Reduction, payloads: Sequence[Payload] | None) -> Verdict:
        self.roots(finding)
        sitting, place = finding.sitting, finding.sitting.place(finding.reducer)
        what = f"in round {sitting.round + 1}, unit {finding.unit} of its part"
        count = len(self.cut.unit_bytes(len(sitting.members), place))
        for member, unit in zip(sitting.members, finding.inputs, strict=True):
            root = _climb(unit, finding.unit, count)
            if member.peer_id == finding.reducer:
                continue
            if not has_sent(sitting, member.peer_id, finding.reducer, root, _signature(unit)):
                return Verdict(finding.reducer, f"reduced what {member.peer_id} never signed, {what}")
        if not self.can_audit(len(sitting.members), place):
            raise NoEvidenceError("reductions of this recipe cannot be recomputed to the bit")
        if payloads is None:
            raise _PayloadsMissingError("nothing without the payloads")
        leaves = [leaf_of(payload).hex() for payload in payloads]
        if leaves != [unit.leaf for unit in finding.inputs]:
            raise NoEvidenceError("payloads that nobody signed")
        weights = [member.tokens for member in sitting.members]
        start, stop = self.cut.slices(len(sitting.members), place)[finding.unit]
        expected = self.recompute(payloads, weights, start, stop)
        if expected is not None and leaf_of(expected).hex() == finding.output.leaf:
            raise NoEvidenceError("the reduction is right")
        return Verdict(finding.reducer, f"reduced falsely, {what}")

    def recompute(self, payloads: Sequence[Payload], weights: Sequence[int], start: int, stop: int) -> bytes | None:
        """What an honest reducer makes of these; None when it makes nothing of them but an abort."""
        assert isinstance(self.cut, ReducedCut), "of gathered payloads nothing is reduced"
        gram = torch.zeros(len(payloads), len(payloads), dtype=torch.float64)
        aggregator = bound(self.recipe.aggregator, len(payloads))
        try:
            return reduce_range(payloads, weights, stop - start, self.cut.codec.base, aggregator, gram)
        except (PayloadError, ValueError):
            return None


class _PayloadsMissingError(NoEvidenceError):
    """It may show something with the payloads."""


def reduction_of(kept: Kept, unit: int) -> Reduction:
    """What this peer signed about one unit of its part."""
    def proof(leaves: Sequence[bytes], signature: bytes) -> Unit:
        path = tuple(digest.hex() for digest in path_of(leaves, unit))
        return Unit(leaf=leaves[unit].hex(), path=path, signature=signature.hex() or None)

    return Reduction(
        sitting=kept.sitting,
        reducer=kept.reducer,
        unit=unit,
        inputs=tuple(proof(leaves, seal) for leaves, seal in zip(kept.leaves, kept.signatures, strict=True)),
        output=proof(kept.outputs, kept.seal.signature),
    )


def _climb(unit: Unit, index: int, count: int) -> bytes:
    return climb(bytes.fromhex(unit.leaf), index, count, map(bytes.fromhex, unit.path))


def _signature(unit: Unit) -> bytes:
    return bytes.fromhex(unit.signature or "")


def _round_of(join: JoinMessage) -> tuple[str, int, int, str, str | None]:
    return join.run_id, join.fragment, join.round, join.parent, join.group
