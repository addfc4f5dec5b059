"""Invitations: a leader tells the peers it expects that a round gathers, and learns their positions.

The stream stays open while the invited peer is on its way, so that its death or its next round is seen at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from peer.errors import ProtocolError
from peer.protocol.lineage import Position, heavier
from peer.protocol.wire import InviteMessage, Kind, StatusMessage
from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.group.membership import Membership
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait

log = logging.getLogger(__name__)
MAX_STATUSES = 64  # of one invited peer
LAST_CALL = 0.75  # of a leader's wait: a peer that is asked for its contribution then is still in time


def invite_name(run_id: str) -> str:
    """Stream handler that takes invitations."""
    return f"atoll/{run_id[:16]}/invite"


class InviteHost(Protocol):
    """Judges invitations; the `Matchmaker` implements it."""

    def regroups_for(self, leader: str) -> bool:
        """Whether the current persistent group ends to follow this leader, which invites."""


class Invites:
    """Both sides of an invitation.

    Args:
        rosters: of the run, whose straggler window counts.
    """

    def __init__(
        self, node: Node, rosters: RosterAuthority, membership: Membership, me: LocalPeer, host: InviteHost,
    ) -> None:  # fmt: skip
        self._node, self._run_id, self._membership = node, rosters.run_id, membership
        self._me, self._host, self._clock = me, host, node.clock
        self._window_s = rosters.rounds.straggler_wait_s
        self._moved, self._committed_at = asyncio.Event(), node.clock()
        self._inviters: dict[FrameStream, str] = {}
        self._invited = asyncio.Event()

    async def start(self) -> None:
        await self._node.serve(invite_name(self._run_id), "round", self._on_invite)

    def committed(self) -> None:
        """This peer has contributed to a round."""
        self._committed_at = self._clock()

    def moved(self) -> None:
        """This peer's position changed: pending answers are sent again."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def send(self, peer_id: str, wait_s: float) -> None:
        """Invite one peer and hold the stream while it is on its way; returning means: do not wait for it."""
        position = self._me.position()
        try:
            name, timeout_s = invite_name(self._run_id), self._node.timing.probe_timeout_s
            stream = await self._node.open(peer_id, name, "round", timeout_s)
        except StreamClosedError as error:
            log.info("%s is gone: %s", peer_id, error)
            self._membership.avoid(peer_id)
            self._membership.changed.set()
            return
        try:
            invite = InviteMessage(
                run_id=self._run_id,
                round=position.round,
                parent=position.lineage_id,
                weight=position.weight,
                wait_s=wait_s,
            )
            await stream.send_message(Kind.INVITE, invite)
            status = await stream.receive_message(Kind.STATUS, StatusMessage, self._node.timing.probe_timeout_s)
            self._heed(peer_id, status)
            for _ in range(MAX_STATUSES):
                if not status.coming:
                    break
                status = await stream.receive_message(Kind.STATUS, StatusMessage)  # it made a round without this peer
                self._heed(peer_id, status)
        except StreamClosedError as error:
            log.info("%s is gone: %s", peer_id, error)
            self._membership.avoid(peer_id)
        except ProtocolError as error:
            log.warning("invitation to %s: %s", peer_id, error)
        finally:
            stream.close()
            self._membership.changed.set()

    def _heed(self, peer_id: str, status: StatusMessage) -> None:
        position = self._me.position()
        if status.lineage_id == position.lineage_id:
            self._membership.learn(peer_id)
            self._membership.hears_of(status.leader, status.lineage_id)
        elif heavier(status.weight, status.lineage_id, position.weight, position.lineage_id):
            self._me.nudge(peer_id, status.lineage_id)
        self._membership.changed.set()

    async def _on_invite(self, stream: FrameStream) -> None:
        invite = await stream.receive_message(Kind.INVITE, InviteMessage, self._node.timing.probe_timeout_s)
        self._membership.seen(stream.remote)
        coming = self._comes(invite, stream.remote, just_arrived=True)
        await stream.send_message(Kind.STATUS, self._status(coming))
        ended = asyncio.ensure_future(stream.closed())
        self._inviters[stream] = invite.parent
        self._invited.set()
        try:
            while coming and not ended.done():
                moved = asyncio.ensure_future(self._moved.wait())
                await asyncio.wait({moved, ended}, return_when=asyncio.FIRST_COMPLETED)
                await cancel_and_wait([moved])
                coming = ended.done() or self._comes(invite, stream.remote)
            if not ended.done():
                await stream.send_message(Kind.STATUS, self._status(coming=False))
        finally:
            self._inviters.pop(stream, None)
            await cancel_and_wait([ended])

    async def elsewhere(self, leader: str) -> None:
        """Return once another leader than this one invites to the next round of this peer."""
        while not any(
            parent == self._me.position().lineage_id and stream.remote != leader
            for stream, parent in self._inviters.items()
        ):
            self._invited.clear()
            await self._invited.wait()

    def _comes(self, invite: InviteMessage, leader: str, just_arrived: bool = False) -> bool:
        """Whether this peer will join that round, being at its position or able to catch up. Makes it do so."""
        if invite.run_id != self._run_id or not self._me.taking_part():
            return False
        position = self._me.position()
        if invite.parent == position.lineage_id:
            self._membership.learn(leader)
            if just_arrived:
                self._membership.expect(leader, self._node.timing.invited_s)
                self._membership.changed.set()
            if self._me.refuses(leader) or self._membership.passes_over(leader) or not self._host.regroups_for(leader):
                return False  # it follows another leader, or its group continues: the leader would wait for nothing
            # where peers call for rounds this is a call, from any leader: no peer contributes unasked
            leads = self._me.slot.called or leader == self._membership.leader()
            if leads and self._me.slot.due_in_s() > invite.wait_s:
                self._come(invite, position)
            return True
        behind = heavier(invite.weight, invite.parent, position.weight, position.lineage_id)
        if behind:
            self._me.nudge(leader, invite.parent)
        elif just_arrived:
            self._membership.announced(leader)
        return behind

    def _come(self, invite: InviteMessage, position: Position) -> None:
        """Contribute early; but with less than half of a contribution, as late as the leader waits, and not within a
        straggler window of its last one: otherwise a peer that is always first would make all send almost nothing.
        """
        wait_s = 0.0
        if not self._me.slot.halfway():
            wait_s = max(LAST_CALL * invite.wait_s, self._committed_at + self._window_s - self._clock())
        if wait_s <= 0.0:
            self._me.slot.request_now()
            return

        def request_now() -> None:
            if self._me.position() == position:
                self._me.slot.request_now()

        asyncio.get_running_loop().call_later(wait_s, request_now)

    def _status(self, coming: bool) -> StatusMessage:
        position = self._me.position()
        return StatusMessage(
            coming=coming,
            round=position.round,
            lineage_id=position.lineage_id,
            weight=position.weight,
            leader=self._membership.leader(),
        )
