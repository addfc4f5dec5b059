"""Fork choice: keeps a peer on the heaviest lineage in sight, by replay or by a snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from peer.errors import ProtocolError
from peer.link.channel import TrainerLink
from peer.link.messages import RoundEnded
from peer.outer.record import RoundRecord
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol.chain import GivenUp, given_up
from peer.protocol.lineage import Certificate, Position, quorum
from peer.swarm.catchup.chain_scout import ChainRules, ChainScout
from peer.swarm.catchup.claims import Claims, ClaimsHost
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.genesis import fetch_genesis
from peer.swarm.catchup.history_client import CaughtUp, HistoryClient, replay
from peer.swarm.catchup.late_commits import LateCommits
from peer.swarm.catchup.tip_agreement import UndecidedError, members_of, most_named
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import staggered
from peer.swarm.state.store import StateStore

log = logging.getLogger(__name__)


class CatchUpHost(ClaimsHost, Protocol):
    """The peer that catches up; `LineageRounds` implements it."""

    def on_caught_up(self, since: int) -> None:
        """The state has changed; it was that of so many rounds, perhaps of another branch."""

    async def on_counted(self) -> None:
        """A round that this peer gave up turns out to contain its contribution."""


class ForkChoice:
    """How one peer follows the lineage that the rule prefers.

    Args:
        run_id, rules: the run, and which chains it allows and prefers.

    Attributes:
        claims: of the others.
        caught_up_at: when it last did, by the node's clock.
    """

    def __init__(
        self, node: Node, directory: Directory, run_id: str, rules: ChainRules, store: StateStore,
        host: CatchUpHost, trainer: TrainerLink,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._store = node, directory, store
        self._host, self._trainer = host, trainer
        self.fetcher = HistoryClient(
            node, run_id, store.history.folder, rules.limits, lambda donor, why: self.claims.accuse(donor, why)
        )
        requests = self.fetcher.requests
        scout = ChainScout(requests, run_id, rules, store.history)
        self.claims = Claims(node, directory, requests, scout, store, host)
        self.missed = LateCommits(node.peer_id)
        self.caught_up_at = float("-inf")

    def local_state(self) -> LocalState:
        """What this peer has."""
        store = self._store
        return LocalState(state=store.state, history=store.history, valid=store.valid, digest=store.digest)

    async def fetch_genesis(self, organiser: str) -> bool:
        """Take the initial state from the organiser or another peer; False if none has it."""
        donors = (organiser, *self._directory.peers)
        return await fetch_genesis(self.fetcher, donors, self.local_state(), self._store.adopt)

    async def replay_own(self) -> bool:
        """Make the rounds again that an earlier life of this peer was in, after the state that it begins with: all
        others may have lost them. True when the state changed.
        """
        history, before = self._store.history, self._store.position

        async def kept(certificate: Certificate) -> bytes | None:
            path = await asyncio.to_thread(history.whole_update, certificate.link.update_digest)
            return None if path is None else await asyncio.to_thread(path.read_bytes)

        try:
            replayed = await replay(history.beyond, self.local_state(), self, kept)
        except (ProtocolError, OSError) as error:  # others may have them
            log.warning("the rounds that this peer has on disk cannot be made again: %s", error)
            replayed = self._store.state.round - before.round
        history.forget_beyond()
        if replayed:
            self._report(CaughtUp(donor=None, replayed=replayed, snapshot_round=None), before, source="its own files")
        return replayed > 0

    async def catch_up(self, patience_s: float | None = None) -> bool:
        """Follow another chain if the rule says so; True when the state changed.

        Args:
            patience_s: for looks at what others claim; None: as long as those take.
        """
        before, chain = self._store.position, self._store.history.chain
        self.missed.begin()
        timing, clock = self._node.timing, self._node.clock
        until = clock() + timing.new_donors_s

        def names() -> list[str]:
            return self.claims.names() if clock() < until else []

        if await self._follow_preferred(before, chain):
            return True
        calls = staggered(names, self.claims.examine, timing.next_donor_s, timing.recheck_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s) as patience, contextlib.aclosing(calls) as answers:
                async for _, answer in answers:
                    if answer.exception() is None and self.claims.donors():
                        patience.reschedule(None)
                        if await self._follow_preferred(before, chain):
                            return True
        if self._store.position == before:
            return False
        replayed = self._store.state.round - before.round  # a donor left half-way
        self._report(CaughtUp(donor=None, replayed=replayed, snapshot_round=None), before)
        return True

    async def _follow_preferred(self, before: Position, chain: Sequence[Certificate]) -> bool:
        """Take the state that the chosen chain leads to; False if there is none, or its donor does not show it."""
        if (taken := self.claims.take()) is None:
            return False
        donor, chosen = taken
        reachable, others = self._directory.reachable, self.claims.helpers(donor)
        try:
            how = await self.fetcher.follow(donor, chosen, self.local_state(), self, others, list(reachable))
        except UndecidedError as error:
            log.info("%s", error)
            self.claims.undecided(donor)
        except ProtocolError as error:
            self.claims.accuse(donor, str(error))
        except (TimeoutError, StreamClosedError) as error:
            self.claims.left(donor, error)
        else:
            self.claims.answered(donor)
            self._report(how, before, given_up(chain, self._store.history.chain, self._node.peer_id))
            return True
        return False

    async def look_at_own_state(self) -> None:
        """After votes that differ: give the state up if two thirds of the round that led to it hold another one."""
        store = self._store
        if not store.valid or not store.history.chain:
            return
        link, own = store.history.chain[-1].link, await store.digest()
        members = members_of(link, self._directory.reachable)
        said = await self.fetcher.said(link, members, self._node.timing.voted_s, {self._node.peer_id: own})
        digest, count = most_named(said, link)
        words = f"{count} of the {len(link.roster)} members of round {link.round + 1} hold {str(digest)[:12]}"
        if count < quorum(len(link.roster)):
            if set(said.values()) != {own}:
                log.error("%s, this peer %s: it is unknown which is right", words, own[:12])
        elif digest != own:
            log.error("%s, this peer %s: it takes theirs", words, own[:12])
            await store.doubt()

    def _report(
        self, how: CaughtUp, before: Position, lost: GivenUp | None = None, source: str = "a donor that left"
    ) -> None:
        self.caught_up_at = self._node.clock()
        self._host.on_caught_up(before.round)
        reason = (
            f"replayed {how.replayed} rounds from {how.donor or source}"
            if how.snapshot_round is None
            else f"took the snapshot of round {how.snapshot_round} from {', '.join(how.chunks) or how.donor}; "
            f"left {before.lineage_id[:12]} at round {before.round}, unsent progress is kept"
        )
        now = self._store.position
        if lost is not None and lost.rounds:
            reason += f"; dropped {lost}: {now.weight} tokens, before {before.weight}"
        log.info("caught up to round %d: %s", now.round, reason)
        record = RoundRecord(
            status="caught_up", round=now.round, lineage_id=now.lineage_id, reason=reason, donor=how.donor,
            replayed=how.replayed if how.snapshot_round is None else None, snapshot_round=how.snapshot_round,
        )  # fmt: skip
        self._trainer.tell(RoundEnded(record=record))

    def carried(self, chain: Sequence[Certificate], judged: int = 0) -> Sequence[Certificate]:
        """See `ChainFollower`."""
        return self.claims.carried(chain, judged)

    async def adopt(self, path: Path, chain: Sequence[Certificate]) -> None:
        """See `ChainFollower`."""
        await self._store.adopt(path, chain)

    async def apply(self, update: AnyUpdate, certificate: Certificate) -> None:
        """See `ChainFollower`; a round that this peer's own contribution was in counts."""
        known, contributed = self.missed.contributed, self.missed.replaying(certificate)
        await self._store.apply(update, certificate, contributed)
        if known is None and contributed is not None:
            await self._host.on_counted()
