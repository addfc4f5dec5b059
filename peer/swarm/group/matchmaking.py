"""Groups of peers at one lineage id: a signed rendezvous over the DHT directory.

The live peer with the lowest hash leads. Members open a stream to it, hand in a signed join and hold the stream until
the roster arrives; the leader invites all peers that the directory shows at its lineage id and waits for those that are
on their way. The death of a member ends its stream; a suspended leader is detected by its silence.

We considered hivemind's `Matchmaking` and rejected it: its DHT records are unsigned, one record with a far expiry stops
it, its roster is the leader's word alone, and with an unknown group size it always waits out its whole window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from peer.outer.policy.straggler import StragglerPolicy, WaitAll
from peer.outer.round import Due, Group, RoundAborted
from peer.protocol.lineage import Position
from peer.swarm.group.follower import Follower
from peer.swarm.group.invites import LAST_CALL, Invites
from peer.swarm.group.leader import Leader
from peer.swarm.group.lobby import Lobby, join_name
from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.group.membership import Membership
from peer.swarm.group.pace import RoundPace
from peer.swarm.group.regrouping import RegroupPolicy
from peer.swarm.group.return_notice import ReturnNotice
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node


class Matchmaker:
    """Finds the group of each round.

    Args:
        rosters: makes and checks joins and rosters, within the run's group limits and waiting times.
        tokens_between: that a peer trains from one round to the next.
    """

    def __init__(
        self, node: Node, directory: Directory, rosters: RosterAuthority, me: LocalPeer,
        straggler: StragglerPolicy = WaitAll(), tokens_between: int = 0,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._rosters = node, directory, rosters
        self._me = me
        self.membership = Membership(node, rosters.run_id, directory, me)
        self._regrouping = RegroupPolicy(node.timing, node.clock, rosters.rounds.straggler_wait_s)
        self._sat = asyncio.Event()
        self._lobby = Lobby(node, rosters, self.membership, me, self)
        self._invites = Invites(node, rosters, self.membership, me, self)
        self._returning = ReturnNotice(node, self._invites)
        self._pace = RoundPace(straggler, tokens_between, rosters.rounds.straggler_wait_s, node.clock)
        self._leader = Leader(node, rosters, me, self.membership, self._lobby, self._invites, self._pace)
        self._follower = Follower(node, directory, rosters, me, self.membership, self._invites, self._pace)

    async def start(self) -> None:
        await self._node.serve(join_name(self._rosters.run_id), "round", self._lobby.on_join)
        await self._invites.start()

    @property
    def anybody_waiting(self) -> bool:
        return len(self._lobby) > 0

    # -- persistent groups --------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long a persistent group waits for its members: the straggler window, and time to answer it."""
        return self._rosters.rounds.straggler_wait_s + self._node.timing.solo_patience_s

    def newcomers(self, members: frozenset[str]) -> list[str]:
        """The peers for which a persistent group re-forms; if they do not fit, once in a while: they alternate."""
        return self._newcomers_of(members, self._wanted())

    def _newcomers_of(self, members: frozenset[str], peer_ids: Iterable[str]) -> list[str]:
        wanted = self._regrouping.among(set(peer_ids) - members)
        return [peer_id for peer_id in wanted if self._has_place(members, peer_id)]

    def _has_place(self, members: frozenset[str], newcomer: str) -> bool:
        if self._regrouping.overdue():
            return True
        if len(members) >= self._rosters.rounds.max_group:
            return False
        return not (self.membership.solitary(newcomer) and any(map(self.membership.solitary, members)))

    def opens(self) -> bool:
        members = self._me.persistent_members()
        return not members or bool(self.newcomers(members))

    def regroups_for(self, leader: str) -> bool:
        """Whether this peer's persistent group, if any, re-forms at its next round because `leader` invites;
        `newcomers` will agree.
        """
        members = self._me.persistent_members()
        if not members or leader in members:
            return True
        return self._has_place(members, leader) and self._regrouping.invited(leader)

    def included(self, group: Group) -> None:
        """A group has formed: expected peers that are not in it are not waited for again soon."""
        self.membership.company = group.others
        self._returning.stop()
        self._pace.formed()
        left_out = (self._wanted() | self.membership.avoided()).difference(group.others)
        self._regrouping.came(group.others)
        self._regrouping.missed(left_out)

    def announced(self, peer_id: str) -> None:
        """This peer announced that it is catching up, and will soon be done: a persistent group re-forms for it."""
        self.membership.announced(peer_id)
        self._regrouping.announced(peer_id)

    def caught_up(self) -> None:
        """This peer has caught up: tell its last group at once, as the DHT takes seconds. Meanwhile this reveals which
        members are suspended, and those that committed a round without this peer say so. It hurries no member.
        """
        self.moved()
        if not self._me.slot.called:  # an invitation would be a call for a round
            self._returning.say(self.membership.company)

    def awaited(self) -> None:
        self._leader.awaited()

    def arrived(self) -> None:
        if (wait_s := self._leader.quorum_in_s()) is not None and self.opens():
            asyncio.get_running_loop().call_later(wait_s, self._hurry_at, self._me.position())

    def seated(self, peer_id: str) -> None:
        if self._regrouping.sits(peer_id):
            self._sat.set()

    def left(self, peer_id: str) -> None:
        self._regrouping.left(peer_id)

    async def newcomer(self, members: frozenset[str]) -> None:
        """Return when a peer waits in the lobby for which the persistent group of these members re-forms.

        A member that is ready before its group waits for it: otherwise a peer that joins the lobby meanwhile would be
        ignored, round after round.
        """
        while not any(map(self._regrouping.interrupts, self._newcomers_of(members, self._lobby))):
            self._sat.clear()
            await self._sat.wait()

    def _wanted(self) -> set[str]:
        """The candidates for the next group: live peers, and those that wait at this peer already."""
        return {*self.membership.expected(), *self._lobby}

    def gathering(self) -> None:
        """Another member of the persistent group is ready: contribute within the straggler window, as a leader asks."""
        position, last_call_s = self._me.position(), LAST_CALL * self._rosters.rounds.straggler_wait_s
        self._lobby.hurry_if_halfway()
        # and again: the trainer's last report may be older than the round, and it may not have merged it yet
        asyncio.get_running_loop().call_later(last_call_s, self._hurry_at, position)

    def _hurry_at(self, position: Position) -> None:
        if self._me.position() == position:
            self._me.slot.request_now()

    def committed(self, group: Group) -> None:
        """The group committed: its members are at this peer's position now, whatever the DHT shows."""
        self.membership.learn(*group.others)
        self._invites.committed()
        self._pace.committed()
        self.moved()

    def moved(self) -> None:
        """This peer's position changed: reject the followers that wait for a round that is over."""
        self._invites.moved()
        self._lobby.moved()
        self._leader.awaited()

    async def match(self, due: Due) -> Group:
        """Find the group for this contribution; raises RoundAborted (no peer found, behind, or too few in time)."""
        position = self._me.position()
        self._follower.begin()
        join, sealed = self._rosters.join(position, due.tokens, ranges=due.ranges)
        started = self._node.clock()
        if not self.membership.expected():
            await self._directory.refresh()
        while True:
            if self._me.position() != position:
                raise RoundAborted("match", "this peer made another round", behind=True)
            leader = self.membership.leader()
            if leader == self._node.peer_id:
                group = await self._leader.lead(sealed, join, started)
            else:
                await self._lobby.disband(leader)  # followers that arrived before this peer had heard of that leader
                group = await self._follower.follow(leader, sealed, join)
            if group is not None:
                return group
