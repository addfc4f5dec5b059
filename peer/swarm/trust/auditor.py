"""Random audits: after a commit, fetch the inputs of a random slice from its reducer, and reduce them again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from peer.errors import ProtocolError, in_words
from peer.outer.compress.base import Payload
from peer.protocol.evidence import MAX_EVIDENCE_BYTES, Evidence, Reduction, TwoJoins, TwoReductions
from peer.protocol.records import MAX_RECORD_BYTES, open_sealed, parse_json
from peer.protocol.statements import DIGEST_BYTES, REDUCED_SEAL_BYTES, ReducedSeal, has_reduced, root_of
from peer.protocol.wire import MAX_ROSTER_BYTES, AuditRequest, Kind
from peer.swarm.group.roster import JOIN_DOMAIN, RosterMessage
from peer.swarm.net.node import Node
from peer.swarm.net.request import open_request
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.round.signatures import ReducedShards
from peer.swarm.trust.audit_server import audit_name
from peer.swarm.trust.judge import Judge, signed_roots
from peer.swarm.trust.verdict import ElsewhereError, NoEvidenceError, RightError, Verdict

log = logging.getLogger(__name__)
LEAST_PROBABILITY = 0.05


def probability(members: int) -> float:
    """That a member audits a round: one audit in a group and round on average, and more in groups above 20."""
    return max(LEAST_PROBABILITY, 1.0 / members)


@dataclass(frozen=True)
class Conviction:
    """Evidence that convicts, with the payloads that it needs."""

    verdict: Verdict
    evidence: Evidence
    payloads: Sequence[Payload] | None = None


@dataclass(frozen=True)
class Audit:
    """How one audit ended: the slice is right, not shown, or false; or this peer is on another lineage by now."""

    round: int
    reducer: str
    slice_index: int
    outcome: Literal["right", "not shown", "false", "not judged"]
    detail: str = ""
    found: Conviction | None = None


class Auditor:
    """Asks others what they signed, and judges it.

    Args:
        rng: secret, so that no other peer can predict its draws.
    """

    def __init__(self, node: Node, judge: Judge, rng: random.Random) -> None:
        self._node, self._name, self._judge, self._rng = node, audit_name(judge.run_id), judge, rng

    def draw(self, heard: ReducedShards) -> tuple[str, int] | None:
        """Whether to audit this round, and which slice: uniform over the slices of the others' shards."""
        members = heard.sitting.members
        if self._rng.random() >= probability(len(members)):
            return None
        slices = [
            (member.peer_id, index)
            for place, member in enumerate(members)
            if member.peer_id in heard.reduced and self._judge.recomputer.can_audit(heard.sitting, place)
            for index in range(len(heard.reduced[member.peer_id][1]))
        ]
        return self._rng.choice(slices) if slices else None

    async def audit(self, heard: ReducedShards, reducer: str, index: int) -> Audit:
        """Fetch one slice and reduce it again."""
        round = heard.sitting.round + 1
        try:
            work = self._fetch_and_judge(heard, reducer, index)
            found = await asyncio.wait_for(work, self._node.timing.audit_timeout_s)
        except ElsewhereError as error:
            return Audit(round, reducer, index, "not judged", str(error))
        except (TimeoutError, StreamClosedError, ProtocolError) as error:
            return Audit(round, reducer, index, "not shown", in_words(error))
        if found is None:
            return Audit(round, reducer, index, "right")
        return Audit(round, reducer, index, "false", found.verdict.offence, found)

    async def _fetch_and_judge(self, heard: ReducedShards, reducer: str, index: int) -> Conviction | None:
        reduction, payloads = await self._slice_inputs(heard, reducer, index)
        roots = self._judge.roots(reduction)
        seal, leaves = heard.reduced[reducer]
        mine = signed_roots(seal, root_of(leaves))
        if roots.model_copy(update={"signature": mine.signature}) != mine:
            two = TwoReductions(sitting=heard.sitting, reducer=reducer, first=mine, second=roots)
            return await self._convict(Evidence(finding=two))
        try:
            return await self._convict(Evidence(finding=reduction), payloads)
        except RightError:
            return None

    async def _convict(self, evidence: Evidence, payloads: Sequence[Payload] | None = None) -> Conviction:
        """Raises NoEvidenceError."""
        return Conviction(await asyncio.to_thread(self._judge.judge, evidence, payloads), evidence, payloads)

    async def _suspect(self, evidence: Evidence) -> Conviction | None:
        try:
            return await self._convict(evidence)
        except NoEvidenceError:
            return None

    async def _slice_inputs(self, heard: ReducedShards, reducer: str, index: int) -> tuple[Reduction, list[Payload]]:
        """What a reducer shows of a slice: of this sitting, with payloads that match their digests."""
        sitting, members = heard.sitting, len(heard.sitting.members)
        sizes = self._judge.recomputer.sizes(sitting, sitting.place(reducer), index)
        async with self._asking(reducer, AuditRequest(what="slice", of=sitting.id.hex(), slice_index=index)) as stream:
            body = await self._answer(stream, Kind.EVIDENCE, MAX_EVIDENCE_BYTES)
            reduction = parse_json(Reduction, body)
            if (reduction.sitting, reduction.reducer, reduction.slice_index) != (sitting, reducer, index):
                raise ProtocolError(f"{reducer} shows something other than it was asked for")
            if len(reduction.inputs) != members:
                raise ProtocolError(f"{reducer} shows {len(reduction.inputs)} inputs of {members}")
            payloads: list[Payload] = []
            for size in sizes:
                longest_s = self._node.timing.audit_timeout_s
                _, payload = await stream.receive({Kind.DATA: size}, exact=True, timeout_s=longest_s)
                payloads.append(payload)
        return reduction, payloads

    async def compare(self, heard: ReducedShards, remote: str) -> Conviction | None:
        """Find the reducer that sent `remote` another result than this peer, if their links differ."""
        sitting = heard.sitting
        width = DIGEST_BYTES + REDUCED_SEAL_BYTES
        try:
            async with self._asking(remote, AuditRequest(what="signed", of=sitting.id.hex())) as stream:
                body = await self._answer(stream, Kind.DATA, len(sitting.members) * width)
        except (StreamClosedError, ProtocolError) as error:
            log.info("%s does not show the results that it received: %s", remote, in_words(error))
            return None
        for place, member in enumerate(sitting.members[: len(body) // width]):
            entry = body[place * width : (place + 1) * width]
            outputs, told = entry[:DIGEST_BYTES], ReducedSeal.parse(entry[DIGEST_BYTES:])
            if member.peer_id not in heard.reduced or not has_reduced(sitting, member.peer_id, outputs, told):
                continue
            seal, leaves = heard.reduced[member.peer_id]
            first, second = signed_roots(seal, root_of(leaves)), signed_roots(told, outputs)
            two = TwoReductions(sitting=sitting, reducer=member.peer_id, first=first, second=second)
            found = await self._suspect(Evidence(finding=two))
            if found is not None:
                return found
        return None

    async def equivocation(self, remote: str, group: str, round: int, joins: dict[str, bytes]) -> Conviction | None:
        """Find the member that sent `remote` another join than this peer for the same round of a persistent group.

        Raises:
            NoEvidenceError: the joins that it shows do not explain its other group.
        """
        try:
            async with self._asking(remote, AuditRequest(what="joins", of=group, round=round)) as stream:
                roster = parse_json(RosterMessage, await self._answer(stream, Kind.ROSTER, MAX_ROSTER_BYTES))
        except (StreamClosedError, ProtocolError) as error:
            log.info("%s does not show its joins: %s", remote, in_words(error))
            return None
        for text in roster.joins:
            try:
                sealed = bytes.fromhex(text[: 2 * MAX_RECORD_BYTES])
                signer, _ = open_sealed(JOIN_DOMAIN, sealed)
            except (ValueError, ProtocolError):
                continue
            if signer in joins and joins[signer] != sealed:
                found = await self._suspect(Evidence(finding=TwoJoins(first=joins[signer].hex(), second=sealed.hex())))
                if found is not None:
                    return found
        raise NoEvidenceError(f"{remote} shows no conflicting joins")

    def _asking(self, remote: str, request: AuditRequest) -> AbstractAsyncContextManager[FrameStream]:
        return open_request(
            self._node, remote, self._name, "audit", request, timeout_s=self._node.timing.audit_ask_s
        )

    async def _answer(self, stream: FrameStream, wanted: Kind, limit: int) -> bytes:
        """The body that was asked for; raises StreamClosedError when the other end does not show it."""
        limits = {wanted: limit, Kind.BUSY: 0, Kind.END: 0}
        kind, body = await stream.receive(limits, timeout_s=self._node.timing.audit_ask_s)
        if kind is not wanted:
            raise StreamClosedError(stream.remote, "is busy" if kind is Kind.BUSY else "does not have it any more")
        return body
