"""Groups of peers at one lineage id: a signed rendezvous over the DHT directory.

The live peer with the lowest hash leads. Members open a stream to it, hand in a signed join and hold the stream until
the roster comes; the leader invites everybody that the directory shows at its lineage id and waits for those who are
on their way. A member that dies is seen by the end of its stream, a leader that sleeps by its silence.

hivemind's own `Matchmaking` was weighed and left: its DHT records are unsigned, one record with a far expiry stops it,
its roster is the leader's word alone, and with an unknown group size it always waits out its whole window.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peer.outer.round import Due, Group, RoundAborted
from peer.protocol.lineage import Position
from peer.swarm.group import leader as leader_module
from peer.swarm.group.follower import Follower
from peer.swarm.group.invites import Invites
from peer.swarm.group.lobby import Lobby, join_name
from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.group.membership import Membership
from peer.swarm.group.regrouping import LONGEST_WAIT_S, RegroupPolicy
from peer.swarm.group.return_notice import ReturnNotice
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node


class Matchmaker:
    """Finds the group of each round.

    Args:
        node, directory: the network and who is on it.
        rosters: makes and checks joins and rosters, within the run's group limits and waiting times.
        me: this peer, as seen by itself.
        clock: monotonic seconds.

    Attributes:
        membership: who is there, and leads.
    """

    def __init__(
        self, node: Node, directory: Directory, rosters: RosterAuthority, me: LocalPeer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._rosters = node, directory, rosters
        self._me, self._clock = me, clock
        self.membership = Membership(node.peer_id, rosters.run_id, directory, me, clock)
        self._regrouping = RegroupPolicy(clock)
        self._formed = clock()
        self._sat = asyncio.Event()
        self._lobby = Lobby(node.peer_id, rosters, self.membership, me, self, clock)
        self._invites = Invites(node, rosters, self.membership, me, self, clock)
        self._returning = ReturnNotice(node, self._invites, clock)
        self._leader = leader_module.Leader(node, rosters, me, self.membership, self._lobby, self._invites, clock)
        self._follower = Follower(node, directory, rosters, me, self.membership, self._invites, clock)

    async def start(self) -> None:
        await self._node.serve(join_name(self._rosters.run_id), "round", self._lobby.on_join)
        await self._invites.start()

    @property
    def anybody_waiting(self) -> bool:
        return len(self._lobby) > 0

    # -- standing groups ----------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long a standing group waits for its members: the straggler's window, and time to answer it."""
        return self._rosters.rounds.straggler_wait_s + leader_module.SOLO_PATIENCE_S

    def newcomers(self, members: frozenset[str]) -> list[str]:
        """For whose sake a standing group forms anew; for whom it has no place, only now and then: all have turns."""
        wanted = (peer_id for peer_id in self._wanted() - members if self._has_place(members, peer_id))
        return self._regrouping.among(wanted)

    def _has_place(self, members: frozenset[str], newcomer: str) -> bool:
        if self._clock() >= self._formed + LONGEST_WAIT_S:
            return True
        if len(members) >= self._rosters.rounds.max_group:
            return False
        return not (self.membership.solitary(newcomer) and any(map(self.membership.solitary, members)))

    def opens(self) -> bool:
        """See `LobbyHost.opens`."""
        members = self._me.persistent_members()
        return not members or bool(self.newcomers(members))

    def heeds(self, leader: str) -> bool:
        """Whether this peer's standing group, if it is in one, forms anew at its next round because `leader` invites:
        `newcomers` will say the same.
        """
        members = self._me.persistent_members()
        if not members or leader in members:
            return True
        return self._has_place(members, leader) and self._regrouping.invited(leader)

    def included(self, group: Group) -> None:
        """A group has formed: whoever was expected and is not in it is not waited for again so soon."""
        self._formed, self.membership.company = self._clock(), group.others
        self._returning.stop()
        left_out = (self._wanted() | self.membership.avoided()).difference(group.others)
        self._regrouping.came(group.others)
        self._regrouping.missed(left_out)

    def knock(self, peer_id: str) -> None:
        """This peer has come from behind, and will have caught up in a moment: a standing group forms anew for it."""
        self.membership.knock(peer_id)
        self._regrouping.knocked(peer_id)

    def caught_up(self) -> None:
        """This peer has come from behind: its last group hears of it at once, the DHT takes seconds. Who of them sleeps
        is found out meanwhile, and who commits a round without this peer says so. Nobody is hurried by it.
        """
        self.moved()
        if not self._me.slot.called:  # to invite is to call there
            self._returning.say(self.membership.company)

    def awaited(self) -> None:
        """See `LobbyHost.awaited`."""
        self._leader.awaited()

    def seated(self, peer_id: str) -> None:
        """See `LobbyHost.seated`."""
        if self._regrouping.sits(peer_id):
            self._sat.set()

    def left(self, peer_id: str) -> None:
        """See `LobbyHost.left`."""
        self._regrouping.left(peer_id)

    async def newcomer(self, members: frozenset[str]) -> None:
        """Return when somebody sits here for whose sake the standing group of these members forms anew.

        Whoever is ready before its group waits for it: who came meanwhile would be passed over, round after round.
        """
        while not any(self._regrouping.interrupts(peer) for peer in self.newcomers(members) if peer in self._lobby):
            self._sat.clear()
            await self._sat.wait()

    def _wanted(self) -> set[str]:
        """Whoever could be in the next group: live, or waiting at this peer already."""
        return {*self.membership.expected(), *self._lobby}

    def gathering(self) -> None:
        """Another member of the standing group is ready: contribute within the straggler's window, as a leader asks."""
        position, window_s = self._me.position(), self._rosters.rounds.straggler_wait_s
        self._lobby.hurry_if_halfway()
        # and again: the trainer's last report may be older than the round, and it may not have merged it yet
        asyncio.get_running_loop().call_later(window_s, self._hurry_at, position)

    def _hurry_at(self, position: Position) -> None:
        if self._me.position() == position:
            self._me.slot.request_now()

    def committed(self, group: Group) -> None:
        """The group stands: its members are where this peer is now, whatever the DHT has heard so far."""
        self.membership.learn(*group.others)
        self._invites.committed()
        self.moved()

    def moved(self) -> None:
        """This peer's position changed: whoever waits for it at a round that is over is told so."""
        self._invites.moved()
        self._lobby.moved()
        self._leader.awaited()

    async def match(self, due: Due) -> Group:
        """Find the group for this contribution; raises RoundAborted (nobody there, behind, or too few in time)."""
        position = self._me.position()
        self._invites.behind = None
        self._follower.begin()
        join, sealed = self._rosters.join(position, due.tokens)
        started = self._clock()
        if not self.membership.expected():
            await self._directory.refresh()
        while True:
            if self._me.position() != position:
                raise RoundAborted("match", "this peer moved on", behind=True)
            leader = self.membership.leader()
            if leader == self._node.peer_id:
                group = await self._leader.lead(sealed, join, started)
            else:
                await self._lobby.disband(leader)  # whoever sat here before this peer had heard of that one
                group = await self._follower.follow(leader, sealed, join)
            if group is not None:
                return group
