"""The butterfly exchange of one round over raw binary streams, and the votes that commit it.

Every member sends to every other, on one stream and in order: HELLO or its join, slices of its contribution to that
reducer's shard and its signature over them, slices of the shard that it reduces itself (each encoded once, the same
bytes for all) as soon as they are ready and its signature over those, its vote. Encoding, sending, reducing and
receiving overlap slice by slice. What arrives goes to this round's inboxes, checked; nothing touches the outer state.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from peer.outer.round import Due, Exchanged, Group, RoundAborted
from peer.outer.state.outer_state import OuterState
from peer.protocol.lineage import VOTE_DOMAIN, Certificate, Link, Position, shares_of
from peer.protocol.wire import AbortMessage, Kind
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.node import Node
from peer.swarm.round.deadline import DeadlineEstimator, usual_duration
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.round.group_streams import GroupStreams
from peer.swarm.round.group_words import GroupWords
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.joining import Joining, Newcomer, never
from peer.swarm.round.lateness import Lateness
from peer.swarm.round.observer import RoundObserver, Unobserved
from peer.swarm.round.outbox import bounded, start_senders
from peer.swarm.round.own_words import OwnWords
from peer.swarm.round.persistent_group import PersistentGroup, abort_stream
from peer.swarm.round.signatures import GroupsDifferError, MalformedError
from peer.swarm.round.strategy import ExchangeStrategy
from peer.swarm.round.votes import VoteCount
from peer.swarm.round.word_exchange import WordExchange
from peer.swarm.runtime.buffer_pool import BufferPool
from peer.swarm.runtime.futures import done_at, has_come
from peer.swarm.runtime.tasks import cancel_and_wait

log = logging.getLogger(__name__)
BEFORE_THEM = 0.8  # of what the others wait for the join of a member that is still in the round before


class Exchange:
    """All exchanges of this peer; keeps its persistent group.

    Args:
        rosters: of the run; checks the joins of a persistent group.
        strategies: (rounds before) -> the arithmetic of the round that follows.
        on_join: called when another member of the persistent group is ready for the next round.
        observer: sees what was signed, audits it, and receives violations of the protocol; None: none.
    """

    def __init__(
        self,
        node: Node,
        rosters: RosterAuthority,
        timeout_s: float,
        strategies: Callable[[int], ExchangeStrategy],
        on_join: Callable[[], None] = lambda: None,
        observer: RoundObserver | None = None,
    ) -> None:
        self._node, self._strategies, self._clock = node, strategies, node.clock
        self._strategy = strategies(0)
        timing = node.timing
        self._budget = DeadlineEstimator(timeout_s, timing.min_exchange_s, timing.soft_exchange_s)
        self._lateness, self._pool = Lateness(timing.late_s), BufferPool()
        self._rosters, self._on_join, self._observer = rosters, on_join, observer or Unobserved()
        self._group_words = group_words = GroupWords(node.identity, rosters.run_id)
        self._word_exchange = WordExchange(
            node, rosters.run_id, group_words, self._observer.equivocated, self._observer.explained
        )
        self._patience_s = rosters.rounds.straggler_wait_s + timing.solo_patience_s
        self._words = OwnWords(
            node, self._observer, self._lateness, group_words, self._word_exchange, self._patience_s
        )
        self.group_streams = GroupStreams(node, rosters.run_id, group_words, lambda: self._group)
        self._group: PersistentGroup | None = None
        self._buffers: RoundBuffers | None = None

    async def start(self) -> None:
        await self.group_streams.start()
        await self._word_exchange.start()

    # -- the phases of a round ---------------------------------------------------------------------------------------

    def can_continue(self, position: Position) -> frozenset[str]:
        """The members of the persistent group that can continue from this position; empty if there is none."""
        persistent = self._group
        if persistent is None or persistent.broken is not None or persistent.position != position:
            return frozenset()
        return persistent.members

    def most_wait(self) -> bool:
        """Whether most others in the persistent group have joined its next round."""
        inboxes = self._group.buffers.inboxes if self._group is not None else {}
        return 2 * sum(has_come(inbox.join) for inbox in inboxes.values()) >= max(1, len(inboxes))

    async def next_round(
        self, due: Due, state: OuterState, position: Position, patience_s: float, newcomer: Newcomer = never
    ) -> Group:
        """The persistent group's next round: send what is ready, return when all have joined.

        Args:
            newcomer: returns when a peer waits for which the group re-forms.

        Raises:
            RoundAborted: the group has ended or will, or a member did not join in time; nothing has changed.
        """
        persistent = self._group
        assert persistent is not None
        buffers, self._patience_s = persistent.buffers, patience_s
        self._buffers = buffers
        self._strategy = self._strategies(state.round)
        self._pool.wake(buffers.wire_bytes)
        buffers.ready = True
        buffers.note_open(self._clock())
        join, sealed = self._rosters.join(position, due.tokens, persistent.identifier, due.ranges)
        self._send(buffers, persistent, due, state, (Kind.JOIN, sealed))
        joining = Joining(buffers, self._node.timing.late_join_s, self._clock)
        if (left := await joining.all_come(patience_s, newcomer)) is not None:
            raise await self._words.stops_waiting(persistent, *left)
        joins = {peer_id: inbox.join.result() for peer_id, inbox in buffers.inboxes.items()}
        joins[self._node.peer_id] = sealed, join
        _, group = self._rosters.write(joins, buffers.wire.shares)
        buffers.joins = {peer_id: blob for peer_id, (blob, _) in joins.items()}
        buffers.seat(group)
        self._observer.joined(persistent, position.round, buffers)
        return group

    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged:
        """Send and reduce; returns the update, identical on all members. Raises RoundAborted."""
        began = self._clock()
        log.info("round %d: group of %d", state.round + 1, len(group.members))
        buffers = self._buffers
        if buffers is None or buffers.group is not group:
            buffers = await self._gather(group, due, state)
        buffers.times.began, buffers.slow_line_s = began, self._rosters.slow_line_s(group, state.round)
        buffers.deadline = began + self._budget.seconds(buffers.wire_bytes, buffers.slow_line_s)
        try:
            exchanged = await self._exchange(buffers, group, due, state)
        except MalformedError as error:
            self._observer.malformed(buffers, error)
            raise
        except GroupsDifferError as differ:
            raise await self._words.of_differing(self._group, buffers, differ) from None
        return exchanged

    async def _exchange(self, buffers: RoundBuffers, group: Group, due: Due, state: OuterState) -> Exchanged:
        contribute = self._strategy.contribution(due, state, buffers.share)
        keep = self._observer.begins(buffers)
        produce = self._strategy.produce(buffers, group, contribute, keep, self._observer.reduced)
        producing = asyncio.ensure_future(produce)
        signed = [inbox.signed for inbox in buffers.inboxes.values()]
        times = buffers.times
        times.came |= {
            "contribution": done_at({peer_id: inbox.sent for peer_id, inbox in buffers.inboxes.items()}, self._clock),
            "reduced": done_at(dict(zip((*buffers.inboxes, group.me), (*signed, producing), strict=True)), self._clock),
        }
        try:
            await bounded([producing, *signed], buffers, self._clock, self._budget)
            self._budget.learn(buffers.wire_bytes, usual_duration(times.began, times.sent, times.signed))
            buffers.waited = self._lateness.note(self._clock(), times)
            own = producing.result()
            others = {peer_id: inbox.reduced.result() for peer_id, inbox in buffers.inboxes.items()}
            payloads = [own.payload if peer == group.me else others[peer] for peer in buffers.order]
            buffers.heard = await self._strategy.hear(buffers)
            self._observer.heard(buffers.heard)
            exchanged = await self._strategy.finish(buffers, group, payloads, own, state)
        finally:
            await cancel_and_wait([producing])
        return replace(exchanged, residuals=self._strategy.residuals(buffers))

    async def commit(self, group: Group, link: Link) -> Certificate:
        """Sign the link, collect the others' votes; two thirds must agree. Raises RoundAborted."""
        buffers = self._buffers
        assert buffers is not None
        assert buffers.group is group
        link_id = link.id
        signature = self._node.identity.sign(VOTE_DOMAIN, bytes.fromhex(link_id)).hex()
        buffers.own.vote.set_result(buffers.waited.vote(link_id, signature))
        odd = partial(self._observer.odd_vote, buffers)
        voting = {peer_id: inbox.vote for peer_id, inbox in buffers.inboxes.items()}
        buffers.times.came["vote"] = done_at(voting, self._clock)
        with closing(VoteCount(buffers, link, {group.me: signature}, self._clock, odd)) as votes:
            try:
                await votes.decide(self._node.timing.late_vote_s)
            except RoundAborted:
                if self._clock() >= buffers.deadline and buffers.too_short(buffers.lack()):
                    self._budget.allow_longer(buffers.wire_bytes)
                raise
            await self._all_sent(buffers)
            signatures = await votes.all()
        await self._strategy.commit()  # while what was encoded is still as it was
        self._observer.committed(buffers)
        return Certificate(link=link, signatures=signatures)

    async def _all_sent(self, buffers: RoundBuffers) -> None:
        """After this the trainer may change the snapshot, and the anchor may change.

        There is a certificate: a member that does not read may delay the others as long again as the round took so far,
        or until the slowest line among them had its time.
        """
        now, sending_s = self._clock(), self._node.timing.min_sending_s
        took_s = now - buffers.times.began
        left = min(max(0.0, buffers.deadline - now), max(sending_s, sending_s + buffers.slow_line_s - took_s, took_s))
        _, unsent = await asyncio.wait(buffers.senders.values(), timeout=left)
        await cancel_and_wait(unsent)
        await self._strategy.idle()
        for peer_id, sender in buffers.senders.items():
            if self._group is not None and (sender.cancelled() or sender.exception() is not None):
                # it may have ended in the middle of a frame: nothing more can be said on that stream
                unread = RoundAborted("commit", f"{peer_id} did not take all in time", peer_id)
                lack = Lack("stream", frozenset({peer_id}))
                self._group.give_up(self._words.gives_up(self._group, unread, lack, min(left, self._clock() - now)))

    async def release(self, group: Group, abort: RoundAborted | None, position: Position | None = None) -> None:
        """End the round. After an abort, tell the others at once, so that none waits for the deadline.

        Args:
            position: of the group now, if it persists for the next round.
        """
        buffers, persistent = self._buffers, self._group
        if buffers is None or persistent is None or buffers.group is not group:
            return
        if abort is not None:
            abort = self._words.of_failed(persistent, buffers, abort)
            self._lateness.failed()
            await cancel_and_wait(buffers.senders.values())
            await self._strategy.revert()
        self._buffers = None
        self._pool.rest(self._node.timing.buffer_kept_s)
        if abort is None and position is not None and persistent.broken is None:
            self._advance(persistent, buffers, position)
            return
        unread = persistent.broken if isinstance(persistent.broken, StalledError) else None
        over = abort or unread or RoundAborted("commit", "the round is over")
        await self.dissolve(over, tell=abort is not None)

    async def counted(self) -> None:
        """The round that this peer gave up last contains its contribution after all: what was lost of it was lost."""
        await self._strategy.restore()

    async def dissolve(self, abort: RoundAborted, tell: bool = False) -> None:
        """End the persistent group, if there is one; what was sent for a round that has not begun is taken back."""
        persistent, self._group = self._group, None
        if persistent is None:
            return
        persistent.leave()
        self._pool.rest(self._node.timing.buffer_kept_s)
        if self._buffers is not None:
            self._buffers = None
            await cancel_and_wait(persistent.buffers.senders.values())
            await self._strategy.revert()
        await cancel_and_wait(persistent.buffers.senders.values())
        for peer_id in await persistent.tell(self._group_words.message(persistent.identifier, abort)) if tell else ():
            self._node.spawn(self.group_streams.say(peer_id, persistent.identifier, abort))
        self._close(persistent, abort)

    def on_join(self) -> None:
        if self._group is not None:
            self._group.buffers.note_open(self._clock())
        self._on_join()

    def on_ahead(self, persistent: PersistentGroup, remote: str) -> None:
        """See `GroupOwner.on_ahead`. Once more than a third of the others are, and two, this peer says what it lacks
        before they call it late.
        """
        buffers = persistent.buffers
        before, buffers.ahead = buffers.ahead, buffers.ahead | {remote}
        several = max(2, len(buffers.inboxes) // 3 + 1)
        if len(before) < several <= len(buffers.ahead):
            wait_s = BEFORE_THEM * self._patience_s
            asyncio.get_running_loop().call_later(wait_s, self._overtaken, weakref.ref(buffers))

    def _overtaken(self, weakly: Callable[[], RoundBuffers | None]) -> None:
        buffers = weakly()
        made = buffers is not None and buffers.own.seal.done()  # no member makes the round without it
        if buffers is not None and buffers is self._buffers and made and buffers.lacks("reduced"):
            buffers.overtake(self._clock())

    def on_words(self, persistent: PersistentGroup, remote: str, message: AbortMessage) -> None:
        self._words.heard(persistent, remote, message)

    def on_offence(self, abort: RoundAborted) -> None:
        self._observer.saw(abort)

    def on_break(self, persistent: PersistentGroup) -> None:
        """See `GroupOwner.on_break`. Between rounds no other member would learn it; a round's own end tells them."""
        if self._group is persistent and self._buffers is None:
            self._group = None
            self._close(persistent, RoundAborted("match", "the group has ended"))

    def _close(self, persistent: PersistentGroup, abort: RoundAborted) -> None:
        persistent.end(abort)
        self.group_streams.ended(persistent, abort)
        message = self._group_words.message(persistent.identifier, abort)
        for stream in persistent.outbound.values():
            self._node.spawn(abort_stream(stream, message, self._node.timing))

    # -- groups ------------------------------------------------------------------------------------------------------

    async def _gather(self, group: Group, due: Due, state: OuterState) -> RoundBuffers:
        """Open the streams of a group that has just been matched."""
        await self.dissolve(RoundAborted("match", "another group has formed"))
        self._strategy = self._strategies(state.round)
        order = tuple(member.peer_id for member in group.members)
        wire = self._strategy.wire.among(shares_of(group.members))
        buffers = RoundBuffers(order, group.index, wire, group, self._pool.lend)
        self._pool.wake(buffers.wire_bytes)
        open_join = partial(self._rosters.open_join, group=group.id)
        persistent = PersistentGroup(buffers, group.id, open_join, self, self._node.timing)
        self._group, self._buffers = persistent, buffers
        await self.group_streams.changed()
        self._send(buffers, persistent, due, state, None)
        return buffers

    def _advance(self, persistent: PersistentGroup, before: RoundBuffers, position: Position) -> None:
        """The same members in the next round."""
        wire = self._strategies(position.round).wire.among(self._shares(before, position))
        buffers = RoundBuffers(before.order, before.me, wire, lend=before.lend)
        buffers.senders = before.senders  # what is still being sent comes first
        persistent.advance(buffers, position)

    def _shares(self, before: RoundBuffers, position: Position) -> Sequence[int]:
        """Of these members in the round at this position, by what all of them hold: the joins of the round before."""
        assert before.group is not None
        self._rosters.saw({peer_id: inbox.bytes_s for peer_id, inbox in before.inboxes.items()})
        return self._rosters.allot(before.group, position.round).shares

    def _send(
        self,
        buffers: RoundBuffers,
        persistent: PersistentGroup,
        due: Due,
        state: OuterState,
        first: tuple[Kind, bytes] | None,
    ) -> None:
        """Start a sender to each other member."""
        contribute = self._strategy.contribution(due, state, buffers.share)
        start_senders(buffers, self._strategy, contribute, partial(self.group_streams.stream_to, persistent), first)
