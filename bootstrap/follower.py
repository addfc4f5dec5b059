"""Follows a run's chain live, without its state, and signs checkpoints of it: where members are is known here first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from peer.errors import ProtocolError, in_words
from peer.protocol.checkpoints import Checkpoint, seal_checkpoint
from peer.protocol.fork_choice import ForkVerdict
from peer.swarm.catchup.chain_scout import ChainScout
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.state.chain import ChainStore

log = logging.getLogger(__name__)
CHECKPOINT_ROUNDS = 4
CHECKPOINT_S = 60.0  # where rounds are long


class ChainFollower:
    """Keeps the chain that members are on, by the rule that members follow.

    Args:
        node, directory: the network and who is on it.
        history: the chain; changed here alone.
        scout: fetches and judges what members claim.
        checkpoints: the newest; new ones go there.
        total: rounds of the run, if it ends.
        clock: wall-clock seconds.
    """

    def __init__(
        self, node: Node, directory: Directory, history: ChainStore, scout: ChainScout,
        checkpoints: NewestCheckpoint, total: int | None = None, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._node, self._directory = node, directory
        self._history, self._scout, self._checkpoints = history, scout, checkpoints
        self._total, self._clock = total, clock
        self._avoided: dict[str, float] = {}
        self._signed_at = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look_around()
            self._sign()
            await asyncio.sleep(self._node.timing.refresh_period_s)

    async def look_around(self) -> None:
        """Look at the first claim that can be shown, and follow it if the rule says so."""
        records, now = self._directory.reachable, self._node.clock()
        self._avoided = {peer_id: until for peer_id, until in self._avoided.items() if until > now}
        for donor in self._scout.claims(records, self._avoided)[:1]:
            try:
                chain = await self._scout.look(donor, records[donor].round)
            except (ProtocolError, StreamClosedError) as error:
                log.info("%s does not show the chain that it claims: %s", donor, in_words(error))
                self._avoided[donor] = now + self._node.timing.silent_donor_s
                continue
            if self._scout.judge(chain) is ForkVerdict.FOLLOW:
                await asyncio.to_thread(self._history.advance, chain)
            else:
                self._avoided[donor] = now + self._node.timing.silent_donor_s

    def _sign(self) -> None:
        """A checkpoint of the tip, every few rounds, once a minute, and at the run's end."""
        round, newest = len(self._history.chain), self._checkpoints.newest
        ahead = round - (newest.round if newest is not None else 0)
        now = self._clock()
        due = ahead >= CHECKPOINT_ROUNDS or round == self._total or now >= self._signed_at + CHECKPOINT_S
        if ahead <= 0 or not due:
            return
        serial = max(int(now * 1000), newest.serial + 1 if newest is not None else 0)
        checkpoint = Checkpoint(
            run_id=self._checkpoints.run_id, round=round, lineage_id=self._history.lineage_id(round), serial=serial,
            signed_at=now,
        )  # fmt: skip
        if self._node.peer_id not in self._checkpoints.keys:
            return  # the manifest names others
        self._checkpoints.offer(seal_checkpoint(self._node.identity, checkpoint))
        self._signed_at = now
        log.info("checkpoint of round %d, %s", round, checkpoint.lineage_id[:12])
