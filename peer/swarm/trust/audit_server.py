"""Shows members what this peer signed in its last exchanges, within quotas; `peer.swarm.trust.auditor` asks for it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping

from peer.errors import ProtocolError
from peer.outer.state.outer_state import CHUNK
from peer.protocol.records import dump_json
from peer.protocol.statements import root_of
from peer.protocol.wire import AuditRequest, Kind
from peer.swarm.group.roster import RosterMessage
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream
from peer.swarm.round.signatures import ReducedShards, ReductionProof
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.trust.judge import reduction_of

ASKS_OF_ONE = 4  # in one round: an honest member asks once, and again where results differ
MAX_ASKING = 256
KEPT_BYTES = 16 * 2**20  # of payloads before the last exchange: small rounds end before a member can ask
KEPT_EXCHANGES = 16
TURN_BYTES = 4 * CHUNK  # as much as a joiner takes in a turn


def audit_name(run_id: str) -> str:
    """Stream handler under which a peer shows what it signed."""
    return f"atoll/{run_id[:16]}/audit"


class AuditServer:
    """What this peer can show of its last exchanges, and to which members.

    Args:
        priority: asked for a turn before TURN_BYTES of payloads: rounds go first.
    """

    def __init__(self, node: Node, run_id: str, priority: RoundPriority) -> None:
        self._node, self._run_id, self._priority = node, run_id, priority
        self._kept: dict[bytes, ReductionProof] = {}
        self._freeing: asyncio.TimerHandle | None = None
        self._heard: ReducedShards | None = None
        self._joins: tuple[str, int, Mapping[str, bytes]] = ("", 0, {})
        self._asked: Counter[str] = Counter()
        self._serving = Admission(MAX_ASKING, ASKS_OF_ONE)  # a member that does not read takes no place of another

    async def start(self) -> None:
        await self._node.serve(audit_name(self._run_id), "audit", self._on_stream)

    def joined(self, group: str, round: int, joins: Mapping[str, bytes]) -> None:
        """All have joined a round of the persistent group `group`."""
        self._joins = group, round, joins

    def begins(self) -> None:
        """Another exchange begins: the payloads of the oldest are freed, as far as they take more than KEPT_BYTES."""
        self._stay()
        self._heard = None
        self._asked.clear()
        taken = 0
        for age, (sitting_id, kept) in enumerate(reversed(list(self._kept.items())), start=1):
            taken += kept.nbytes
            if not kept.payloads or age > KEPT_EXCHANGES or taken > KEPT_BYTES:
                del self._kept[sitting_id]

    def free(self) -> None:
        """Free what is kept: no member asks any more."""
        self._kept.clear()
        self._heard = None

    def reduced(self, kept: ReductionProof) -> None:
        """This peer has reduced its shard: what it shows of that is freed if no other exchange follows."""
        self._kept[kept.sitting.id] = kept
        self._stay()
        self._freeing = asyncio.get_running_loop().call_later(self._node.timing.payloads_kept_s, self.free)

    def _stay(self) -> None:
        if self._freeing is not None:
            self._freeing.cancel()

    def heard(self, heard: ReducedShards) -> None:
        """The others' shards have arrived, signed."""
        self._heard = heard

    async def _on_stream(self, stream: FrameStream) -> None:
        request = await stream.receive_message(Kind.REQUEST, AuditRequest, self._node.timing.first_frame_s)
        remote = stream.remote
        if self._node.strange(remote):  # it was in no round that it could audit
            return
        asked_enough = len(self._asked) >= MAX_ASKING or self._asked[remote] >= ASKS_OF_ONE
        with self._serving.of(remote) as admitted:
            if admitted and not asked_enough:
                self._asked[remote] += 1
                async with stream.within(self._node.timing.audit_timeout_s, "did not take what it asked for"):
                    await self._show(stream, request)
                await stream.send(Kind.END, timeout_s=self._node.timing.frame_timeout_s)
                return
        await stream.send(Kind.BUSY, timeout_s=self._node.timing.frame_timeout_s)

    async def _show(self, stream: FrameStream, request: AuditRequest) -> None:
        """Send what was asked for, if this peer has it and the requester may see it."""
        if request.what == "joins":
            group, round, joins = self._joins
            if (group, round) == (request.of, request.round) and stream.remote in joins:
                message = RosterMessage(joins=tuple(blob.hex() for blob in joins.values()))
                await stream.send(Kind.ROSTER, dump_json(message), timeout_s=self._node.timing.frame_timeout_s)
        elif request.what == "signed":
            heard, kept = self._heard, self._kept.get(bytes.fromhex(request.of))
            if heard is not None and kept is not None and heard.sitting.id == kept.sitting.id:
                heard.sitting.place(stream.remote)
                await stream.send(Kind.DATA, signed_by_all(heard, kept), timeout_s=self._node.timing.frame_timeout_s)
        else:
            await self._show_slice(stream, request)

    async def _show_slice(self, stream: FrameStream, request: AuditRequest) -> None:
        kept = self._kept.get(bytes.fromhex(request.of))
        if kept is None or not kept.payloads:
            return
        kept.sitting.place(stream.remote)
        if request.slice_index >= len(kept.outputs):
            raise ProtocolError(f"{stream.remote} asks for slice {request.slice_index} of {len(kept.outputs)}")
        reduction = await asyncio.to_thread(reduction_of, kept, request.slice_index)
        await stream.send(Kind.EVIDENCE, dump_json(reduction), timeout_s=self._node.timing.frame_timeout_s)
        payloads = deque(kept.payloads_of(request.slice_index))
        while payloads:
            longest_s = self._node.timing.frame_timeout_s
            async with self._priority.turn() as turn:
                sent = 0
                while payloads and sent < TURN_BYTES:
                    sent += len(payloads[0])
                    await stream.send(Kind.DATA, memoryview(payloads.popleft()), turn.wait, longest_s)


def signed_by_all(heard: ReducedShards, kept: ReductionProof) -> bytes:
    """The root of its shard and the seal of every reducer, in roster order."""
    told = {**heard.reduced, kept.reducer: (kept.seal, kept.outputs)}
    entries = (told[member.peer_id] for member in heard.sitting.members)
    return b"".join(root_of(leaves) + seal.body for seal, leaves in entries)
