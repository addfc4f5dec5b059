"""Fork choice: keeps a peer on the heaviest lineage in sight, by replay or by a snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from peer.errors import ProtocolError, in_words
from peer.link.channel import TrainerLink
from peer.link.messages import RoundEnded
from peer.outer.record import RoundRecord
from peer.outer.state.outer_state import AnyUpdate
from peer.protocol.lineage import Certificate, GivenUp, Position, RosterLimits, given_up, heavier, quorum
from peer.swarm.catchup.donors import LocalState, ahead, helpers
from peer.swarm.catchup.genesis import fetch_genesis
from peer.swarm.catchup.history_client import CaughtUp, HistoryClient, NotHeavierError
from peer.swarm.catchup.late_commits import LateCommits
from peer.swarm.catchup.tip_agreement import UndecidedError, members_of, most_named
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import staggered
from peer.swarm.state.store import StateStore

log = logging.getLogger(__name__)


class CatchUpHost(Protocol):
    """The peer that catches up; `LineageRounds` implements it."""

    def on_caught_up(self) -> None:
        """The state has changed."""

    def on_answer(self, donor: str) -> None:
        """This donor answers."""

    async def on_counted(self) -> None:
        """A round that this peer gave up turns out to contain its contribution."""


class ForkChoice:
    """The donors of one peer.

    Args:
        node, directory: the network and its live peers.
        run_id, limits: the run, and what its rosters may be.
        store: the outer state.
        host: is told of what this peer finds out.
        trainer: is told of each change.

    Attributes:
        fetcher: asks donors.
        missed: the outcome of what this peer sent.
        caught_up_at: when it last did, by the node's clock.
    """

    def __init__(
        self, node: Node, directory: Directory, run_id: str, limits: RosterLimits, store: StateStore,
        host: CatchUpHost, trainer: TrainerLink,
    ) -> None:  # fmt: skip
        self._own_id, self._directory, self._store = node.peer_id, directory, store
        self._node = node
        self._host, self._trainer = host, trainer
        self.fetcher = HistoryClient(node, run_id, store.history.folder, limits, self._accuse)
        self.missed = LateCommits(node.peer_id)
        self.caught_up_at = float("-inf")
        self._distrusted: set[str] = set()
        self._nudged: dict[str, tuple[int, str]] = {}

    def standing(self) -> LocalState:
        """What this peer has."""
        store = self._store
        return LocalState(state=store.state, history=store.history, valid=store.valid, digest=store.digest)

    def donors(self) -> list[str]:
        """The donors to ask for a heavier lineage: first those that claimed one here, then those that announce one."""
        mine = (self._store.position.weight, self._store.position.lineage_id)
        self._nudged = {donor: theirs for donor, theirs in self._nudged.items() if heavier(*theirs, *mine)}
        nudged = [donor for donor in self._nudged if donor not in self._distrusted]
        return list(dict.fromkeys([*nudged, *ahead(self._directory.reachable, self.standing(), self._distrusted)]))

    def nudge(self, donor: str, weight: int, lineage_id: str) -> None:
        """`donor` claims to be on this heavier lineage, whatever the directory shows."""
        self._nudged[donor] = (weight, lineage_id)

    async def fetch_genesis(self, organiser: str) -> bool:
        """Take the initial state from the organiser or another peer; False if none has it."""
        donors = (organiser, *self._directory.peers)
        return await fetch_genesis(self.fetcher, donors, self.standing(), self._store.adopt)

    async def catch_up(self) -> bool:
        """Follow the heaviest lineage in sight if it is not ours; True when the state changed."""
        before, chain = self._store.position, tuple(self._store.history.chain)
        self.missed.begin()
        timing, clock = self._node.timing, self._node.clock
        until = clock() + timing.new_donors_s

        def names() -> list[str]:
            return self.donors() if clock() < until else []

        calls = staggered(names, self._reach, timing.next_donor_s, timing.recheck_s)
        async with contextlib.aclosing(calls) as answers:
            async for donor, answer in answers:
                self._nudged.pop(donor, None)
                try:
                    answer.result()
                    self._host.on_answer(donor)
                    others = helpers(self._directory.reachable, donor, self._distrusted)
                    how = await self.fetcher.catch_up(
                        donor, self.standing(), self._replay, self._store.adopt, others,
                        list(self._directory.reachable),
                    )  # fmt: skip
                except (NotHeavierError, UndecidedError) as error:
                    log.info("%s", error)
                    self._distrust(donor, timing.not_heavier_s)
                except ProtocolError as error:
                    self._accuse(donor, str(error))
                except (TimeoutError, StreamClosedError) as error:
                    log.info("donor %s left: %s", donor, in_words(error))
                    # its record stays for a while: asking again would spin
                    silent = isinstance(error, TimeoutError)
                    self._distrust(donor, timing.silent_donor_s if silent else timing.unreachable_s)
                else:
                    lost = given_up(chain, self._store.history.chain, self._own_id)
                    self._report(how, before, lost)
                    return True
        if self._store.position == before:
            return False
        replayed = self._store.state.round - before.round  # a donor left half-way
        self._report(CaughtUp(donor=None, replayed=replayed, snapshot_round=None), before)
        return True

    async def _reach(self, donor: str) -> None:
        await asyncio.wait_for(self.fetcher.reach(donor), self._node.timing.reach_timeout_s)

    async def look_at_own_state(self) -> None:
        """After votes that differ: give the state up if two thirds of the round that led to it hold another one."""
        store = self._store
        if not store.valid or not store.history.chain:
            return
        link, own = store.history.chain[-1].link, await store.digest()
        members = members_of(link, self._directory.reachable)
        said = await self.fetcher.said(link, members, self._node.timing.voted_s, {self._own_id: own})
        digest, count = most_named(said, link)
        words = f"{count} of the {len(link.roster)} members of round {link.round + 1} hold {str(digest)[:12]}"
        if count < quorum(len(link.roster)):
            if set(said.values()) != {own}:
                log.error("%s, this peer %s: it is unknown which is right", words, own[:12])
        elif digest != own:
            log.error("%s, this peer %s: it takes theirs", words, own[:12])
            await store.doubt()

    def _accuse(self, donor: str, why: str) -> None:
        log.warning("%s cannot be a donor: %s", donor, why)
        self._distrust(donor, self._node.timing.distrust_s)

    def _distrust(self, donor: str, seconds: float) -> None:
        self._distrusted.add(donor)
        asyncio.get_running_loop().call_later(seconds, self._distrusted.discard, donor)

    def _report(self, how: CaughtUp, before: Position, lost: GivenUp | None = None) -> None:
        self.caught_up_at = self._node.clock()
        self._host.on_caught_up()
        reason = (
            f"replayed {how.replayed} rounds from {how.donor or 'a donor that left'}"
            if how.snapshot_round is None
            else f"took the snapshot of round {how.snapshot_round} from {', '.join(how.chunks) or how.donor}; "
            f"left {before.lineage_id[:12]} at round {before.round}, unsent progress is kept"
        )
        now = self._store.position
        if lost is not None and lost.rounds:
            reason += f"; dropped {lost}: {now.weight} tokens are heavier than {before.weight}"
        log.info("caught up to round %d: %s", now.round, reason)
        record = RoundRecord(
            status="caught_up", round=now.round, lineage_id=now.lineage_id, reason=reason, donor=how.donor,
            replayed=how.replayed if how.snapshot_round is None else None, snapshot_round=how.snapshot_round,
        )  # fmt: skip
        self._trainer.tell(RoundEnded(record=record))

    async def _replay(self, update: AnyUpdate, certificate: Certificate) -> None:
        known, contributed = self.missed.contributed, self.missed.replaying(certificate)
        await self._store.apply(update, certificate, contributed)
        if known is None and contributed is not None:
            await self._host.on_counted()
