"""Groups of peers at one lineage id: a signed rendezvous over the DHT directory.

The live peer with the lowest hash leads. Members open a stream to it, hand in a signed join and hold the stream until
the roster comes; the leader invites everybody that the directory shows at its lineage id and waits for those who are
on their way. A member that dies is seen by the end of its stream, a leader that sleeps by its silence.

hivemind's own `Matchmaking` was weighed and left: its DHT records are unsigned, one record with a far expiry stops it,
its roster is the leader's word alone, and with an unknown group size it always waits out its whole window.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from peer.errors import ProtocolError, in_words
from peer.outer.round import Due, Group, RoundAborted
from peer.protocol.lineage import heavier
from peer.protocol.manifest import RoundSpec
from peer.protocol.records import parse_json
from peer.protocol.wire import (
    MAX_MESSAGE_BYTES,
    JoinMessage,
    Kind,
    RejectMessage,
    StatusMessage,
)
from peer.swarm import invitations, leading, seats
from peer.swarm.directory import Directory
from peer.swarm.invitations import Invitations, Self
from peer.swarm.keeper import Position
from peer.swarm.newcomers import LONGEST_WAIT_S, Newcomers
from peer.swarm.node import Node
from peer.swarm.roster import Rosters
from peer.swarm.seats import Seats
from peer.swarm.streams import Stream, StreamClosedError
from peer.swarm.tasks import cancel_and_wait, unless
from peer.swarm.view import View

log = logging.getLogger(__name__)
SILENT_S = 1.5  # of a leader, where others do not wait for it any more
RETURN_EVERY_S = 2.0  # is said: whoever runs after quick rounds would say nothing else
LATEST_S = 600.0  # of what is asked of somebody who is invited
SENT_AWAY = 20  # times, by one leader that nobody was found through: about 5 s, and by then it knows who leads
MAX_SENT_AWAY = 256  # leaders that are remembered
NONSENSE_S = 60.0  # without a leader that says what no peer of this program says
_ANSWERS = dict.fromkeys((Kind.STATUS, Kind.ROSTER, Kind.REJECT), MAX_MESSAGE_BYTES)


class Matchmaker:
    """Finds the group of each round.

    Args:
        node, directory: the network and who is on it.
        run_id, rounds: the run, and its group limits and waiting times.
        rosters: makes and checks joins and rosters.
        me: this peer, as seen by itself.
        clock: monotonic seconds.
        refuses: whom this peer gives no seat.
        decline: tells the members of a group that has formed that its round does not begin, and why.

    Attributes:
        view: who is there, and leads.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        run_id: str,
        rounds: RoundSpec,
        rosters: Rosters,
        me: Self,
        clock: Callable[[], float] = time.monotonic,
        refuses: Callable[[str], bool] = lambda _: False,
        decline: Callable[[Group, RoundAborted], None] = lambda *_: None,
    ) -> None:
        self._node, self._directory, self._run_id, self._rounds = node, directory, run_id, rounds
        self._me, self._clock = me, clock
        self.view = View(node.peer_id, run_id, directory, me.position, clock, refuses, me.client)
        self._rosters = rosters
        self._newcomers = Newcomers(clock)
        self._formed = clock()
        self._followed_unknown, self._sent_away = False, Counter[str]()
        self._said_at, self._saying = float("-inf"), tuple[asyncio.Task[None], ...]()
        self._changed, self._sat = asyncio.Event(), asyncio.Event()
        window_s = rounds.straggler_wait_s
        self._seats = Seats(
            node.peer_id, rosters, self.view, me, self._changed, window_s, refuses, clock,
            self._opens, on_seat=lambda: self._leading.awaited(), knocked=self.knock,
            seated=self._seat, left=self._newcomers.left,
        )  # fmt: skip
        self._invitations = Invitations(node, run_id, self.view, me, self._changed, window_s, clock, self._heeds)
        self._leading = leading.Leading(
            node, rounds, rosters, me, self.view, self._seats, self._invitations, self._changed, clock, decline,
            self._opens,
        )  # fmt: skip
        self._join_name = f"atoll/{run_id[:16]}/join"

    async def start(self) -> None:
        await self._node.serve(self._join_name, "round", self._seats.on_join)
        await self._invitations.start()

    @property
    def anybody_waiting(self) -> bool:
        return len(self._seats) > 0

    # -- standing groups ----------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long a standing group waits for its members: the straggler's window, and time to answer it."""
        return self._rounds.straggler_wait_s + leading.SOLO_PATIENCE_S

    def newcomers(self, members: frozenset[str]) -> list[str]:
        """For whose sake a standing group forms anew; for whom it has no place, only now and then: all have turns."""
        wanted = (peer_id for peer_id in self._wanted() - members if self._has_place(members, peer_id))
        return self._newcomers.among(wanted)

    def _has_place(self, members: frozenset[str], newcomer: str) -> bool:
        if self._clock() >= self._formed + LONGEST_WAIT_S:
            return True
        if len(members) >= self._rounds.max_group:
            return False
        return not (self.view.solitary(newcomer) and any(map(self.view.solitary, members)))

    def _opens(self) -> bool:
        """Whether a group forms here for those who wait at this peer, instead of a standing one that goes on."""
        members = self._me.standing()
        return not members or bool(self.newcomers(members))

    def _heeds(self, leader: str) -> bool:
        """Whether this peer's standing group, if it is in one, forms anew at its next round because `leader` invites:
        `newcomers` will say the same.
        """
        members = self._me.standing()
        if not members or leader in members:
            return True
        return self._has_place(members, leader) and self._newcomers.invited(leader)

    def included(self, group: Group) -> None:
        """A group has formed: whoever was expected and is not in it is not waited for again so soon."""
        self._formed, self.view.company = self._clock(), group.others
        self._say_no_more()
        left_out = (self._wanted() | self.view.avoided()).difference(group.others)
        self._newcomers.came(group.others)
        self._newcomers.missed(left_out)

    def knock(self, peer_id: str) -> None:
        """This peer has come from behind, and will have caught up in a moment: a standing group forms anew for it."""
        self.view.knock(peer_id)
        self._newcomers.knocked(peer_id)

    def caught_up(self) -> None:
        """This peer has come from behind: its last group hears of it at once, the DHT takes seconds. Who of them sleeps
        is found out meanwhile, and who commits a round without this peer says so.
        """
        self.moved()
        now = self._clock()
        if self._me.called or now < self._said_at + RETURN_EVERY_S:  # to invite is to call there
            return
        self._say_no_more()
        self._said_at, wait_s = now, min(self._me.due_in_s(), LATEST_S)
        self._saying = tuple(self._node.spawn(self._invitations.send(peer, wait_s)) for peer in self.view.company)

    def _say_no_more(self) -> None:
        for task in self._saying:
            task.cancel()
        self._saying = ()

    def _seat(self, member: str) -> None:
        if self._newcomers.sits(member):
            self._sat.set()

    async def newcomer(self, members: frozenset[str]) -> None:
        """Return when somebody sits here for whose sake the standing group of these members forms anew.

        Whoever is ready before its group waits for it: who came meanwhile would be passed over, round after round.
        """
        while not any(self._newcomers.interrupts(peer) for peer in self.newcomers(members) if peer in self._seats):
            self._sat.clear()
            await self._sat.wait()

    def _wanted(self) -> set[str]:
        """Whoever could be in the next group: live, or waiting at this peer already."""
        return {*self.view.expected(), *self._seats}

    def gathering(self) -> None:
        """Another member of the standing group is ready: contribute within the straggler's window, as a leader asks."""
        position, window_s = self._me.position(), self._rounds.straggler_wait_s
        self._seats.hurry_if_halfway()
        # and again: the trainer's last report may be older than the round, and it may not have merged it yet
        asyncio.get_running_loop().call_later(window_s, self._hurry_at, position)

    def _hurry_at(self, position: Position) -> None:
        if self._me.position() == position:
            self._me.hurry()

    def committed(self, group: Group) -> None:
        """The group stands: its members are where this peer is now, whatever the DHT has heard so far."""
        self.view.learn(*group.others)
        self._invitations.committed()
        self.moved()

    def moved(self) -> None:
        """This peer's position changed: whoever waits for it at a round that is over is told so."""
        self._invitations.moved()
        self._seats.moved()
        self._leading.awaited()

    async def match(self, due: Due) -> Group:
        """Find the group for this contribution; raises RoundAborted (nobody there, behind, or too few in time)."""
        position = self._me.position()
        self._invitations.behind, self._followed_unknown = None, False
        join, sealed = self._rosters.join(position, due.tokens)
        started = self._clock()
        if not self.view.expected():
            await self._directory.refresh()
        while True:
            if self._me.position() != position:
                raise RoundAborted("match", "this peer moved on", behind=True)
            leader = self.view.leader()
            if leader == self._node.peer_id:
                group = await self._leading.lead(sealed, join, started)
            else:
                await self._seats.disband(leader)  # whoever sat here before this peer had heard of that one
                group = await self._follow(leader, sealed, join)
            if group is not None:
                return group

    # -- following ----------------------------------------------------------------------------------------------

    async def _follow(self, leader: str, sealed: bytes, join: JoinMessage) -> Group | None:
        """Wait at a leader; None means: look again (the leader is gone, follows another, or disbanded)."""
        stream: Stream | None = None
        try:
            first = await unless(self._called_away(leader), self._hand_in(leader, sealed))
            if first is None:
                log.info("leader %s is silent, and another one invites", leader)
                self.view.avoid(leader)
                return None
            stream, kind, body = first
            if kind is Kind.STATUS:
                parse_json(StatusMessage, body)
                kind, body = await self._last_word(stream)
            reject = parse_json(RejectMessage, body) if kind is Kind.REJECT else None
        except (StreamClosedError, asyncio.TimeoutError) as error:
            self._leave(leader, error)
            return None
        except ProtocolError as error:
            raise self._nonsense(leader, str(error)) from None
        finally:
            if stream is not None:
                stream.close()
        if reject is None:
            return self._accept(body, sealed, join, leader)
        await self._heed(reject, leader)
        return None

    async def _last_word(self, stream: Stream) -> tuple[Kind, bytes]:
        """The roster or reject of a leader that is awake. One that forms no group within the longest time that this can
        take, though there is somebody to form it without, is left to whoever likes to wait.
        """
        began, patience_s = self._clock(), self._longest_wait_s
        try:
            return await asyncio.wait_for(_answer(stream, patience_s), patience_s)
        except asyncio.TimeoutError:
            enough = len(self.view.expected()) >= self._rounds.min_group  # without it: this peer is not counted there
            if enough and self._directory.fresh and self._clock() >= began + patience_s:
                self.view.disbelieve(stream.remote, patience_s)
            raise

    def _nonsense(self, leader: str, said: str) -> RoundAborted:
        """A leader has said what no peer of this program says: it would do so again at once."""
        self.view.disbelieve(leader, NONSENSE_S)
        return RoundAborted("match", said, culprit=leader)

    @property
    def _longest_wait_s(self) -> float:
        """At a leader: for the longest group that can form there."""
        return (2.0 - invitations.LAST_CALL) * self._rounds.straggler_wait_s + 2 * leading.SOLO_PATIENCE_S

    async def _hand_in(self, leader: str, sealed: bytes) -> tuple[Stream, Kind, bytes]:
        """Take a seat at a leader: -> the stream, and the first that it says on it."""
        stream = await self._node.open(leader, self._join_name, "round", invitations.PROBE_TIMEOUT_S)
        with contextlib.ExitStack() as closing:
            closing.callback(stream.close)
            await stream.send(Kind.JOIN, sealed)
            kind, body = await _frame(stream, _ANSWERS)
            closing.pop_all()
        return stream, kind, body

    async def _called_away(self, leader: str) -> None:
        """Return when this leader has been silent for a while and another one invites: it has waited for it as well, or
        has just caught up.
        """
        await asyncio.sleep(SILENT_S)
        await self._invitations.elsewhere(leader)

    def _leave(self, leader: str, why: Exception) -> None:
        """Pass over a leader that is gone, or silent. Raises RoundAborted where this machine has slept: the others have
        gone on meanwhile, and who looks around first does not lead whoever sleeps as well.
        """
        log.info("leader %s is gone: %s", leader, in_words(why))
        self.view.avoid(leader)
        if not self._directory.fresh:
            raise RoundAborted("match", f"{leader} is gone, and this machine has slept, or lost the others")

    def _accept(self, body: bytes, sealed: bytes, join: JoinMessage, leader: str) -> Group:
        try:
            group = self._rosters.read(body, sealed, join, leader)
        except ProtocolError as error:
            raise self._nonsense(leader, f"bad roster: {error}") from None
        del self._sent_away[leader]
        return group

    async def _heed(self, reject: RejectMessage, leader: str) -> None:
        position = self._me.position()
        if reject.reason == "behind":
            if reject.lineage_id and heavier(reject.weight, reject.lineage_id, position.weight, position.lineage_id):
                self._me.nudge(leader, reject.weight, reject.lineage_id)
            raise RoundAborted("match", f"{leader} is at round {reject.round}", culprit=leader, behind=True)
        elsewhere = reject.leader if reject.reason == "follow" else None
        if elsewhere is None or not self.view.outranks(elsewhere, leader):
            log.info("leader %s takes no part in rounds now, or names one that cannot lead there", leader)
            self.view.avoid(leader)
        elif not self.view.hears_of(elsewhere, reject.lineage_id):
            await self._look_for(elsewhere, reject.lineage_id)
        if self.view.leader() == leader:
            await self._ask_again(leader)

    async def _ask_again(self, leader: str) -> None:
        """Soon: it has named somebody that cannot be followed, and is about to find out. Or it sends everybody away for
        as long as it is asked: one that has done so all too often, and led no round, is passed over.
        """
        if len(self._sent_away) >= MAX_SENT_AWAY:
            self._sent_away.clear()
        self._sent_away[leader] += 1
        if self._sent_away[leader] > SENT_AWAY:
            log.info("leader %s has sent this peer away %d times", leader, self._sent_away[leader])
            self.view.avoid(leader)
            return
        self._changed.clear()
        await leading.wait_for(self._changed, leading.RECHECK_S)

    async def _look_for(self, leader: str, lineage_id: str | None) -> None:
        """Follow a leader that is not known: at once, for the first that is named in this round; else it is looked up,
        which takes seconds where one of the DHT's nodes sleeps.
        """
        if self._followed_unknown:
            await self._directory.refresh()
            return
        self._followed_unknown = True
        self._node.spawn(self._directory.refresh())
        self.view.hears_of(leader, lineage_id, known=True)


async def _answer(stream: Stream, patience_s: float) -> tuple[Kind, bytes]:
    """What a leader has to say in the end; raises asyncio.TimeoutError as soon as it does not say that it is awake."""
    statuses = 10 + int(2 * patience_s / seats.AWAKE_EVERY_S)
    for _ in range(statuses):
        kind, body = await _frame(stream, _ANSWERS)
        if kind is not Kind.STATUS:
            return kind, body
        parse_json(StatusMessage, body)
    raise ProtocolError(f"{stream.remote} says that it is awake, {statuses} times, and no more")


async def _frame(stream: Stream, limits: Mapping[Kind, int]) -> tuple[Kind, bytes]:
    """The next one; raises asyncio.TimeoutError when it does not come, unless it was this machine that slept."""
    loop, receiving = asyncio.get_running_loop(), asyncio.ensure_future(stream.receive(limits))
    try:
        while True:
            began = loop.time()
            await asyncio.wait({receiving}, timeout=invitations.PROBE_TIMEOUT_S)
            if receiving.done():
                return receiving.result()
            if loop.time() < began + 2 * invitations.PROBE_TIMEOUT_S:
                raise asyncio.TimeoutError
    finally:
        await cancel_and_wait([receiving])
