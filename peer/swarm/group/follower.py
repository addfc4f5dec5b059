"""The follower: hand a join to the leader, hold the stream until the roster arrives, else look for another leader.

A leader is not trusted: it may be suspended, dead, follow another leader, or never intend to form a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

from peer.errors import ProtocolError
from peer.outer.round import Group, RoundAborted
from peer.protocol.lineage import heavier
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, MAX_ROSTER_BYTES, JoinMessage, Kind, RejectMessage, StatusMessage
from peer.swarm.group.invites import LAST_CALL, Invites
from peer.swarm.group.leader import wait_for
from peer.swarm.group.lobby import join_name
from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.group.membership import Membership
from peer.swarm.group.pace import RoundPace
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError, StreamTimeoutError
from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.runtime.tasks import cancel_and_wait, unless
from peer.system.clock import Clock

log = logging.getLogger(__name__)
MAX_WASTEFUL = 256  # leaders that are remembered
_ANSWERS = dict.fromkeys((Kind.STATUS, Kind.REJECT), MAX_MESSAGE_BYTES) | {Kind.ROSTER: MAX_ROSTER_BYTES}


class Follower:
    """The follower's side of matchmaking.

    Args:
        rosters: checks rosters, within the run's group limits and waiting times.
        me, membership: this peer as seen by itself, and the peers that it believes to be live.
        pace: how long a round waits for its members.
    """

    def __init__(
        self, node: Node, directory: Directory, rosters: RosterAuthority, me: LocalPeer, membership: Membership,
        invites: Invites, pace: RoundPace,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._rosters, self._rounds = node, directory, rosters, rosters.rounds
        self._me, self._membership, self._invites, self._clock = me, membership, invites, node.clock
        self._pace = pace
        self._followed_unknown = False
        self._wasted: BoundedMap[str, tuple[float, int]] = BoundedMap(MAX_WASTEFUL)

    def begin(self) -> None:
        """Start looking for the group of another round: forgive the leaders that have been in one since."""
        self._followed_unknown = False
        for leader, (seconds, rounds) in list(self._wasted.items()):
            if rounds != self._rosters.rounds_of(leader):
                del self._wasted[leader]
                if seconds > self._node.timing.wasted_s:  # else it is disbelieved for something else
                    self._membership.believe(leader)

    async def follow(self, leader: str, sealed: bytes, join: JoinMessage) -> Group | None:
        """Wait at a leader; None means: look again (the leader is dead, follows another, or disbanded)."""
        stream: FrameStream | None = None
        began = self._clock()
        try:
            first = await unless(self._called_away(leader), self._hand_in(leader, sealed))
            if first is None:
                log.info("leader %s is silent, and another leader invites", leader)
                self._membership.avoid(leader)
                return None
            stream, kind, body = first
            if kind is Kind.STATUS:
                parse_json(StatusMessage, body)
                kind, body = await self._patiently(stream, began)
            reject = parse_json(RejectMessage, body) if kind is Kind.REJECT else None
        except StreamClosedError as error:
            self._leave(leader, error, began)
            return None
        except ProtocolError as error:
            raise self._nonsense(leader, str(error)) from None
        finally:
            if stream is not None:
                stream.close()
        if reject is None:
            group = self._accept(body, sealed, join, leader)
            if self._pace.hurries:
                self._charge(leader, self._clock() - began, self._longest_wait_s)
            return group
        await self._heed(reject, leader, began)
        return None

    def _waste(self, leader: str, began: float) -> None:
        """This peer has waited at a leader since `began`, and no group formed. If there are others, the leader is
        avoided for as long as it had wasted before, since it was last in a round of this lineage.

        An honest leader may die, be suspended, or continue with a group that has no place for this peer. A Byzantine
        one may report that it is awake, or redirect every follower, whenever it is asked: it is asked ever more rarely.
        """
        before, seconds = self._wasted_by(leader), self._clock() - began
        self._wasted[leader] = before + seconds, self._rosters.rounds_of(leader)
        self._charge(leader, seconds, self._window_s)
        if before > self._node.timing.wasted_s and self._membership.others_than(leader) + 1 >= self._rounds.min_group:
            log.info("leader %s has formed no group, and cost this peer %.0f s or more", leader, before)
            self._membership.disbelieve(leader, min(before, self._node.timing.longest_disbelief_s))

    def _charge(self, leader: str, seconds: float, limit_s: float) -> None:
        """A leader owes a wait that was longer than this, and than it had to be for peers that have just gone: where
        there were enough for a round.
        """
        there = self._there(leader, seconds)
        support_s = 0.0 if self._me.followed(there) else self._node.timing.support_s
        if len(there) >= self._rounds.min_group and seconds > limit_s + support_s:
            self._me.cost(leader, seconds)

    def _wasted_by(self, leader: str) -> float:
        return self._wasted.get(leader, (0.0, 0))[0]

    def _nonsense(self, leader: str, said: str) -> RoundAborted:
        """A leader sent an invalid message: it would do so again at once."""
        self._membership.disbelieve(leader, self._node.timing.nonsense_s)
        return RoundAborted("match", said, culprit=leader)

    async def _patiently(self, stream: FrameStream, began: float) -> tuple[Kind, bytes]:
        """A leader's answer, after the longest wait and time to answer; raises StreamClosedError.

        Args:
            began: when this peer came to it.
        """
        timing = self._node.timing
        patience_s = self._longest_wait_s + timing.solo_patience_s
        answer = asyncio.ensure_future(_answer(stream, patience_s + timing.support_s, self._node))
        try:
            await asyncio.wait({answer}, timeout=patience_s)
            if not answer.done() and not self._me.followed(self._there(stream.remote, self._clock() - began)):
                patience_s += timing.support_s
                await asyncio.wait({answer}, timeout=timing.support_s)
            if not answer.done():
                raise StreamTimeoutError(stream.remote, f"formed no group for {patience_s:g} s")
            return answer.result()
        finally:
            await cancel_and_wait([answer])

    @property
    def _longest_wait_s(self) -> float:
        """For the slowest group of an honest leader, which may be slow to contribute."""
        return self._window_s + self._node.timing.solo_patience_s

    @property
    def _window_s(self) -> float:
        """The longest of a leader that contributes at the end of the straggler window."""
        return (2.0 - LAST_CALL) * self._rounds.straggler_wait_s

    def _there(self, leader: str, waited_s: float) -> set[str]:
        """Who could make a round with this leader. The directory shows a peer for a while after its end: only those
        count that announced themselves during this wait, and lately.
        """
        recent = self._directory.made_within(min(waited_s, self._node.timing.invited_s))
        others = (peer_id for peer_id in self._membership.expected() if peer_id in recent)
        return {self._node.peer_id, leader, *(peer_id for peer_id in others if not self._me.newcomer(peer_id))}

    async def _hand_in(self, leader: str, sealed: bytes) -> tuple[FrameStream, Kind, bytes]:
        """Hand a join to a leader: -> the stream, and the first frame of its answer."""
        name = join_name(self._rosters.run_id)
        stream = await self._node.open(leader, name, "round", self._node.timing.probe_timeout_s)
        with contextlib.ExitStack() as closing:
            closing.callback(stream.close)
            await stream.send(Kind.JOIN, sealed)
            kind, body = await _frame(stream, _ANSWERS, self._node.timing.probe_timeout_s, self._clock)
            closing.pop_all()
        return stream, kind, body

    async def _called_away(self, leader: str) -> None:
        """Return when this leader has been silent for a while and another one invites, which has waited for it as well
        or has just caught up.
        """
        await asyncio.sleep(self._node.timing.leader_silent_s)
        await self._invites.elsewhere(leader)

    def _leave(self, leader: str, why: StreamClosedError, began: float) -> None:
        """Avoid a leader that is dead or silent. Raises RoundAborted after a suspend of this machine: the others have
        continued meanwhile, and a peer that looks for them first does not lead other suspended ones.
        """
        log.info("leader %s is gone: %s", leader, why)
        self._membership.avoid(leader)
        if not self._directory.fresh:
            raise RoundAborted("match", f"{leader} is gone, and this machine was suspended, or lost the others")
        self._waste(leader, began)

    def _accept(self, body: bytes, sealed: bytes, join: JoinMessage, leader: str) -> Group:
        try:
            group = replace(self._rosters.read(body, sealed, join, leader), leader=leader)
        except ProtocolError as error:
            raise self._nonsense(leader, f"bad roster: {error}") from None
        self._me.expects(group)
        return group

    async def _heed(self, reject: RejectMessage, leader: str, began: float) -> None:
        position = self._me.position()
        there = reject.lineage_id or ""
        if reject.reason == "behind" and heavier(reject.weight, there, position.weight, position.lineage_id):
            self._me.nudge(leader, there)
            self._waste(leader, began)  # unless its round is found
            raise RoundAborted("match", f"{leader} is at round {reject.round}", culprit=leader, behind=True)
        elsewhere = reject.leader if reject.reason == "follow" else None
        if elsewhere is None or not self._membership.outranks(elsewhere, leader):
            named = f", and names {elsewhere}, which cannot lead there" if elsewhere else ""
            log.info("leader %s makes no rounds now: it answers %s%s", leader, reject.reason, named)
            self._membership.avoid(leader, silent=False)
            if reject.reason == "excluded":
                self._membership.excluded_by(leader)
        elif not self._membership.hears_of(elsewhere, reject.lineage_id):
            await self._look_for(elsewhere, reject.lineage_id)
        if self._membership.leader() == leader:
            await self._ask_again(leader)
        self._waste(leader, began)

    async def _ask_again(self, leader: str) -> None:
        """Wait before asking again, if not for too long: it will learn that the leader it named cannot be followed."""
        if self._wasted_by(leader) > self._node.timing.sent_away_s:
            log.info("leader %s has redirected this peer for %.0f s", leader, self._wasted_by(leader))
            self._membership.avoid(leader, silent=False)
            return
        self._membership.changed.clear()
        await wait_for(self._membership.changed, self._node.timing.leader_recheck_s)

    async def _look_for(self, leader: str, lineage_id: str | None) -> None:
        """Follow an unknown leader: the first that is named in this round at once; others are looked up, which takes
        seconds if one of the DHT's nodes is suspended.
        """
        if self._followed_unknown:
            await self._directory.refresh()
            return
        self._followed_unknown = True
        self._node.spawn(self._directory.refresh())
        self._membership.hears_of(leader, lineage_id, known=True)


async def _answer(stream: FrameStream, patience_s: float, node: Node) -> tuple[Kind, bytes]:
    """What a leader has to say in the end; raises StreamTimeoutError as soon as it does not say that it is awake."""
    statuses = 10 + int(2 * patience_s / node.timing.awake_period_s)
    for _ in range(statuses):
        kind, body = await _frame(stream, _ANSWERS, node.timing.probe_timeout_s, node.clock)
        if kind is not Kind.STATUS:
            return kind, body
        parse_json(StatusMessage, body)
    raise ProtocolError(f"{stream.remote} reported {statuses} times that it is awake, and nothing else")


async def _frame(
    stream: FrameStream, limits: Mapping[Kind, int], timeout_s: float, clock: Clock
) -> tuple[Kind, bytes]:
    """The next one; raises StreamTimeoutError when it does not come, unless it was this machine that slept."""
    receiving = asyncio.ensure_future(stream.receive(limits))
    try:
        while True:
            began = clock()
            await asyncio.wait({receiving}, timeout=timeout_s)
            if receiving.done():
                return receiving.result()
            if clock() < began + 2 * timeout_s:
                raise StreamTimeoutError(stream.remote, f"sent nothing for {timeout_s:g} s")
    finally:
        await cancel_and_wait([receiving])
