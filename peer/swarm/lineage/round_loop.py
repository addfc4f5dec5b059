"""The rounds of one peer: waits for contributions, runs rounds, catches up, keeps the shared state consistent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from functools import partial

from peer.link.contribution_slot import ContributionSlot
from peer.link.memory import Head
from peer.link.messages import Progress, RoundEnded, Snapshot, ToTrainer
from peer.outer.policy.schedules import GradientChange
from peer.outer.recipe.resolve import run_recipe
from peer.outer.record import RoundRecord
from peer.outer.round import Due, Exchanged, Group, RoundAborted, run_round
from peer.outer.state.outer_state import AnyUpdate, OuterState
from peer.protocol.lineage import Certificate, Link, Position, RosterLimits
from peer.protocol.manifest import RunManifest
from peer.protocol.weights import WeightRule
from peer.swarm.catchup.fork_choice import ForkChoice
from peer.swarm.catchup.late_commits import NobodyAnsweredError, find_continuation
from peer.swarm.group.invites import LocalPeer
from peer.swarm.group.matchmaking import Matchmaker
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.lineage.retry import RetryPolicy
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.round.exchange import Exchange
from peer.swarm.state.store import StateStore
from peer.swarm.trust.guard import guard_of

log = logging.getLogger(__name__)
RECHECK_S = 0.5
LOOK_AROUND_S = 1.0  # those of the last group that are awake answer sooner
CAUGHT_UP_S = 2.0  # whoever has just caught up knows where the others are
JOIN_PATIENCE_S = 2.5  # a little more than the period of announcements


class LineageRounds:
    """One peer's rounds; implements the `SwarmPort` of `peer.outer.round`.

    Args:
        node, directory: the network and who is on it.
        manifest: the run.
        keeper: the outer state.
        organiser: peer id that serves the genesis state.
        nominal_tokens: tokens of a regular contribution.
        tell: sends a message to the trainer.
        rng: jitter only.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        manifest: RunManifest,
        store: StateStore,
        organiser: str,
        nominal_tokens: int,
        tell: Callable[[ToTrainer], None],
        rng: random.Random,
    ) -> None:
        self._node, self._directory, self._manifest = node, directory, manifest
        self.store = store
        self._organiser, self._tell = organiser, tell
        recipe = run_recipe(manifest)
        called = isinstance(recipe.schedule, GradientChange)
        self._slot = ContributionSlot(lambda: store.memory.snapshot, self.position, tell, called)
        rule = WeightRule.of(manifest.trust, nominal_tokens)
        rosters = RosterAuthority(node.identity, manifest.run_id, manifest.rounds, rule, lambda: store.history.seen)
        self._guard = guard_of(node, directory, manifest.run_id, recipe, store, self._on_ban)
        self._matchmaker = Matchmaker(
            node, directory, manifest.run_id, manifest.rounds, rosters, self._seen_by_itself(),
            refuses=self._guard.refuses,
            decline=lambda group, abort: self._exchange.group_streams.decline(group, abort),
        )  # fmt: skip
        self._exchange = Exchange(
            node, manifest.run_id, manifest.rounds.timeout_s, recipe, store.state.numel, rosters,
            self._matchmaker.gathering, self._guard, chain=lambda: store.history.chain,
        )  # fmt: skip
        limits = RosterLimits(manifest.rounds.min_group, manifest.rounds.max_group, rule)
        self._fork_choice = ForkChoice(
            node, directory, manifest.run_id, limits, store, self._matchmaker.caught_up, self._exchange.counted, tell,
            self._matchmaker.view.seen,
        )  # fmt: skip
        self._retry = RetryPolicy(
            node.peer_id, directory, self._matchmaker, self._fork_choice, self._slot, self._nudge, rng
        )
        self._stood = False
        self._regrouped: str | None = None
        self._looked_back = False
        self._reading: asyncio.Future[None] | None = None
        self._rng = rng
        self.joined = False
        self.leaving = False
        self.group_size = 0

    # -- what others see ---------------------------------------------------------------------------------------------

    def _seen_by_itself(self) -> LocalPeer:
        return LocalPeer(
            position=self.position,
            due_in_s=self._slot.due_in_s,
            halfway=self._slot.halfway,
            request_now=self._slot.request_now,
            training=self._taking_part,
            nudge=self._nudge,
            client=self._node.client,
            standing=lambda: self._exchange.can_continue(self.position()),
            called=self._slot.called,
        )

    def position(self) -> Position:
        return self.store.position

    @property
    def finished(self) -> bool:
        total = self._manifest.rounds.total
        return total is not None and self.store.state.round >= total

    def _taking_part(self) -> bool:
        return self.joined and not self.finished and not self.leaving

    # -- from the trainer --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress | None:
        return self._slot.progress

    def on_progress(self, progress: Progress) -> None:
        self._slot.on_progress(progress)

    def on_snapshot(self, message: Snapshot) -> None:
        self._slot.on_snapshot(message)

    def on_merged(self) -> None:
        self._slot.on_merged()

    def on_return(self, peer_id: str) -> None:
        """This peer asks for what it has missed: the next round waits for it, before the directory hears of it."""
        self._matchmaker.knock(peer_id)

    def _nudge(self, donor: str, weight: int, lineage_id: str) -> None:
        self._fork_choice.nudge(donor, weight, lineage_id)
        self._slot.work.set()

    # -- joining -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._matchmaker.start()
        await self._exchange.start()
        await self._guard.start()

    async def join(self, resumed: Head | None) -> None:
        """Get a valid state no older than any heavier lineage in sight, and hand it to the trainer."""
        contributed = resumed.contributed if resumed is not None else None
        patience = _now() + JOIN_PATIENCE_S
        while True:
            await self._directory.refresh()
            if not self._directory.peers and _now() < patience:
                await asyncio.sleep(RECHECK_S)  # records may lag behind a bootstrap that has just come back
                continue
            if await self._fork_choice.catch_up():
                contributed = None
            elif self.store.valid:
                break
            elif not await self._fork_choice.fetch_genesis(self._organiser):
                await asyncio.sleep(RECHECK_S * 4)
        self.joined = True
        self._slot.announce_anchor(contributed)
        self._directory.announce_soon()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Rounds until the run ends or the peer leaves; a group that stands then ends at once for the others too."""
        try:
            await self._go_round()
        finally:
            await self._exchange.dissolve(RoundAborted("match", "this peer leaves"), tell=True)
            await self.store.written()

    async def _go_round(self) -> None:
        while not self.leaving and not self.finished:
            await self._wait_for_work()
            if self._fork_choice.donors():
                await self._slot.merged.wait()
                if await self._fork_choice.catch_up():
                    await self._exchange.dissolve(RoundAborted("match", "this peer caught up from elsewhere"))
                    self._slot.due = None
                    self._slot.announce_anchor(self._fork_choice.missed.contributed)
                    continue
            if not self.store.valid:
                await asyncio.sleep(RECHECK_S)
            elif self._slot.due is not None:
                await self._one_round(self._slot.due)

    async def _wait_for_work(self) -> None:
        self._slot.work.clear()
        while self._slot.due is None and not self._fork_choice.donors():
            await self._look_back()
            self._retry.settle()
            try:
                await asyncio.wait_for(self._slot.work.wait(), RECHECK_S)
            except TimeoutError:
                continue
            self._slot.work.clear()

    async def _one_round(self, due: Due) -> None:
        sent, received = self._traffic()
        self._slot.begin_round()
        try:
            record = await run_round(due, self.store.state, self)
        finally:
            self.store.snapshot_cache.priority.round_ends(self.store.hashing)
            self._slot.release(due)
        now_sent, now_received = self._traffic()
        traffic = {"bytes_sent": now_sent - sent, "bytes_received": now_received - received}
        record = record.model_copy(update={**traffic, "stood": self._stood, "regrouped": self._regrouped})
        record = record.model_copy(update={"audits": self._guard.notes()})
        self._tell(RoundEnded(record=record))
        if record.status == "committed":
            self._retry.committed()
            self.group_size = len(record.members)
            self._directory.announce_soon()
        else:
            await self._retry.of(record)

    def _on_ban(self, culprit: str, reason: str) -> None:
        now = self.position()
        record = RoundRecord(
            status="banned", round=now.round, lineage_id=now.lineage_id, culprit=culprit, reason=reason
        )
        self._tell(RoundEnded(record=record))

    # -- the phases of a round ---------------------------------------------------------------------------------------

    async def match(self, due: Due) -> Group:
        """The standing group's next round; through the directory if there is none, or others want in."""
        position = self.position()
        members = self._exchange.can_continue(position)
        banned = sorted(filter(self._guard.banned, members))
        self._stood = bool(members) and not banned and not self._matchmaker.newcomers(members)
        self._regrouped = None
        reason = RoundAborted("match", f"{banned[0]} is banned" if banned else "others want to take part")
        if self._stood:
            try:
                newcomer = partial(self._matchmaker.newcomer, members)
                return await self._exchange.next_round(
                    due, self.store.state, position, self._matchmaker.patience_s, newcomer
                )
            except RoundAborted as abort:
                log.info("the group ends: %s", abort.reason)
                reason, self._stood = abort, False
        if members:
            self._regrouped = reason.reason
        await self._exchange.dissolve(reason)
        await self._look_around()
        group = await self._matchmaker.match(due)
        self._matchmaker.included(group)
        for peer_id in filter(self._guard.banned, group.others):
            self._guard.meet(group.others)  # its leader does not know yet
            declined = RoundAborted("match", f"{peer_id} is banned, and has a seat in that group", peer_id)
            self._exchange.group_streams.decline(group, declined)
            raise declined
        return group

    async def _look_back(self) -> None:
        """Ask the last group once whether it went on, where this machine has slept, or has lost the others."""
        looked, self._looked_back = self._looked_back, not self._directory.fresh
        if self._looked_back and not looked:
            await self._ask_company()

    async def _ask_company(self) -> None:
        """Ask the last group whether it went on: it knows first. To read the directory takes seconds where one of the
        DHT's nodes sleeps.
        """
        if not self.store.valid or _now() < self._fork_choice.caught_up_at + CAUGHT_UP_S:
            return
        others, following = self._matchmaker.view.company, self._fork_choice
        with contextlib.suppress(NobodyAnsweredError):
            missed = await find_continuation(following.fetcher, others, following.standing, self._rng, LOOK_AROUND_S)
            if missed is not None:
                self._nudge(*missed)

    async def _look_around(self) -> None:
        """Raise RoundAborted where this machine has slept and others are ahead: where it was it would find only those
        who sleep as well, and wait at one of them. Nobody who has a group to go on with waits for the directory.
        """
        if self._directory.peers and self._directory.fresh:
            return
        await self._ask_company()
        if not self._fork_choice.donors():
            if company := self._matchmaker.view.company:  # they may be there, whoever else the directory still shows
                if self._reading is None or self._reading.done():
                    self._reading = self._node.spawn(self._directory.refresh())
                for peer_id in company:
                    self._matchmaker.view.expect(peer_id)
            elif not self._directory.peers:
                await self._directory.refresh()
        if donors := self._fork_choice.donors():
            raise RoundAborted("match", f"{donors[0]} is on a heavier lineage", donors[0], behind=True)

    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged:
        self.store.snapshot_cache.priority.round_begins()
        self._fork_choice.missed.sending(state.lineage_id, due.sequence)
        return await self._exchange.exchange(group, due, state)

    async def digest(self) -> str:
        return await self.store.digest()

    async def commit(self, group: Group, link: Link) -> Certificate:
        return await self._exchange.commit(group, link)

    async def install(self, group: Group, update: AnyUpdate, certificate: Certificate, due: Due) -> None:
        await self._slot.merged.wait()
        await self.store.apply(update, certificate, due.sequence)
        self._matchmaker.committed(group)
        self._slot.announce_anchor(due.sequence)

    async def release(self, group: Group, abort: RoundAborted | None) -> None:
        await self._exchange.release(group, abort, None if self.leaving or self.finished else self.position())

    def _traffic(self) -> tuple[int, int]:
        traffic = self._node.traffic["round"]
        return traffic.sent, traffic.received


def _now() -> float:
    return asyncio.get_running_loop().time()
