"""Rounds that are committed, but that members made long: what each says of them, and who is judged for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from statistics import median_low

from peer.protocol.wire import VoteMessage
from peer.swarm.net.node import Node
from peer.swarm.round.giving_up import GaveUpError
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.lateness import Waited
from peer.swarm.runtime.futures import has_come
from peer.swarm.trust.stalls import StallBook


class LongRounds:
    """Judges each committed round, once its votes have come, and the joins that follow it.

    Args:
        stalls: learns who was late.
    """

    def __init__(self, node: Node, stalls: StallBook) -> None:
        self._node, self._stalls = node, stalls
        self._votes: Mapping[str, asyncio.Future[VoteMessage]] = {}
        self._voted: Mapping[str, float] = {}
        self._own_late: frozenset[str] = frozenset()

    def committed(self, buffers: RoundBuffers) -> None:
        """The round is committed: judge what made it long."""
        waited, votes = buffers.waited, {peer_id: inbox.vote for peer_id, inbox in buffers.inboxes.items()}
        if waited.contributions or waited.shards:
            left_s = max(0.0, buffers.deadline - self._node.clock()) + self._node.timing.stall_words_s
            self._node.spawn(self._judge(buffers.order, waited, votes, left_s))
        if waited.joins:
            shards = {one: _said(vote).shards.keys() - self._own_late for one, vote in self._votes.items()}
            late = {one: min(seconds, self._voted_late_s(one)) for one, seconds in waited.joins.items()}
            self._stalls.rejoined(buffers.order, late, shards)
        self._votes, self._voted, self._own_late = votes, buffers.times.came["vote"], frozenset(waited.shards)

    def _voted_late_s(self, peer_id: str) -> float:
        """By how much its vote of the last round came later than most: a late shard made it no later than that."""
        voted = self._voted
        return max(0.0, voted.get(peer_id, math.inf) - median_low(voted.values())) if voted else math.inf

    async def _judge(
        self, members: Iterable[str], waited: Waited, votes: Mapping[str, asyncio.Future[VoteMessage]], left_s: float
    ) -> None:
        """Once all have voted, or given up: what made a member late may make its vote late, or end its round."""
        await asyncio.wait(votes.values(), timeout=left_s)
        self._stalls.waited(members, waited, {peer_id: _said(vote) for peer_id, vote in votes.items()})


def _said(vote: asyncio.Future[VoteMessage]) -> Waited:
    """What a member says of a round that this peer has committed: with its vote, or as it gave the round up."""
    if has_come(vote):
        return Waited.said(vote.result())
    error = vote.exception() if vote.done() and not vote.cancelled() else None
    word = error.message.word if isinstance(error, GaveUpError) else None
    return Waited(delayed_by=frozenset(word.delayed_by)) if word is not None else Waited()
