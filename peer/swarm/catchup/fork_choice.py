"""Fork choice: keeps a peer on the heaviest lineage in sight, by replay or by a snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from peer.errors import ProtocolError, in_words
from peer.link.channel import TrainerLink
from peer.link.messages import RoundEnded
from peer.outer.record import RoundRecord
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol.chain import GivenUp, given_up, shared_links
from peer.protocol.fork_choice import ForkVerdict
from peer.protocol.lineage import Certificate, Position, quorum
from peer.swarm.catchup.chain_scout import ChainRules, ChainScout, NoRoomError, NothingNewError
from peer.swarm.catchup.donors import DonorQueue, LocalState, helpers
from peer.swarm.catchup.genesis import fetch_genesis
from peer.swarm.catchup.history_client import CaughtUp, HistoryClient, replay
from peer.swarm.catchup.late_commits import LateCommits
from peer.swarm.catchup.patience import Patience
from peer.swarm.catchup.tip_agreement import UndecidedError, members_of, most_named
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError, StreamTimeoutError
from peer.swarm.runtime.expiring import ExpiringSet
from peer.swarm.runtime.tasks import cancel_and_wait, staggered
from peer.swarm.state.store import StateStore

log = logging.getLogger(__name__)
LOOKS_AT_ONCE = 4
OF_STRANGERS = 3
"""Looks at peers that have no say here: those that have one find a place however many strangers are silent."""
MEMBERS_OF = 32  # rounds
LINKS_A_SECOND = 100.0  # links of a donor that are turned down: to verify one takes some two milliseconds
DONOR_FAILURES = (TimeoutError, ProtocolError, StreamClosedError, NoRoomError)


class CatchUpHost(Protocol):
    """The peer that catches up; `LineageRounds` implements it."""

    def on_caught_up(self, since: int) -> None:
        """The state has changed; it was that of so many rounds, perhaps of another branch."""

    def on_answer(self, donor: str) -> None:
        """This donor answers."""

    def on_ahead(self) -> None:
        """A chain has been looked at that this peer shall follow."""

    async def on_counted(self) -> None:
        """A round that this peer gave up turns out to contain its contribution."""


class ForkChoice:
    """The donors of one peer.

    Args:
        run_id, rules: the run, and which chains it allows and prefers.

    Attributes:
        caught_up_at: when it last did, by the node's clock.
    """

    def __init__(
        self, node: Node, directory: Directory, run_id: str, rules: ChainRules, store: StateStore,
        host: CatchUpHost, trainer: TrainerLink,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._store = node, directory, store
        self._host, self._trainer = host, trainer
        self._queue = DonorQueue()
        self._turned_down: ExpiringSet[str] = ExpiringSet(node.clock, node.timing.not_heavier_s)
        self.fetcher = HistoryClient(node, run_id, store.history.folder, rules.limits, self._accuse)
        self.scout = ChainScout(self.fetcher.requests, run_id, rules, store.history)
        self.missed = LateCommits(node.peer_id)
        self.caught_up_at = float("-inf")
        self._preferred: tuple[str, Sequence[Certificate]] | None = None
        self._patience = Patience(node.timing, node.clock, store.position)

    def local_state(self) -> LocalState:
        """What this peer has."""
        store = self._store
        return LocalState(state=store.state, history=store.history, valid=store.valid, digest=store.digest)

    def donors(self) -> list[str]:
        """The donor whose chain has been looked at, and that this peer shall follow; empty if there is none."""
        if self._preferred is not None and not self._follows(self._preferred[1]):
            self._preferred = None
        return [] if self._preferred is None else [self._preferred[0]]

    async def ask_who_is_there(self, introducers: Iterable[str]) -> None:
        """Ask the peers whose addresses a person gave for the members of the last rounds: a newcomer asks these before
        strangers. The answer proves nothing, but a person has chosen who gives it.
        """
        start = self.scout.start()
        since = max(0, start.round - MEMBERS_OF) if start is not None else 0
        for introducer in introducers:
            self._queue.preferred.add(introducer)
            with contextlib.suppress(*DONOR_FAILURES):
                async with asyncio.timeout(self._node.timing.checkpoint_answer_s):
                    links = await self.fetcher.requests.links(introducer, since, 2 * MEMBERS_OF)
                self._queue.preferred.update(*(certificate.signatures for certificate in links))

    @property
    def followed(self) -> bool:
        """Whether this peer has a state, and no peer with a say here claims to be further: what strangers claim keeps
        no newcomer from its first round.
        """
        has_say, valid = self.scout.has_say, self._store.valid and bool(self._store.history.chain)
        return valid and self.scout.start() is None and not any(map(has_say, self._claims()))

    def turned_down(self, donor: str) -> bool:
        """Whether this donor has shown another chain in the last seconds, and this peer does not follow it."""
        return donor in self._turned_down

    def nudge(self, donor: str, lineage_id: str) -> None:
        """`donor` claims to be on this lineage, whatever the directory shows: the scout looks at it next."""
        if not self._store.history.leads_through_id(lineage_id):
            self._queue.nudge(donor)

    def offer(self, donor: str, chain: Sequence[Certificate]) -> bool:
        """A donor's chain from genesis, checked: this peer follows what holds of it, if the rule says so."""
        chain = self.carried(chain)
        if self._follows(chain):
            self._preferred = donor, chain
            self._host.on_ahead()
            return True
        return False

    def carried(self, chain: Sequence[Certificate], judged: int = 0) -> Sequence[Certificate]:
        """What holds of a chain; after a long time without a round, all of it."""
        return chain if self._patience.over else self.scout.carried(chain, judged)

    async def look_around(self) -> None:
        """Look at a few of the chains that others claim; `donors` keeps the outcome."""
        looks = [self._examine(donor) for donor in self._claims()[:LOOKS_AT_ONCE]]
        for outcome in await asyncio.gather(*looks, return_exceptions=True):
            _raise_unexpected(outcome)

    async def scout_forever(self) -> None:
        """Look at what others claim, beside the rounds, until this is cancelled; a silent donor holds up no other."""
        looks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._queue.begin()
                for donor in self._claims():
                    most = LOOKS_AT_ONCE if self.scout.has_say(donor) else OF_STRANGERS
                    if donor not in looks and len(looks) < most:
                        looks[donor] = asyncio.create_task(self._examine(donor))
                await self._queue.wait(self._node.timing.recheck_s)
                for donor in [donor for donor, look in looks.items() if look.done()]:
                    look = looks.pop(donor)
                    _raise_unexpected(None if look.cancelled() else look.exception())
        finally:
            await cancel_and_wait(looks.values())

    def _claims(self) -> list[str]:
        self._patience.look(self._store.position)
        claims = self.scout.claims(self._directory.reachable, self._queue.distrusted, lost=not self._store.valid)
        return self._queue.order(claims, self.scout.has_say)

    async def _examine(self, donor: str) -> None:
        """Look at one claim; `donors` keeps the outcome. A claim that is not shown is not looked at for a while."""
        self._queue.taken(donor)
        try:
            chain = await self._look(donor)
        except NothingNewError:  # this peer has moved since it chose to look
            self._queue.distrust(donor, self._node.timing.not_heavier_s)
            raise
        except ProtocolError as error:
            self._accuse(donor, str(error))
            raise
        except NoRoomError as error:  # no fault of the donor
            log.warning("%s", error)
            self._queue.distrust(donor, self._node.timing.not_heavier_s)
            raise
        except (TimeoutError, StreamClosedError) as error:
            self._left(donor, error)
            raise
        self._host.on_answer(donor)
        if not self.offer(donor, chain):
            new, timing = len(chain) - shared_links(self._store.history.chain, chain), self._node.timing
            self._queue.distrust(donor, max(timing.not_heavier_s, min(timing.distrust_s, new / LINKS_A_SECOND)))
            if new:  # else it may be ahead a moment later
                self._turned_down.add(donor)

    def _left(self, donor: str, error: Exception) -> None:
        log.info("donor %s left: %s", donor, in_words(error))
        # its record stays for a while: asking again would spin
        timing = self._node.timing
        if isinstance(error, TimeoutError | StreamTimeoutError):
            self._queue.distrust_silent(donor, timing.silent_donor_s, timing.distrust_s)
        else:
            self._queue.distrust(donor, timing.unreachable_s)

    async def _look(self, donor: str) -> Sequence[Certificate]:
        record = self._directory.reachable.get(donor)
        return await self.scout.look(donor, record.round if record is not None else 0)

    def _follows(self, chain: Sequence[Certificate]) -> bool:
        """Whether this peer leaves its chain for another one, as both stand now."""
        own = self._store.history.chain
        if not self._store.valid and own and chain and own[-1].link.id == chain[-1].link.id:
            return True  # the same chain, whose state this peer has lost
        verdict = self.scout.judge(chain)
        return verdict is ForkVerdict.FOLLOW or (verdict is ForkVerdict.WEIGHTLESS and self._patience.over)

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
            return self._claims() if clock() < until else []

        if await self._follow_preferred(before, chain):
            return True
        calls = staggered(names, self._examine, timing.next_donor_s, timing.recheck_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s) as patience, contextlib.aclosing(calls) as answers:
                async for _, answer in answers:
                    if answer.exception() is None and self.donors():
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
        if not self.donors():
            return False
        assert self._preferred is not None
        (donor, chosen), self._preferred = self._preferred, None
        reachable = self._directory.reachable
        others = helpers(reachable, donor, self._queue.distrusted)
        try:
            how = await self.fetcher.follow(donor, chosen, self.local_state(), self, others, list(reachable))
        except UndecidedError as error:
            log.info("%s", error)
            self._queue.distrust(donor, self._node.timing.not_heavier_s)
        except ProtocolError as error:
            self._accuse(donor, str(error))
        except (TimeoutError, StreamClosedError) as error:
            self._left(donor, error)
        else:
            self._queue.answered(donor)
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

    def _accuse(self, donor: str, why: str) -> None:
        log.warning("%s cannot be a donor: %s", donor, why)
        self._queue.distrust(donor, self._node.timing.distrust_s)

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

    async def adopt(self, path: Path, chain: Sequence[Certificate]) -> None:
        """See `ChainFollower`."""
        await self._store.adopt(path, chain)

    async def apply(self, update: AnyUpdate, certificate: Certificate) -> None:
        """See `ChainFollower`; a round that this peer's own contribution was in counts."""
        known, contributed = self.missed.contributed, self.missed.replaying(certificate)
        await self._store.apply(update, certificate, contributed)
        if known is None and contributed is not None:
            await self._host.on_counted()


def _raise_unexpected(outcome: BaseException | None) -> None:
    """Raise what a look at a donor has raised, unless that look may fail so."""
    if isinstance(outcome, Exception) and not isinstance(outcome, DONOR_FAILURES):
        raise outcome
