"""The lobby of a leader: followers hand in their joins over streams, and hold these until the roster arrives.

The leader reports at once, and every second, that it is awake. Without that, followers waited for a suspended leader as
long as for a round, while the others continued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from peer.protocol.wire import MAX_JOIN_BYTES, JoinMessage, Kind, RejectMessage, StatusMessage
from peer.swarm.group.invites import LAST_CALL
from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.group.membership import Membership
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait

log = logging.getLogger(__name__)


def join_name(run_id: str) -> str:
    """Stream handler that takes joins."""
    return f"atoll/{run_id[:16]}/join"


@dataclass
class WaitingMember:
    """A member that waits at this leader."""

    sealed: bytes
    join: JoinMessage
    stream: FrameStream
    since: float
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    told: bool = False


class LobbyHost(Protocol):
    """What a lobby asks and tells; the `Matchmaker` implements it."""

    def opens(self) -> bool:
        """Whether a group forms here with the members that wait: a full persistent group, for instance, continues
        without them.
        """

    def awaited(self) -> None:
        """A member waits for the next round of this peer."""

    def announced(self, peer_id: str) -> None:
        """This peer announced that it is catching up: it is live."""

    def seated(self, peer_id: str) -> None:
        """This peer waits for the round that comes next."""

    def arrived(self) -> None:
        """Followers may be enough for a round."""

    def left(self, peer_id: str) -> None:
        """This peer left the lobby before there was a roster."""


class Lobby:
    """The members that wait at this peer.

    Args:
        rosters: opens joins; of the run whose straggler window counts.
        host: decides whether a group forms here, and learns of followers.
    """

    def __init__(
        self, node: Node, rosters: RosterAuthority, membership: Membership, me: LocalPeer, host: LobbyHost,
    ) -> None:  # fmt: skip
        self._node, self._own_id = node, node.peer_id
        self._rosters, self._membership, self._me = rosters, membership, me
        self.host, self._clock, self._window_s = host, node.clock, rosters.rounds.straggler_wait_s
        self._taken: dict[str, WaitingMember] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[str]:
        return iter(self._taken)

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self._taken

    def leave(self, peer_id: str) -> None:
        """Remove a member: it is in a group now."""
        self._taken.pop(peer_id, None)

    def window_start(self, started: float) -> float:
        """When the straggler window opened: with the first that waits, this leader or a follower."""
        return min([started, *(seat.since for seat in self.present(self._me.position().lineage_id).values())])

    def present(self, parent: str) -> dict[str, WaitingMember]:
        """The members that wait for the round after `parent`; others wait until this leader gets there."""
        round = self._me.position().round
        return {
            peer_id: seat
            for peer_id, seat in self._taken.items()
            if (seat.join.round, seat.join.parent) == (round, parent)
        }

    def moved(self) -> None:
        """This peer's position changed: reject the followers that wait for a round that is over."""
        position = self._me.position()
        for peer_id, seat in list(self._taken.items()):
            there = (seat.join.round, seat.join.parent) == (position.round, position.lineage_id)
            if not there and seat.join.round <= position.round:
                del self._taken[peer_id]
                seat.taken.set()
        for peer_id in self.present(position.lineage_id):  # they arrived before this peer
            self._sits(peer_id)
        self.host.arrived()
        if self._me.slot.called and self.present(position.lineage_id) and self.host.opens():
            self.hurry_if_halfway()

    def hurry_if_halfway(self) -> None:
        """Contribute at once if not due within the window; with little progress, train until its end."""
        if self._me.slot.due_in_s() > self._window_s and self._me.slot.halfway():
            self._me.slot.request_now()

    async def disband(self, leader: str) -> None:
        """Redirect all followers to another leader."""
        seats = list(self._taken.values())
        self._taken.clear()
        await asyncio.gather(*(self._send_away(seat, leader) for seat in seats))

    async def _send_away(self, seat: WaitingMember, leader: str) -> None:
        seat.told = True
        await self._reject(seat.stream, "follow", leader)
        seat.taken.set()

    async def on_join(self, stream: FrameStream) -> None:
        """Serve a member that opens a stream to this leader."""
        _, sealed = await stream.receive({Kind.JOIN: MAX_JOIN_BYTES}, timeout_s=self._node.timing.probe_timeout_s)
        join = self._rosters.open_join(sealed, stream.remote, self._me.position())
        reason, leader = self._judge(join, stream.remote)
        if reason is None:
            await self._say_awake(stream)
            reason, leader = self._judge(join, stream.remote)  # this peer may have made a round meanwhile
        if reason is not None:
            if reason == "behind":
                self.host.announced(stream.remote)
            await self._reject(stream, reason, leader)
            return
        seat = WaitingMember(sealed, join, stream, since=self._clock())
        self._taken[stream.remote] = seat
        self._membership.changed.set()
        if join.parent == self._me.position().lineage_id:
            self._sits(stream.remote)
            if self.host.opens():
                self.hurry_if_halfway()
            self.host.awaited()
            self.host.arrived()
        ended = asyncio.ensure_future(stream.closed())
        taken = asyncio.ensure_future(seat.taken.wait())
        last_call_s = LAST_CALL * self._window_s
        hurry = asyncio.get_running_loop().call_later(last_call_s, self._hurry_for, stream.remote, seat)
        period_s = self._node.timing.awake_period_s
        try:
            while not (ended.done() or taken.done()):
                await asyncio.wait({ended, taken}, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
                if not (ended.done() or stream.sending) and self._taken.get(stream.remote) is seat:
                    await self._keep(seat)
        finally:
            hurry.cancel()
            await cancel_and_wait([ended, taken])
            if self._taken.get(stream.remote) is seat:
                del self._taken[stream.remote]
                self.host.left(stream.remote)
                self._membership.changed.set()
        if seat.taken.is_set() and seat.join.round <= self._me.position().round and not seat.told:
            self.host.announced(stream.remote)
            await self._reject(stream, "behind", None)

    async def _keep(self, seat: WaitingMember) -> None:
        """Report to a waiting member that its leader is awake, or which other leader to follow."""
        leader = self._membership.leader()
        if leader == self._own_id:
            await self._say_awake(seat.stream)
        else:
            del self._taken[seat.stream.remote]
            await self._send_away(seat, leader)

    def _hurry_for(self, peer_id: str, seat: WaitingMember) -> None:
        """A member has waited most of a window and this leader is still not due: contribute the current progress."""
        if self._taken.get(peer_id) is not seat or seat.join.parent != self._me.position().lineage_id:
            return
        if self.host.opens():
            self._me.slot.request_now()
        else:
            asyncio.get_running_loop().call_later(self._window_s, self._hurry_for, peer_id, seat)

    def _sits(self, peer_id: str) -> None:
        """Report a member that waits here for the next round."""
        self._membership.learn(peer_id)
        self.host.seated(peer_id)

    async def _say_awake(self, stream: FrameStream) -> None:
        """Report to a member that this leader is awake: a suspended machine accepts its stream, too."""
        position = self._me.position()
        status = StatusMessage(
            coming=True, round=position.round, lineage_id=position.lineage_id, weight=position.weight,
            leader=self._own_id,
        )  # fmt: skip
        await stream.send_message(Kind.STATUS, status, self._node.timing.probe_timeout_s)

    def _judge(self, join: JoinMessage, member: str) -> tuple[str | None, str | None]:
        position = self._me.position()
        if self._me.refuses(member):
            return "excluded", None
        if join.parent != position.lineage_id and join.round <= position.round:
            return "behind", None  # or on another lineage; a join for a later round waits until we get there
        if not self._me.taking_part():
            return "excluded", None
        leader = self._membership.leader()
        return ("follow", leader) if leader != self._own_id else (None, None)

    async def _reject(self, stream: FrameStream, reason: str, leader: str | None) -> None:
        position = self._me.position()
        message = RejectMessage.model_validate(
            {
                "reason": reason, "leader": leader, "round": position.round, "lineage_id": position.lineage_id,
                "weight": position.weight,
            }
        )  # fmt: skip
        if stream.sending:  # it does not read its stream
            stream.close()
            return
        try:
            await stream.send_message(Kind.REJECT, message, self._node.timing.probe_timeout_s)
        except StreamClosedError:
            log.debug("could not tell %s: %s", stream.remote, reason)
