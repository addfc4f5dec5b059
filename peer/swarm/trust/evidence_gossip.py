"""Gossips evidence: verified before it is believed, offered once to each peer, false offers counted as strikes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from peer.errors import ProtocolError, in_words
from peer.outer.compress.base import Payload
from peer.protocol.evidence import MAX_EVIDENCE_BYTES, Evidence, Reduction
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import Kind
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.expiring import BoundedMap, ExpiringMap
from peer.swarm.trust.auditor import Conviction
from peer.swarm.trust.ban_list import BanList
from peer.swarm.trust.judge import Judge
from peer.swarm.trust.strikes import StrikeCounter
from peer.swarm.trust.verdict import ElsewhereError, NoEvidenceError

log = logging.getLogger(__name__)
HEARD_AT_ONCE = 2
OFFERS_A_MINUTE = 6  # of one peer
MAX_MEMBERS = 64  # of a group: each has a place of its own, whatever the others say
TOLD_AT_MOST = 32  # peers to which one peer offers the evidence against one offender; each forwards it
REMEMBERED = 4096


class EvidenceGossip:
    """Both sides of an offer of evidence.

    Args:
        strikes: refuses offers of some peers, and counts offers that prove nothing.
        strange: whether a peer was in no round: such peers take no places from others.
        on_found: called with evidence that another peer offered and that this peer has verified.
    """

    def __init__(
        self,
        node: Node,
        judge: Judge,
        bans: BanList,
        strikes: StrikeCounter,
        strange: Callable[[str], bool],
        on_found: Callable[[Conviction, str], None],
    ) -> None:
        self._node, self._judge, self._bans = node, judge, bans
        self._strikes, self._strange, self._on_found = strikes, strange, on_found
        self._name = f"atoll/{judge.run_id[:16]}/evidence"
        self._told: BoundedMap[tuple[str, str], None] = BoundedMap(REMEMBERED)
        places = {True: HEARD_AT_ONCE, False: MAX_MEMBERS}
        self._hearing = {strange: Admission(total, per_peer=1) for strange, total in places.items()}
        self._reading = Admission(HEARD_AT_ONCE, per_peer=1)  # payloads, which take memory
        self._offers: ExpiringMap[str, int] = ExpiringMap(node.clock, node.timing.offers_window_s)

    async def start(self) -> None:
        await self._node.serve(self._name, "audit", self._on_stream)

    async def tell(self, peer_ids: Iterable[str], culprits: Iterable[str]) -> None:
        """Offer the evidence against these peers to those that this peer has not told, one after the other."""
        for culprit in culprits:
            left = TOLD_AT_MOST
            for peer_id in peer_ids:
                if left and peer_id != culprit and peer_id not in self._bans and (peer_id, culprit) not in self._told:
                    left -= 1
                    self._note(peer_id, culprit)
                    if not await self._offer(peer_id, culprit):
                        self._told.pop((peer_id, culprit), None)  # another time

    def knows(self, peer_id: str, culprit: str) -> None:
        """That peer offered this evidence itself."""
        self._note(peer_id, culprit)

    def _note(self, peer_id: str, culprit: str) -> None:
        self._told[(peer_id, culprit)] = None

    async def _offer(self, peer_id: str, culprit: str) -> bool:
        """Offer evidence to a peer; True if it has received it, or need not."""
        try:
            stream = await self._node.open(peer_id, self._name, "audit")
            try:
                async with stream.within(self._node.timing.offer_timeout_s, "did not hear the evidence"):
                    return await self._hand_over(stream, culprit)
            finally:
                stream.close()
        except (StreamClosedError, ProtocolError, OSError) as error:
            log.info("could not offer %s the evidence against %s: %s", peer_id, culprit, in_words(error))
            return False

    async def _hand_over(self, stream: FrameStream, culprit: str) -> bool:
        proof = self._bans.proof(culprit)
        try:
            needed = await asyncio.to_thread(self._judge.needs, proof.evidence)
        except ElsewhereError:
            return True  # of a lineage that this peer has left: it can prove nothing with it any more
        if needed and proof.payloads is None:
            return True
        await stream.send(Kind.EVIDENCE, dump_json(proof.evidence))
        kind, _ = await stream.receive({Kind.REQUEST: 0, Kind.END: 0, Kind.BUSY: 0})
        if kind is Kind.REQUEST and proof.payloads is not None:
            for payload in await asyncio.to_thread(_read, proof.payloads, needed):
                await stream.send(Kind.DATA, payload)
            await stream.receive({Kind.END: 0})
        return kind is not Kind.BUSY

    async def _on_stream(self, stream: FrameStream) -> None:
        with self._hearing[self._strange(stream.remote)].of(stream.remote) as admitted:
            answer = await self._answer(stream) if admitted else Kind.BUSY
        await stream.send(answer)

    async def _answer(self, stream: FrameStream) -> Kind:
        remote = stream.remote
        if self._strikes.refuses(remote) or not self._within_rate(remote):
            return Kind.BUSY
        try:
            longest_s = self._node.timing.evidence_answer_s
            _, body = await stream.receive({Kind.EVIDENCE: MAX_EVIDENCE_BYTES}, timeout_s=longest_s)
            async with stream.within(self._node.timing.offer_timeout_s, "did not show the evidence"):
                return await self._hear(stream, parse_json(Evidence, body))
        except ElsewhereError as error:  # offered again later: this peer may reach that lineage
            log.info("%s offers evidence that this peer cannot judge: %s", remote, error)
            return Kind.BUSY
        except NoEvidenceError as error:
            self._strikes.saw(remote, f"offered evidence that proves nothing: {error}")
        return Kind.END

    def _within_rate(self, remote: str) -> bool:
        offers = self._offers.get(remote, 0)
        if offers < OFFERS_A_MINUTE:
            self._offers[remote] = offers + 1
        return offers < OFFERS_A_MINUTE

    async def _hear(self, stream: FrameStream, evidence: Evidence) -> Kind:
        needed = await asyncio.to_thread(self._judge.needs, evidence)
        if not needed:
            return await self._weigh(stream.remote, evidence, None)
        if isinstance(evidence.finding, Reduction) and self._bans.convicts(evidence.finding.reducer):
            return Kind.END
        with self._reading.of(stream.remote) as admitted:
            if not admitted:
                return Kind.BUSY
            await stream.send(Kind.REQUEST)
            payloads = [(await stream.receive({Kind.DATA: size}, exact=True))[1] for size in needed]
            return await self._weigh(stream.remote, evidence, payloads)

    async def _weigh(self, remote: str, evidence: Evidence, payloads: Sequence[Payload] | None) -> Kind:
        """Judge it, payloads included. Raises NoEvidenceError."""
        verdict = await asyncio.to_thread(self._judge.judge, evidence, payloads)
        self.knows(remote, verdict.culprit)
        if not self._bans.convicts(verdict.culprit):
            self._on_found(Conviction(verdict, evidence, payloads), remote)
        return Kind.END


def _read(path: Path, sizes: Sequence[int]) -> list[bytes]:
    with path.open("rb") as file:
        return [file.read(size) for size in sizes]
