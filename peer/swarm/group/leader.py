"""The leader: invite the expected peers, wait at most the straggler window, fix the roster, send it to the members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from peer.outer.policy.straggler import Rosters, close
from peer.outer.round import Group, RoundAborted
from peer.protocol.wire import JoinMessage, Kind
from peer.swarm.group.invites import LAST_CALL, Invites
from peer.swarm.group.lobby import Lobby, WaitingMember
from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.group.membership import Membership
from peer.swarm.group.pace import RoundPace
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait

NO_SEAT = "they are paused, or this peer, or another newcomer, has held up a round; tries again by itself"
UNHURRIED = 1e9  # seconds: as long as a leader waits that asks no peer to contribute before it is due


class Leader:
    """The leader's side of matchmaking.

    Args:
        rosters: makes rosters, within the run's group limits and waiting times.
        me, membership: this peer as seen by itself, and the peers that it believes to be live.
        lobby, invites: the followers that wait here, and the peers that are invited.
        pace: how long a round waits for its members.
    """

    def __init__(
        self, node: Node, rosters: RosterAuthority, me: LocalPeer, membership: Membership, lobby: Lobby,
        invites: Invites, pace: RoundPace,
    ) -> None:  # fmt: skip
        self._pace = pace
        self._node, self._rounds, self._rosters, self._me = node, rosters.rounds, rosters, me
        self._membership, self._lobby, self._invites, self._clock = membership, lobby, invites, node.clock
        self._leader = False
        self._invited: dict[str, asyncio.Task[None]] = {}
        self._invited_for = me.position()
        self._inviting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inviting.set_result(None)

    def awaited(self) -> None:
        """A follower may wait although this leader's own contribution is not due yet: invite the others meanwhile."""
        if not self._leader and self._inviting.done():
            self._inviting = self._node.spawn(self._invite_meanwhile())

    def quorum_in_s(self) -> float | None:
        """Seconds until the followers that wait here would be enough for a round: none waits for its leader, which
        contributes what it has. None where a leader may wait for its own contribution.
        """
        seats = self._lobby.present(self._me.position().lineage_id)
        if self._pace.hurries or self._leader or len(seats) + 1 < self._rounds.min_group:
            return None
        arrived = {index: seat.since for index, seat in enumerate(seats.values(), start=1)}
        order = [self._node.peer_id, *dict.fromkeys([*seats, *self._membership.expected()])]
        policy = self._pace.of(map(self._membership.rate, seats))
        decision = policy.next_decision(range(len(order)), arrived, self._closed(order))
        return None if decision is None else max(0.0, decision.start_s - self._clock())

    async def _invite_meanwhile(self) -> None:
        """Invite the others for as long as a follower waits for the window to end.

        Otherwise this leader would form a group alone with that follower, and the peers left out would be the first to
        wait in the next round: this repeated itself, and no round had all peers in it any more.
        """
        try:
            while self._waited_for():
                # where it is in no round, and not about to lead
                if self._me.slot.due_in_s() > 0.0 and self._lobby.host.opens():
                    self._pending(self._clock())
                await asyncio.sleep(self._node.timing.leader_recheck_s)
        finally:
            if not self._leader:
                await self._uninvite()

    def _waited_for(self) -> bool:
        waiting = bool(self._lobby.present(self._me.position().lineage_id))
        return waiting and self._me.taking_part() and self._membership.leader() == self._node.peer_id

    async def _uninvite(self) -> None:
        invited, self._invited = self._invited, {}
        await cancel_and_wait(invited.values())

    async def lead(self, sealed: bytes, join: JoinMessage, started: float) -> Group | None:
        """Gather a group and fix its roster; None when another peer leads.

        Args:
            started: when it became ready.

        Raises:
            RoundAborted: no peer found, behind, too few in time, or one of them has left.
        """
        self._leader, began = True, self._clock()
        self._inviting.cancel()
        # continue with the peers that are on their way, and ask the others again
        self._invited = {peer_id: task for peer_id, task in self._invited.items() if not task.done()}
        try:
            while True:
                self._membership.changed.clear()
                if (ahead := self._me.ahead()) is not None:
                    raise RoundAborted("match", f"{ahead} is on a heavier lineage", culprit=ahead, behind=True)
                if self._membership.leader() != self._node.peer_id:
                    await self._lobby.disband(self._membership.leader())
                    return None
                pending, chosen = self._pending(started), self._chosen(join.parent)
                members, least, opened = len(chosen) + 1, self._rounds.min_group, self._opened(started, began)
                arrived = dict(enumerate([opened, *(max(opened, seat.since) for _, seat in chosen)]))
                order = [self._node.peer_id, *(one for one, _ in chosen), *pending]
                policy = self._pace.of(map(self._membership.rate, [self._node.peer_id, *(one for one, _ in chosen)]))
                closed = close(policy, range(len(order)), arrived, self._clock(), self._closed(order))
                waited = policy.deadline_s is not None and self._clock() >= opened + policy.deadline_s
                gathered = members >= least and closed is not None
                if members >= self._rounds.max_group or (
                    gathered and (self._followed(chosen) or self._waits_no_longer(opened, not pending or waited))
                ):
                    return await self._form(sealed, join)
                if not gathered:
                    patience_s, now = self._node.timing.solo_patience_s, self._clock()
                    if not pending and now - began >= patience_s:
                        raise self._alone(f"{members} of at least {least} peers")
                    if now >= opened + self._rounds.straggler_wait_s + patience_s:
                        raise self._alone(f"only {members} peers joined within {now - started:.0f} s")
                await wait_for(self._membership.changed, self._node.timing.leader_recheck_s)
        finally:
            self._leader = False
            await self._uninvite()

    def _alone(self, reason: str) -> RoundAborted:
        if excluding := self._membership.excluding:
            reason += f"; {excluding} gave this one no seat: {NO_SEAT}"
        return RoundAborted("match", reason, alone=True)

    def _waits_no_longer(self, opened: float, closed: bool) -> bool:
        """Whether a round begins that others will not follow: no peer is on its way, and those that were there last
        have had the time to come back.
        """
        patient = self._pace.hurries  # else a few make each round, and the others the next one
        return closed and not (patient and self._clock() < opened + self._node.timing.support_s)

    def _followed(self, chosen: Sequence[tuple[str, WaitingMember]]) -> bool:
        """Whether those that are left out of this round will follow it. A round of too few of those that were there
        last, be they the fastest, would leave the others where they are for minutes.
        """
        return self._me.followed({self._node.peer_id, *(peer_id for peer_id, _ in chosen)})

    def _closed(self, order: Sequence[str]) -> Rosters:
        """The members of the rounds that the straggler policy reads, as places in this order or after it."""
        places = {peer_id: place for place, peer_id in enumerate(order)}
        rosters = self._me.last_rosters(self._me.position().round % self._pace.period)
        return [tuple(places.setdefault(peer_id, len(places)) for peer_id in roster) for roster in rosters]

    def _opened(self, started: float, began: float) -> float:
        """When the straggler window opened. If the leader contributed early, or first waited for a silent leader, it
        counts as later, so that the window stays open a little longer for members in the same situation.
        """
        return max(self._lobby.window_start(started), began - LAST_CALL * self._rounds.straggler_wait_s)

    def _chosen(self, parent: str) -> list[tuple[str, WaitingMember]]:
        """The members to admit, earliest first: up to the group limit, with at most one client that no relay serves,
        and few that were in no round yet.
        """
        chosen: list[tuple[str, WaitingMember]] = []
        solitary = self._me.client
        for peer_id, seat in sorted(self._lobby.present(parent).items(), key=lambda item: item[1].since):
            if not (self._me.refuses(peer_id) or (solitary and self._membership.solitary(peer_id))):
                chosen.append((peer_id, seat))
                solitary = solitary or self._membership.solitary(peer_id)
        surplus = self._rosters.surplus([peer_id for peer_id, _ in chosen], parent)
        return [(peer_id, seat) for peer_id, seat in chosen if peer_id not in surplus][: self._rounds.max_group - 1]

    def _pending(self, started: float) -> list[str]:
        """Invite the expected peers that have not joined; -> those still on their way."""
        if self._invited_for != (position := self._me.position()):
            self._node.spawn(cancel_and_wait(self._invited.values()))  # they were invited to another round
            self._invited, self._invited_for = {}, position
        expected = [peer_id for peer_id in self._membership.expected() if peer_id not in self._lobby]
        left = self._rounds.straggler_wait_s - (self._clock() - self._lobby.window_start(started))
        left = left if self._pace.hurries else UNHURRIED
        for peer_id in expected:
            if peer_id not in self._invited:
                self._invited[peer_id] = asyncio.ensure_future(self._invites.send(peer_id, max(0.0, left)))
        return [peer_id for peer_id in expected if not self._invited[peer_id].done()]

    async def _form(self, sealed: bytes, join: JoinMessage) -> Group:
        """Fix the roster and send it to the members. Raises RoundAborted if one of them has left already."""
        chosen = self._chosen(join.parent)
        joins = {peer_id: (seat.sealed, seat.join) for peer_id, seat in chosen}
        joins[self._node.peer_id] = (sealed, join)
        message, group = self._rosters.write(joins)
        group = replace(group, leader=self._node.peer_id)
        self._me.expects(group)
        left: list[str] = []
        for peer_id in joins:
            self._lobby.leave(peer_id)
        for peer_id, seat in chosen:
            if seat.stream.sending:  # it does not read its stream
                seat.stream.close()
                left.append(peer_id)
                continue
            try:
                await seat.stream.send_message(Kind.ROSTER, message, self._node.timing.probe_timeout_s)
            except StreamClosedError:
                left.append(peer_id)
            seat.told = True
            seat.taken.set()
        if left:  # its shard would not be reduced: the members must not wait for the exchange to learn that
            abort = RoundAborted("match", f"{', '.join(left)} left while the roster was sent", left[0])
            self._me.decline(group, abort)
            raise abort
        return group


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set, at the latest after the timeout."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
