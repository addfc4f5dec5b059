"""Follows a run's chain live, without its state, and signs checkpoints of it: where members are is known here first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from peer.errors import ProtocolError, in_words
from peer.protocol.chain import id_of
from peer.protocol.checkpoints import Checkpoint, seal_checkpoint
from peer.protocol.fork_choice import ForkVerdict
from peer.protocol.lineage import Certificate, Position
from peer.swarm.catchup.chain_scout import ChainScout
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.catchup.patience import Patience
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.state.chain import ChainStore

log = logging.getLogger(__name__)
LOOKS_AT_ONCE = 4
CHECKPOINT_ROUNDS = 4
CHECKPOINT_S = 60.0  # where rounds are long


class ChainFollower:
    """Keeps the chain that members are on, by the rule that members follow.

    Args:
        node, directory: the network and who is on it.
        history: the chain; changed here alone.
        scout: fetches and judges what members claim.
        checkpoints: the newest; new ones go there.
        archive: what this node keeps of the run with its state, if it does: peers that have left cannot show it again.
        clock: wall-clock seconds.
    """

    def __init__(
        self, node: Node, directory: Directory, history: ChainStore, scout: ChainScout,
        checkpoints: NewestCheckpoint, archive: ChainStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._node, self._directory = node, directory
        self._history, self._scout, self._checkpoints = history, scout, checkpoints
        self._archive, self._clock = archive, clock
        self._failures: dict[str, tuple[float, int]] = {}  # until when, and how many of them
        self._looks: dict[str, asyncio.Task[Sequence[Certificate]]] = {}
        self._signed_at = 0.0
        self._patience = Patience(node.timing, node.clock, self._position())

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await self.look_around()
                await self.take_from_archive()
                self._sign()
                await asyncio.sleep(self._node.timing.refresh_period_s)
        finally:
            await cancel_and_wait(self._looks.values())

    async def look_around(self) -> None:
        """Look at a few claims at once, so that silent ones hide no other, and follow what the rule says. What a slow
        donor shows is judged in a later turn.
        """
        records, now = self._directory.reachable, self._node.clock()
        self._patience.look(self._position())
        self._failures = {peer_id: kept for peer_id, kept in self._failures.items() if peer_id in records}
        avoided = [peer_id for peer_id, (until, _) in self._failures.items() if until > now]
        for donor in self._scout.claims(records, [*avoided, *self._looks])[: LOOKS_AT_ONCE - len(self._looks)]:
            behind = self._patience.over and self._scout.has_say(donor)
            self._looks[donor] = asyncio.ensure_future(self._scout.look(donor, records[donor].round, behind=behind))
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=self._node.timing.refresh_period_s)
        for donor in [donor for donor, look in self._looks.items() if look.done()]:
            await self._heed(donor, self._looks.pop(donor))

    async def _heed(self, donor: str, look: asyncio.Task[Sequence[Certificate]]) -> None:
        try:
            found = look.result()
            if found and self._history.leads_through(len(found), id_of(found, len(found) - 1)):
                self._failures.pop(donor, None)  # another donor has shown as much, in this look
            elif (verdict := self._scout.judge(held := self._scout.carried(found))) is ForkVerdict.FOLLOW:
                await self._follow(donor, held)
            elif self._lost(held) and self._scout.resumed(held, found, self._directory.peers):
                words = "most of those who made the last rounds have lost them, and made others: round %d is the newest"
                log.warning(words, len(held))
                await self._follow(donor, held)
                self._sign()  # before another look of this turn shows the chain that the last checkpoint is on
            else:
                if verdict is ForkVerdict.WEIGHTLESS:
                    log.warning("few of those who were there signed round %d of %s: no checkpoint", len(held), donor)
                self._avoid(donor)
        except (ProtocolError, StreamClosedError) as error:
            log.info("%s does not show the chain that it claims: %s", donor, in_words(error))
            self._avoid(donor)
        except OSError as error:
            log.warning("the chain of %s cannot be kept: %s", donor, error.strerror)
            self._avoid(donor)

    def _lost(self, chain: Sequence[Certificate]) -> bool:
        """Whether no peer seems to have the state of the newest checkpoint any more, and this node can sign one of
        `chain` in its place: else the first donor of the old chain would lead back to it.
        """
        newest, rule = self._checkpoints.newest, self._scout.rules.rule
        if not self._patience.over or self._node.peer_id not in self._checkpoints.keys:
            return False
        if newest is None:
            return True
        kept = self._archive is not None and newest.on(self._archive.chain)
        return not kept and bool(newest.on(self._history.chain)) and rule.settled(chain, 0) > newest.round

    async def _follow(self, donor: str, chain: Sequence[Certificate]) -> None:
        await asyncio.to_thread(self._history.advance, chain)
        self._patience.look(self._position())  # before another look of this turn is judged
        self._failures.pop(donor, None)

    def _position(self) -> Position:
        chain = self._history.chain
        return Position(len(chain), self._history.lineage_id(len(chain)), self._history.weight)

    async def take_from_archive(self) -> None:
        """What the archive was shown after the last look: it has followed the same rule."""
        archive, known = self._archive, len(self._history.chain)
        if archive is not None and archive.leads_through(known, self._history.lineage_id(known)):
            await asyncio.to_thread(self._history.advance, archive.chain)

    def _avoid(self, donor: str) -> None:
        """For a time that doubles: many that show nothing must leave time for those that do."""
        _, failures = self._failures.get(donor, (0.0, 0))
        timing = self._node.timing
        seconds = min(timing.silent_donor_s * 2**failures, timing.longest_disbelief_s)
        self._failures[donor] = self._node.clock() + seconds, min(failures + 1, 10)

    def _sign(self) -> None:
        """A checkpoint every few rounds, once a minute, and at the run's end: of the last link that most have signed,
        or have built upon. The tip may be of a few that turn to the others' in a moment.
        """
        if self._node.peer_id not in self._checkpoints.keys:
            return  # the manifest names others
        chain, newest = self._history.chain, self._checkpoints.newest
        ended = len(chain) == self._scout.rules.total
        known = newest.round if newest is not None and newest.on(chain) else 0
        round = len(chain) if ended else self._scout.rules.rule.settled(chain, known)
        ahead = round - (newest.round if newest is not None else 0)
        now = self._clock()
        due = ahead >= CHECKPOINT_ROUNDS or ended or now >= self._signed_at + CHECKPOINT_S
        if ahead <= 0 or not due:
            return
        serial = max(int(now * 1000), newest.serial + 1 if newest is not None else 0)
        checkpoint = Checkpoint(
            run_id=self._checkpoints.run_id, round=round, lineage_id=self._history.lineage_id(round), serial=serial,
            signed_at=now,
        )  # fmt: skip
        self._checkpoints.offer(seal_checkpoint(self._node.identity, checkpoint))
        self._signed_at = now
        log.info("checkpoint of round %d, %s", round, checkpoint.lineage_id[:12])
