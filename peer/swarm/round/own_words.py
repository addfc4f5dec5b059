"""What this peer says of a round that it gives up, and what it hears the others say."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from peer.outer.round import RoundAborted
from peer.protocol.wire import AbortMessage
from peer.swarm.net.node import Node
from peer.swarm.round.giving_up import GaveUpError, Lack, StalledError, seen_at
from peer.swarm.round.group_words import GroupWords
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.lateness import Lateness
from peer.swarm.round.observer import RoundObserver
from peer.swarm.round.persistent_group import PersistentGroup
from peer.swarm.round.signatures import GroupsDifferError
from peer.swarm.round.word_exchange import WordExchange


class OwnWords:
    """Finds them, and hands them to the observer as those of the others.

    Args:
        patience_s: how long a member waits for the joins of the others.
    """

    def __init__(
        self, node: Node, observer: RoundObserver, lateness: Lateness, group_words: GroupWords, exchange: WordExchange,
        patience_s: float,
    ) -> None:  # fmt: skip
        self._node, self._observer, self._lateness, self._clock = node, observer, lateness, node.clock
        self._group_words, self._exchange, self._patience_s = group_words, exchange, patience_s

    def gives_up(
        self, persistent: PersistentGroup, abort: RoundAborted, lack: Lack | None, lost_s: float | None = None
    ) -> RoundAborted:
        """-> the same, with what this peer lacks, for the others.

        Args:
            lost_s: what that cost; None: the round.
        """
        if lack is None:
            return abort
        if persistent.position is not None:
            lack = replace(lack, round=persistent.position.round)
        lack = self._group_words.provable(persistent.identifier, lack)
        cost_s = self._lost_s(persistent.buffers) if lost_s is None else lost_s
        self._observer.gave_up(persistent, self._node.peer_id, lack, cost_s)
        return StalledError(abort, lack)

    async def stops_waiting(
        self, persistent: PersistentGroup, abort: RoundAborted, lack: Lack | None
    ) -> RoundAborted:
        """-> `gives_up`, of a member that waited for joins as others ended the round. If those for which it waited
        have ended it as well, they have begun without it: it names one of them, and not the one that was first.
        """
        if lack is not None and lack.stage == "waiting" and lack.delayed_by:
            said = self._group_words.one_of(persistent.identifier, lack.names, self._node.timing.withheld_word_s)
            if (ended_by := await said) is not None:
                lack = replace(lack, delayed_by=frozenset({ended_by}))
        return self.gives_up(persistent, abort, lack)

    def of_failed(self, persistent: PersistentGroup, buffers: RoundBuffers, abort: RoundAborted) -> RoundAborted:
        """-> the same, with what the exchange had or lacked by now."""
        if abort.useless is not None and abort.culprit is not None:
            buffers.useless.add((abort.useless, abort.culprit))
        own_id = self._node.peer_id
        own, now = abort.culprit == own_id and not isinstance(abort, GaveUpError), self._clock()
        lack = None if own else buffers.lack(now)
        if lack is None:
            lack = seen_at(abort, own_id, buffers.lack_of)
        elif lack.stage == "contribution":
            lack = replace(lack, waited=buffers.over(now) and buffers.lacks("contribution"))
        return self.gives_up(persistent, abort, self._with_delay(buffers, lack))

    async def of_differing(
        self, persistent: PersistentGroup | None, buffers: RoundBuffers, differ: GroupsDifferError
    ) -> RoundAborted:
        """Why the groups differ, if that is known at once: the others wait for the words of this peer."""
        buffers.useless.add(("contribution", differ.remote))
        explaining = self._node.spawn(self._observer.explain(persistent, buffers, differ))
        await asyncio.wait([explaining], timeout=self._node.timing.stall_words_s / 2)
        if explaining.done() and not explaining.cancelled() and explaining.exception() is None:
            return explaining.result()
        return RoundAborted("exchange", differ.reason, differ.remote)  # the two are in dispute

    def heard(self, persistent: PersistentGroup, remote: str, message: AbortMessage) -> None:
        """Another member gave the round up, and said this. In the first round of a group no member waits for joins, and
        this peer knows who owed a roster: the leader.
        """
        first = bool(persistent.leader)
        lack, found = self._group_words.hear(
            persistent.identifier, persistent.members, remote, message, first=first
        )
        for finding in found:
            self._observer.equivocated(finding)
        self._exchange.begin(persistent)
        if lack is not None and lack.stage == "roster":
            lack = Lack("roster", frozenset({persistent.leader})) if first else None
        elif lack is not None and lack.stage in ("join", "waiting") and first and lack.round < 0:
            lack = None
        self._observer.gave_up(persistent, remote, lack, self._lost_s(persistent.buffers))

    def _with_delay(self, buffers: RoundBuffers, lack: Lack | None) -> Lack | None:
        """The same, with the members that had delayed this peer, where contributions do not say so themselves."""
        if lack is None or lack.stage in ("contribution", "join") or buffers.lacks("contribution"):
            return lack
        return replace(lack, delayed_by=self._lateness.delayed_by(self._clock(), buffers.times))

    def _lost_s(self, buffers: RoundBuffers) -> float:
        """What a round that fails now has cost: since its exchange began, or the first member was ready for it. The
        others have left at its end; if this machine has slept since, that is no member's fault.
        """
        times = buffers.times
        began = times.began or times.opened
        ends = (buffers.deadline if times.began else began + self._patience_s) + self._node.timing.late_vote_s
        return max(0.0, min(self._clock(), ends) - began)
