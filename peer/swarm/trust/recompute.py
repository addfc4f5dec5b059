"""Recomputes reductions: what an honest reducer computes from the same contributions and its residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peer.outer.compress.base import NonFiniteError, Payload, PayloadError
from peer.outer.compress.residual import Residual
from peer.outer.math.aggregation import Aggregation
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.fragments import Fragments
from peer.outer.state.wire_format import WireFormat
from peer.protocol.evidence import Reduction, Residue
from peer.protocol.lineage import Link, shares_of
from peer.protocol.statements import DIGEST_BYTES, Sitting, climb, leaf_of, residual_of
from peer.swarm.round.reducer_residual import Chain, Origin, leaves_of, origins, split
from peer.swarm.trust.verdict import ElsewhereError, NoEvidenceError

MAX_AUDIT_BYTES = 64 * 2**20  # of payloads, which the verifier holds in memory


@dataclass(frozen=True)
class Recomputer:
    """Knows the arithmetic of one run.

    Attributes:
        chain: -> this peer's lineage: with error feedback it holds the digests of the reducers' residuals.
    """

    fragments: Fragments
    recipe: Recipe
    chain: Chain

    def wire(self, round: Sitting | Link) -> WireFormat:
        """How that round was written; raises PayloadError if its members cannot do what it says."""
        members = round.members if isinstance(round, Sitting) else round.roster
        return self.fragments.at(round.round).wire.among(shares_of(members))

    def can_audit(self, sitting: Sitting, place: int) -> bool:
        """Whether slices of that shard can be shown and recomputed within the limit of an audit.

        In gather rounds no member reduces: there is nothing to audit.
        """
        members = len(sitting.members)
        sizes = self.wire(sitting).contributed_bytes(members, place)
        return bool(sizes) and members * sizes[0] <= MAX_AUDIT_BYTES

    def sizes(self, sitting: Sitting, place: int, index: int) -> list[int]:
        """Bytes of what an audit of a slice must show: each member's payload; with error feedback then the residual of
        before the round, fp32, and the digests of its cells after it.
        """
        wire, members = self.wire(sitting), len(sitting.members)
        inputs = [wire.broadcast_bytes(members, place)[index]] * members
        if self.recipe.feedback is None:
            return inputs
        start, stop = wire.slices(members, place)[index]
        return [*inputs, 4 * (stop - start), DIGEST_BYTES * -(-(stop - start) // wire.cell)]

    def shard(self, round: Sitting | Link, place: int) -> tuple[int, int]:
        """[start, stop) of what that member reduces."""
        members = len(round.members if isinstance(round, Sitting) else round.roster)
        return self.wire(round).bounds(members)[place]

    def offence(self, finding: Reduction, payloads: Sequence[Payload]) -> str | None:
        """The offence of the reducer, in words; None if it reduced correctly.

        Args:
            payloads: of these `sizes`, the members' being what they signed.

        Raises:
            NoEvidenceError, ProtocolError: what is shown of the residual is not what the reducer signed.
            ElsewhereError: this peer cannot know the reducer's residual.
        """
        sitting, residue = finding.sitting, finding.residue
        members, place = len(sitting.members), sitting.place(finding.reducer)
        wire = self.wire(sitting)
        start, stop = wire.slices(members, place)[finding.slice_index]
        before = after = None
        if residue is not None:
            before = self._before(finding, residue, start, payloads[-2])
            after = self._after(finding, residue, start, payloads[-1])
        weights = [member.tokens for member in sitting.members]
        reduced = self.recompute(wire, payloads[:members], weights, stop - start, before)
        if reduced is None or leaf_of(reduced).hex() != finding.output.leaf:
            return "reduced falsely"
        if before is not None and leaves_of(before, wire.cell) != after:
            return "kept a false residual"
        return None

    def origins(self, finding: Reduction, residue: Residue) -> list[Origin]:
        """The residuals that the reducer had to start from, in its slice.

        Raises:
            ElsewhereError: it is not about this peer's lineage.
            NoEvidenceError: not one path for each of them.
        """
        sitting, chain = finding.sitting, self.chain()[: finding.sitting.round]
        if len(chain) < sitting.round or (chain and chain[-1].link.id != sitting.parent):
            raise ElsewhereError(f"round {sitting.round + 1} of {sitting.parent[:12]} is not in this lineage")
        fragment = self.fragments.at(sitting.round).index
        slice_ = self.wire(sitting).slices(len(sitting.members), sitting.place(finding.reducer))[finding.slice_index]
        found = origins(chain, finding.reducer, residue.since, *slice_, self.shard, fragment)
        if len(residue.carried) != sum(origin.link is not None for origin in found):
            raise NoEvidenceError(f"{len(residue.carried)} paths do not match the origins of the residual")
        return found

    def _before(self, finding: Reduction, residue: Residue, start: int, payload: Payload) -> Tensor:
        """The residual from `start` on that the reducer had to start from: the one it shows, if it matches."""
        values = torch.from_numpy(np.frombuffer(payload, "<f4").astype(np.float32))
        wire, paths = self.wire(finding.sitting), iter(residue.carried)
        for origin in self.origins(finding, residue):
            own = values[origin.start - start : origin.stop - start]
            if origin.link is None:
                if own.view(torch.int32).any():
                    raise NoEvidenceError("a residual that the reducer was not left with")
                continue
            place = origin.link.place(finding.reducer)
            assert place is not None, "it has no seat where it was left with something"
            first, last = self.shard(origin.link, place)
            path = map(bytes.fromhex, next(paths))
            cells = leaves_of(own, wire.cell), (origin.start - first) // wire.cell
            root = climb(*cells, -(-(last - first) // wire.cell), path)
            if residual_of(residue.since, (first, last), root).hex() not in origin.link.residuals[place : place + 1]:
                raise NoEvidenceError("a residual that the reducer was not left with")
        return values

    def _after(self, finding: Reduction, residue: Residue, start: int, payload: Payload) -> list[bytes]:
        """The cells from `start` on that the reducer signed; raises NoEvidenceError for others."""
        sitting, leaves = finding.sitting, list(split(payload))
        cell = self.wire(sitting).cell
        first, last = self.shard(sitting, sitting.place(finding.reducer))
        path = map(bytes.fromhex, residue.path)
        root = climb(leaves, (start - first) // cell, -(-(last - first) // cell), path)
        if root.hex() != residue.root:
            raise NoEvidenceError("a residual without a signature")
        return leaves

    def recompute(
        self, wire: WireFormat, payloads: Sequence[Payload], weights: Sequence[int], numel: int,
        residual: Tensor | None = None,
    ) -> bytes | None:  # fmt: skip
        """What an honest reducer computes from these; None if it would abort.

        Args:
            numel: of the slice.
            residual: fp32 [numel], with error feedback; becomes the residual after the round.
        """
        feedback = None
        if residual is not None:
            assert self.recipe.feedback is not None, "a residual without error feedback"
            feedback = Residual(self.recipe.feedback.on_return, numel, residual)
        aggregation = Aggregation(self.recipe.aggregator, weights, stride=0)
        try:
            return wire.reduce(aggregation, payloads, 0, numel, feedback)
        except (PayloadError, NonFiniteError, ValueError):
            return None
