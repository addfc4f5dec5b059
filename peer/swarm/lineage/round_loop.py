"""The rounds of one peer: waits for contributions, runs rounds, catches up, keeps the shared state consistent."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Set
from dataclasses import replace
from functools import partial

from peer.link.memory import Head
from peer.link.messages import RoundEnded
from peer.outer.policy.staleness import Staleness
from peer.outer.record import RoundRecord
from peer.outer.round import Due, Exchanged, Group, RoundAborted, run_round
from peer.outer.state.outer_state import OuterState
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol.lineage import Certificate, Link
from peer.swarm.catchup.chain_scout import ChainRules
from peer.swarm.catchup.checkpoint_exchange import CheckpointExchange
from peer.swarm.catchup.fork_choice import ForkChoice
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.group.allotter import Allotter
from peer.swarm.group.matchmaking import Matchmaker
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.lineage.lookout import Lookout
from peer.swarm.lineage.retry import RetryPolicy
from peer.swarm.loop import RoundLoop, RunContext, read_directory
from peer.swarm.round.exchange import Exchange
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.round.strategy_choice import strategies_of
from peer.swarm.state.store import StateStore
from peer.swarm.trust.guard import guard_of

log = logging.getLogger(__name__)
MISSED_ROUNDS = 64
"""The newest of those that a peer has missed: who takes part now is in them."""


class LineageRounds(RoundLoop[StateStore]):
    """The rounds of a run with one lineage; implements the `SwarmPort` of `peer.outer.round`, and `LocalPeer`."""

    def __init__(self, context: RunContext, store: StateStore) -> None:
        node, directory, plan = context.node, context.directory, context.plan
        manifest, recipe, rule = plan.manifest, plan.recipe, plan.weight_rule
        super().__init__(context, store, called=recipe.votes is not None)
        allotter = Allotter(
            recipe, store.state.fragments, node.peer_id, manifest.tokens_per_step, lambda: self.slot.tokens_per_s,
            node.line.up_bytes_s if node.line is not None else 0.0,
        )  # fmt: skip
        self._rosters = rosters = RosterAuthority(
            node.identity, manifest.run_id, manifest.rounds, rule, lambda: store.history.seen, context.work, allotter
        )
        rosters.claims = plan.claim_rule
        self._guard = guard_of(node, directory, rosters, recipe, store, self)
        tokens_between = recipe.fewest_steps * manifest.tokens_per_step
        self._matchmaker = Matchmaker(node, directory, rosters, self, recipe.straggler, tokens_between)
        strategies = strategies_of(recipe, store.state.fragments, node.identity, lambda: store.history.chain)
        timeout_s = manifest.rounds.timeout_s
        self._exchange = Exchange(node, rosters, timeout_s, strategies, self._matchmaker.gathering, self._guard)
        self.checkpoints = NewestCheckpoint.of(store.history.folder, manifest, context.organiser)
        self._checkpoint_exchange = CheckpointExchange(node, manifest.run_id, self.checkpoints)
        rules = ChainRules.of(
            plan, self.checkpoints, self.control, node.peer_id, context.opened_at,
            node.timing.least_round_s(recipe.fewest_steps, manifest.rounds.straggler_wait_s),
        )  # fmt: skip
        self._fork_choice = ForkChoice(node, directory, manifest.run_id, rules, store, self, context.trainer)
        self._fork_choice.claims.scout.busy = self.taking_part
        self._retry = RetryPolicy(
            node, directory, self._matchmaker, self._fork_choice, self.slot, context.rng
        )
        self._staleness = Staleness(recipe.straggler, recipe.turns, recipe.num_fragments, plan.nominal_tokens)
        self._asynchronous, self._stood = recipe.straggler.asynchronous, False
        self._regrouped: str | None = None
        self._unsupported: frozenset[str] = frozenset()  # the last group, if others do not follow its rounds
        self._lookout = Lookout(node, directory, self._matchmaker.membership, self._fork_choice, context.rng)

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def client(self) -> bool:
        return self._node.client

    def persistent_members(self) -> frozenset[str]:
        return self._exchange.can_continue(self.position())

    def last_rosters(self, count: int) -> list[tuple[str, ...]]:
        return self.store.history.last_rosters(count)

    def followed(self, members: Set[str]) -> bool:
        return self._fork_choice.claims.scout.followed(members) or (
            bool(self._unsupported) and members >= self._unsupported
        )

    def newcomer(self, peer_id: str) -> bool:
        return self._rosters.newcomer(peer_id)

    def refuses(self, peer_id: str) -> bool:
        return self._guard.refuses(peer_id)

    def cost(self, peer_id: str, seconds: float) -> None:
        self._guard.cost(peer_id, seconds)

    def expects(self, group: Group) -> None:
        self._exchange.group_streams.expect(group)

    def decline(self, group: Group, abort: RoundAborted) -> None:
        if not isinstance(abort, StalledError) and abort.culprit is not None:  # else the others would blame this peer
            abort = StalledError(abort, Lack("stream", frozenset({abort.culprit})))
        self._exchange.group_streams.decline(group, abort)

    def on_return(self, peer_id: str) -> None:
        """This peer asks for what it has missed: the next round waits for it, before the directory hears of it."""
        self._matchmaker.announced(peer_id)

    def ahead(self) -> str | None:
        return next(iter(self._fork_choice.claims.donors()), None)

    def nudge(self, donor: str, lineage_id: str) -> None:
        self._fork_choice.claims.nudge(donor, lineage_id)
        self.slot.work.set()

    def on_caught_up(self, since: int) -> None:
        self._matchmaker.caught_up()
        chain = self.store.history.chain
        for certificate in chain[max(since, len(chain) - MISSED_ROUNDS) :]:
            self._guard.missed(certificate.signatures.keys())
            self._retry.missed(certificate.signatures.keys())

    def on_answer(self, donor: str) -> None:
        self._matchmaker.membership.seen(donor)

    def on_ahead(self) -> None:
        self.slot.work.set()

    async def on_counted(self) -> None:
        self._staleness.count(self.store.state.round)
        await self._exchange.counted()

    # -- joining -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._matchmaker.start()
        await self._exchange.start()
        await self._guard.start()
        await self._checkpoint_exchange.start()
        self._node.spawn(self._fork_choice.claims.scout_forever())

    async def join(self, resumed: Head | None) -> None:
        """Get a valid state no older than any heavier lineage in sight, and hand it to the trainer. A newcomer does not
        start from the beginning where the run was further, even if no peer is left that holds its state.
        """
        contributed = resumed.contributed if resumed is not None else None
        if await self._fork_choice.replay_own():
            contributed = None
        patience = self._node.clock() + self._node.timing.join_patience_s
        if newcomer := not self.store.history.chain:
            await self._checkpoint_exchange.introduce(self._context.introducers, self._fork_choice.claims.scout)
            await self._fork_choice.claims.ask_who_is_there(self._context.introducers)
        while True:
            await read_directory(self._node, self._directory, patience)
            if await self._fork_choice.catch_up():
                contributed = None
                if newcomer and self._fork_choice.claims.followed:
                    break
            elif (why := self._too_early()) is not None:
                log.warning("%s", why)
                await asyncio.sleep(self._node.timing.state_retry_s)
            elif self.store.valid:
                break
            elif not await self._fork_choice.fetch_genesis(self._context.organiser):
                await asyncio.sleep(self._node.timing.state_retry_s)
        self._staleness.join(self.store.state.round)
        self._enter(contributed, earlier=resumed is not None and self._has_contributed_since(resumed))

    def _has_contributed_since(self, resumed: Head) -> bool:
        """Whether rounds after this state, on this lineage, have this peer in them: its earlier life made those."""
        history = self.store.history
        if not history.leads_through(resumed.round, resumed.lineage_id):
            return False
        rosters = (certificate.link.roster for certificate in history.chain[resumed.round :])
        return any(member.peer_id == self._node.peer_id for roster in rosters for member in roster)

    def _too_early(self) -> str | None:
        """Why this peer, which has no link yet, must not begin the run."""
        if (start := self._fork_choice.claims.scout.start()) is None:
            return None
        return (
            f"the run was at round {start.round}, and no peer in sight shows a chain that leads there: this peer waits "
            "for one; if all have lost it, --resume-from-checkpoint continues from an older one, or the organiser "
            "starts a new run"
        )

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Rounds until the run ends or the peer leaves; its persistent group then ends at once for the others too."""
        try:
            await self._go_round()
        finally:
            await self._exchange.dissolve(RoundAborted("match", "this peer leaves"), tell=True)
            await self.store.written()

    async def _go_round(self) -> None:
        while not self.leaving and not self.finished:
            await self._wait_for_work()
            if self.finished:
                return
            if self.halted:
                why = "the run is paused" if self.control.paused else "this peer rests"
                await self._exchange.dissolve(RoundAborted("match", why), tell=True)
                await self._rest()
                continue
            if self._fork_choice.claims.donors():
                await self.slot.merged.wait()
                if await self._fork_choice.catch_up():
                    await self._exchange.dissolve(RoundAborted("match", "this peer caught up from elsewhere"))
                    self.slot.due = None
                    self.slot.announce_anchor(self._fork_choice.missed.contributed)
                    continue
            if not self.store.valid:
                await asyncio.sleep(self._node.timing.recheck_s)
            elif self.slot.due is not None:
                await self._one_round(self.slot.due)

    async def _wait_for_work(self) -> None:
        self.slot.work.clear()
        while not (self.slot.due or self._fork_choice.claims.donors() or self.halted or self.finished):
            await self._lookout.look_back()
            self._retry.settle()
            try:
                await asyncio.wait_for(self.slot.work.wait(), self._node.timing.recheck_s)
            except TimeoutError:
                continue
            self.slot.work.clear()

    async def _perform(self, due: Due) -> RoundRecord:
        try:
            rounds = self.store.state.round
            weighed = replace(due, tokens=self._staleness.weigh(due.tokens, rounds))
            record = await run_round(weighed, self.store.state, self)
        finally:
            self.store.snapshot_cache.priority.round_ends(self.store.hashing)
        update = {"stood": self._stood, "regrouped": self._regrouped, "audits": self._guard.notes()}
        return record.model_copy(update=update)

    async def _after(self, record: RoundRecord) -> None:
        if record.status == "committed":
            self._retry.committed()
            more = self.control.names_last_round
            self._leave_at = self._node.clock() + (self._last_round_s() if more else 0.0)
            self._directory.announce_soon()
        else:
            await self._retry.of(record)

    def _last_round_s(self) -> float:
        due_in_s = self.slot.due_in_s()
        longest_s = self._manifest.rounds.straggler_wait_s + self._node.timing.last_round_s
        return longest_s + (due_in_s if math.isfinite(due_in_s) else 0.0)

    def live_peers(self) -> Iterable[str]:
        return self._matchmaker.membership.there()

    def on_ban(self, culprit: str, reason: str) -> None:
        now = self.position()
        record = RoundRecord(
            status="banned", round=now.round, lineage_id=now.lineage_id, culprit=culprit, reason=reason
        )
        self._trainer.tell(RoundEnded(record=record))

    # -- the phases of a round ---------------------------------------------------------------------------------------

    async def match(self, due: Due) -> Group:
        """The persistent group's next round; through the directory if there is none, or others want in."""
        if (why := self._too_early()) is not None:
            raise RoundAborted("match", why, behind=True)
        position = self.position()
        members = self._exchange.can_continue(position)
        objection = self._guard.objection(members) or self._guard.second_thought(members)
        self._stood = bool(members) and objection is None and (
            self._exchange.most_wait() or not self._matchmaker.newcomers(members)
        )
        self._regrouped = None
        reason = objection or RoundAborted("match", "others want to take part")
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
        await self._lookout.look_around()
        group = await self._matchmaker.match(due)
        self._matchmaker.included(group)
        if self._exchange.group_streams.gave_up(group):
            late = RoundAborted("match", "the roster came too late: the others have given the round up", group.leader)
            self.decline(group, StalledError(late, Lack("roster", frozenset({group.leader}))))
            raise late
        if (objection := self._guard.objection(group.others, ", and has a seat in that group")) is not None:
            self._guard.meet(group.others)  # its leader does not know yet
            self.decline(group, objection)
            self._guard.stalls.seated(group.leader, str(objection.culprit))
            raise objection
        roster = frozenset({self._node.peer_id, *group.others})
        self._unsupported = frozenset() if self._fork_choice.claims.scout.followed(roster) else roster
        return group

    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged:
        self.store.snapshot_cache.priority.round_begins()
        self._fork_choice.missed.sending(state.lineage_id, due.sequence)
        return await self._exchange.exchange(group, due, state)

    async def digest(self) -> str:
        return await self.store.digest()

    async def commit(self, group: Group, link: Link) -> Certificate:
        return await self._exchange.commit(group, link)

    async def install(self, group: Group, update: AnyUpdate, certificate: Certificate, due: Due) -> None:
        await self.slot.merged.wait()
        await self.store.apply(update, certificate, due.sequence)
        self._staleness.count(self.store.state.round)
        self._matchmaker.committed(group)
        allotted = self._rosters.allot(group, self.store.state.round).steps
        steps = allotted[group.index] if allotted else None
        self.slot.announce_anchor(due.sequence, certificate.link.fragment, steps)

    async def release(self, group: Group, abort: RoundAborted | None) -> None:
        ends = self.leaving or self.finished or self._asynchronous  # a group that stays waits for all
        await self._exchange.release(group, abort, None if ends else self.position())
