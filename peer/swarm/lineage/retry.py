"""After a round that failed: when to try again, and what to find out before. Nothing has changed, nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence

from peer.link.contribution_slot import ContributionSlot
from peer.outer.record import RoundRecord
from peer.protocol.lineage import Certificate
from peer.swarm.catchup.fork_choice import ForkChoice
from peer.swarm.catchup.late_commits import NoAnswerError, find_continuation
from peer.swarm.group.matchmaking import Matchmaker
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.runtime.expiring import ExpiringMap

log = logging.getLogger(__name__)
BEHIND_TRIES = 10
MAX_UNPROVEN = 256
MAX_DOUBLINGS = 10  # a float ends at 1024 of them


class RetryPolicy:
    """What one peer does after each of its rounds that failed."""

    def __init__(
        self, node: Node, directory: Directory, matchmaker: Matchmaker, fork_choice: ForkChoice, slot: ContributionSlot,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._matchmaker = node, directory, matchmaker
        self._fork_choice, self._slot, self._rng = fork_choice, slot, rng
        self._failed_in_row = 0
        self._owed = False
        self._unproven: ExpiringMap[str, int] = ExpiringMap(node.clock, 2 * node.timing.longest_disbelief_s)

    def committed(self) -> None:
        """A round went well. Who says falsely that this peer is behind may well be in it."""
        self._failed_in_row = 0

    def missed(self, signers: Iterable[str]) -> None:
        """These have made a round that this peer now has: what they said was true."""
        for peer_id in signers:
            if self._unproven.pop(peer_id, None) is not None:
                self._matchmaker.membership.believe(peer_id)

    async def of(self, record: RoundRecord) -> None:
        """Return when a round may be tried again; a fresh contribution is asked for, unless this peer caught up."""
        self._owed = False
        if record.instead == "wait":
            await self._until_a_peer_comes()
        elif record.instead == "catch_up":
            if await self._until_caught_up(record.culprit):
                return
            if record.culprit is not None:
                self._disbelieve(record.culprit)
        else:
            await self._back_off(record)
        self._owed = True
        self.settle()

    def _disbelieve(self, peer_id: str) -> None:
        """It claimed that this peer is behind, and no peer proves it: for longer each time, else a few such leaders, in
        turn, would cost all rounds.
        """
        timing, times = self._node.timing, self._unproven.get(peer_id, 0)
        if peer_id in self._unproven or len(self._unproven) < MAX_UNPROVEN:
            self._unproven[peer_id] = times + 1
        seconds = min(timing.longest_disbelief_s, timing.unproven_s * 2.0 ** min(times, MAX_DOUBLINGS))
        self._matchmaker.membership.disbelieve(peer_id, seconds)

    def settle(self) -> None:
        """Ask for the fresh contribution, unless another peer is ahead: then catch up first."""
        if self._owed and not self._fork_choice.claims.donors():
            self._owed = False
            self._slot.want_snapshot()

    async def _back_off(self, record: RoundRecord) -> None:
        log.info("round %d aborted in %s: %s", record.round, record.phase, record.reason)
        self._failed_in_row += 1
        if record.culprit is not None:
            self._matchmaker.membership.doubt_relay(record.culprit)
        timing = self._node.timing
        longest = min(timing.max_backoff_s, timing.first_backoff_s * 2.0 ** min(self._failed_in_row, MAX_DOUBLINGS))
        await asyncio.sleep(self._rng.uniform(0.0, longest))
        if record.phase == "commit":
            await self._fork_choice.look_at_own_state()
        if record.phase != "match":  # the snapshot that was sent must stay until this is known
            others = [peer_id for peer_id in record.members if peer_id != self._node.peer_id]
            missed = await self._went_on(others, record.culprit)
            if missed is not None:
                self._fork_choice.claims.offer(*missed)

    async def _went_on(self, others: list[str], culprit: str | None) -> tuple[str, Sequence[Certificate]] | None:
        """Ask them, and ask again for a while where this machine has slept: its network may need a moment to come back,
        and what it gives up unasked it would send twice.
        """
        deadline = self._node.clock() + self._node.timing.unheard_s
        while True:
            try:
                return await find_continuation(
                    self._fork_choice.fetcher, others, self._fork_choice.local_state, self._rng,
                    self._node.timing.ask_timeout_s, culprit,
                )  # fmt: skip
            except NoAnswerError:
                if self._directory.fresh or self._node.clock() >= deadline:
                    return None
                await asyncio.sleep(self._node.timing.recheck_s)

    async def _until_a_peer_comes(self) -> None:
        lineage_id = self._fork_choice.local_state().state.lineage_id
        deadline = self._node.clock() + self._node.timing.alone_recheck_s
        while self._node.clock() < deadline and not self._matchmaker.anybody_waiting:
            peers = self._directory.reachable.values()
            if any(peer.lineage_id == lineage_id and peer.state == "training" for peer in peers):
                return
            if self._fork_choice.claims.donors():
                return
            await asyncio.sleep(self._node.timing.recheck_s)

    async def _until_caught_up(self, culprit: str | None) -> bool:
        """Try for seconds, unless the peer that claims to be ahead has shown a chain that this one does not follow:
        several such peers, one after the other, would keep those apart who could make the next round together.
        """
        clock = self._node.clock
        until = clock() + BEHIND_TRIES * self._node.timing.recheck_s
        for _ in range(BEHIND_TRIES):
            if not self._fork_choice.claims.donors():  # the directory takes seconds where one of its nodes sleeps
                await self._directory.refresh()
            if await self._fork_choice.catch_up(max(0.0, until - clock())):
                self._slot.announce_anchor(self._fork_choice.missed.contributed)
                return True
            if clock() >= until or (culprit is not None and self._fork_choice.claims.turned_down(culprit)):
                return False
            await asyncio.sleep(self._node.timing.recheck_s)
        return False
