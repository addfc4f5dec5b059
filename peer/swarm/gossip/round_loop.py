"""The gossip rounds of one peer: no shared anchor, no lineage; each peer has a state of its own.

Rounds are numbered. In round r a peer averages with the group that the topology draws from the live records that it
sees. A member that does not join, sees another group, or fails half-way costs the others a bounded wait: they make the
round without it, or alone, as the simulator's peers do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from peer.link.memory import Head
from peer.link.messages import RoundEnded
from peer.outer.compress.base import Payload
from peer.outer.recipe.validation import LEAST_TO_JUDGE
from peer.outer.record import RoundRecord
from peer.outer.round import Due, RoundAborted
from peer.protocol.manifest import MAX_ROUNDS
from peer.protocol.wire import GossipJoin, roster_digest
from peer.swarm.gossip.exchange import Frame, GossipExchange
from peer.swarm.gossip.frames import Frames
from peer.swarm.gossip.group_draw import GroupDraw, round_after
from peer.swarm.gossip.inbox import GossipInboxes
from peer.swarm.gossip.initial_state import InitialState
from peer.swarm.gossip.line_meter import LineMeter
from peer.swarm.gossip.mixing import Mixing, Mixture
from peer.swarm.gossip.outcome import GossipOutcome
from peer.swarm.gossip.store import LocalStateStore
from peer.swarm.group.invites import LAST_CALL
from peer.swarm.loop import RoundLoop, RunContext
from peer.swarm.round.deadline import DeadlineEstimator

log = logging.getLogger(__name__)
MANY_ALONE = 5  # rounds in a row that a person should hear of
TRIES = 3  # at later and later rounds, when a group is past the one before


class GossipRounds(RoundLoop[LocalStateStore]):
    """One peer's rounds where the recipe's topology is not `all`."""

    def __init__(self, context: RunContext, store: LocalStateStore) -> None:
        super().__init__(context, store)
        node, manifest, recipe = context.node, context.plan.manifest, context.plan.recipe
        self._mixings = [Mixing(recipe, store.state, index) for index in range(len(store.state.fragments))]
        self._rule = context.plan.weight_rule
        self._meter = LineMeter(node, context.directory, context.rng)
        self._measures = recipe.topology.measures
        measured = self._meter.links if self._measures else None
        self._draw = GroupDraw(recipe.topology, manifest.seed, manifest.run_id, node.peer_id, measured)
        self._initial_state = InitialState(context, store, self.control)
        self.patience_s = manifest.rounds.straggler_wait_s + self._node.timing.gossip_answer_s
        self._budget = DeadlineEstimator(manifest.rounds.timeout_s, self._node.timing.min_exchange_s)
        longest_s = 2 * self.patience_s + manifest.rounds.timeout_s
        self._inboxes = GossipInboxes(node, manifest.run_id, self, longest_s)
        self._heard: dict[str, int] = {}
        self._fewest = LEAST_TO_JUDGE if recipe.aggregator.robust else 2
        self._called_for = 0
        self._alone_in_row = 0

    @property
    def _last_round(self) -> int:
        return self.control.rounds_total or MAX_ROUNDS

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def lines(self) -> str:
        return self._meter.said

    def on_return(self, peer_id: str) -> None:
        """Nothing to do for a peer that was away: there is no chain, and groups are drawn from the records."""

    def knows(self, peer_id: str) -> bool:
        return peer_id in self._directory.peers

    def on_join(self, join: GossipJoin, remote: str) -> None:
        """Another peer is ready for this peer's next round: contribute within the straggler window."""
        self._hear(remote, join.round - 1)
        if not self._called_for < join.round <= self._next_round() + 1:
            return
        if join.roster != self._drawn(join.round):
            return  # only members of this peer's group set its pace, and they once a round
        self._called_for = join.round
        window_s = self._manifest.rounds.straggler_wait_s
        if self.slot.due_in_s() > window_s and self.slot.halfway():
            self.slot.request_now()
        asyncio.get_running_loop().call_later(LAST_CALL * window_s, self._hurry_for, join.round)

    def _hear(self, peer_id: str, round: int) -> None:
        """A peer says that this is its last round; its record may be older by seconds."""
        self._heard = {p: heard for p, heard in self._heard.items() if p in self._directory.peers}
        if peer_id in self._directory.peers:
            self._heard[peer_id] = round

    def _hurry_for(self, round: int) -> None:
        if self.taking_part() and self.position().round < round:
            self.slot.request_now()

    # -- joining -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._inboxes.start()
        await self._initial_state.serve()
        if self._measures:
            self._node.spawn(self._meter.run(), essential=True)

    async def join(self, resumed: Head | None) -> None:
        """Take another peer's state unless this one has its own, and hand it to the trainer."""
        resumes = resumed is not None and resumed.round > 0
        await self._initial_state.start(resumes)
        same = resumed is not None and resumed.state_digest == self.position().lineage_id
        self._enter(resumed.contributed if resumed is not None and same else None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Rounds until the run ends or the peer leaves."""
        while not self.leaving and not self.finished:
            self.slot.work.clear()
            if self.halted:
                await self._rest()
            elif self.slot.due is None:
                await self.slot.work.wait()
            elif 1 + len(self._live()) < self._manifest.rounds.min_group:
                await self._wait_for_peers(self.slot.due)
            else:
                await self._one_round(self.slot.due)

    async def _after(self, record: RoundRecord) -> None:
        if record.status == "committed":
            self._alone_in_row = self._alone_in_row if self.group_size == 1 else 0
        else:
            self.slot.want_snapshot()
        self._directory.announce_soon()
        if record.phase == "match":
            self._node.spawn(self._directory.refresh())  # a peer may have joined or left

    async def _perform(self, due: Due) -> RoundRecord:
        """Make a round with the drawn group, with those of it that join, or alone; afterwards the state has changed."""
        mixing = self._mixing
        mixing.accelerate(self._next_round() - self.position().round, 1 + len(self._live()))
        began, frames = self._node.clock(), Frames(mixing, due.snapshot)
        try:
            outcome = await self._mix(due, frames)
        except RoundAborted as abort:  # this peer's own parameters are not finite
            await frames.ended(mixing.revert)
            return RoundRecord(
                status="aborted", round=self._next_round(), lineage_id=self.position().lineage_id, phase=abort.phase,
                reason=abort.reason, instead="retry", seconds={"total": self._node.clock() - began},
            )  # fmt: skip
        await self.slot.merged.wait()
        await frames.ended(mixing.applied)
        await self.store.apply(outcome.mixture.apply, outcome.round, due.sequence)
        self._inboxes.moved(outcome.round)
        self.slot.announce_anchor(due.sequence, mixing.fragment)
        seconds = {**outcome.seconds, "total": self._node.clock() - began}
        return outcome.record(self._manifest.run_id, self.position().lineage_id, seconds)

    async def _mix(self, due: Due, frames: Frames) -> GossipOutcome:
        """With the drawn, or alone when that fails. Raises RoundAborted if even that does."""
        failed: RoundAborted | None = None
        number = self._next_round()
        drawn = self._drawn(number)
        for _ in range(TRIES):
            if len(drawn) == 1:
                break
            try:
                return await self._meet(number, drawn, due, frames)
            except RoundAborted as abort:
                failed = abort
            following = self._of_fragment(max(number + 1, self._next_round()))
            if not failed.behind or following <= number:
                break
            number, drawn = following, self._drawn(following)
        if failed is not None:
            log.info("round %d alone: %s", number, failed.reason)
        self._count_alone(number, failed)
        return await self._alone(number, drawn, due, frames, failed if len(drawn) > 1 else None)

    def _count_alone(self, number: int, failed: RoundAborted | None) -> None:
        self._alone_in_row += 1
        if self._alone_in_row % MANY_ALONE == 0:
            why = failed.reason if failed is not None else "no other peer is live"
            log.warning("averaged with no peer in the last %d rounds, up to %d: %s", self._alone_in_row, number, why)

    async def _alone(
        self, number: int, drawn: tuple[str, ...], due: Due, frames: Frames, failed: RoundAborted | None
    ) -> GossipOutcome:
        """This peer's own contribution is the mean of all that there is."""
        members = (self._node.peer_id,)
        weights = self._weigh([(self._node.peer_id, due.tokens)])
        mixture = self._mixing.begin(number, members, weights, 0, due.snapshot)
        for index, (start, stop) in enumerate(self._mixing.slices):
            await asyncio.to_thread(mixture.take, start, stop, [await frames.frame(number, index)])
        if failed is None:
            return GossipOutcome(number, drawn, members, weights, mixture)
        return GossipOutcome(number, drawn, members, weights, mixture, failed.phase, failed.reason, failed.culprit)

    async def _meet(self, number: int, drawn: tuple[str, ...], due: Due, frames: Frames) -> GossipOutcome:
        """Make a round with the drawn members that join. Raises RoundAborted."""
        if len(drawn) < self._fewest:
            raise RoundAborted("match", f"{len(drawn)} were drawn: too few for the aggregator to judge")
        run_id = self._manifest.run_id
        self._inboxes.moved(number - 1)
        digest = roster_digest(run_id, number, drawn)
        join = GossipJoin(run_id=run_id, round=number, roster=drawn, digest=digest, tokens=due.tokens)
        exchange, whole = GossipExchange(self._node, self._inboxes, join, self._mixing.sizes, self._hear), False
        began = self._node.clock()
        try:
            members = await exchange.members(self.patience_s, self._fewest)
            matched = self._node.clock()
            weights = self._weigh([(peer_id, exchange.tokens(peer_id)) for peer_id in members])
            me = members.index(self._node.peer_id)
            mixture = self._mixing.begin(number, members, weights, me, due.snapshot)
            await self._exchange(exchange, members, mixture, partial(frames.frame, number))
            whole = True
        finally:
            await exchange.close(whole)
        seconds = {"match": matched - began, "exchange": self._node.clock() - matched}
        absent = exchange.absent
        if not absent:
            return GossipOutcome(number, drawn, members, weights, mixture, seconds=seconds)
        why, culprit = "; ".join(absent.values()), next(iter(absent))
        return GossipOutcome(number, drawn, members, weights, mixture, "match", why, culprit, seconds)

    async def _exchange(
        self, exchange: GossipExchange, members: tuple[str, ...], mixture: Mixture, frame: Frame
    ) -> None:
        async def take(index: int, payloads: Sequence[Payload]) -> None:
            await asyncio.to_thread(mixture.take, *self._mixing.slices[index], payloads)

        clock = asyncio.get_running_loop().time  # that of the timer which ends the exchange
        wire_bytes, began = len(members) * sum(self._mixing.sizes), clock()
        timeout_s = self._budget.seconds(wire_bytes)
        self.store.snapshot_cache.priority.round_begins()
        try:
            await exchange.exchange(members, frame, take, timeout_s)
        except RoundAborted:
            if clock() - began >= timeout_s:
                self._budget.allow_longer(wire_bytes)
            raise
        finally:
            self.store.snapshot_cache.priority.round_ends()
        self._budget.learn(wire_bytes, clock() - began)

    async def _wait_for_peers(self, due: Due) -> None:
        """Too few peers are live for any round: train on until another appears, then contribute all of it."""
        few, needed = 1 + len(self._live()), self._manifest.rounds.min_group
        record = RoundRecord(
            status="aborted", round=self._next_round(), lineage_id=self.position().lineage_id, phase="match",
            reason=f"{few} of at least {needed} peers", alone=True, instead="wait",
        )  # fmt: skip
        self._trainer.tell(RoundEnded(record=record))
        while 1 + len(self._live()) < needed and not self.leaving:
            await asyncio.sleep(self._node.timing.recheck_s)
        self.slot.release(due)
        self.slot.want_snapshot()

    def _live(self) -> list[str]:
        """Whose signed records say that they train, as far as the directory has heard."""
        return sorted(peer_id for peer_id, record in self._directory.peers.items() if record.state == "training")

    def _next_round(self) -> int:
        peers = self._directory.peers
        rounds = [max(record.round, self._heard.get(p, 0)) for p, record in peers.items() if record.state == "training"]
        possible = [round for round in rounds if round <= MAX_ROUNDS]
        return self._of_fragment(round_after(self.position().round, possible, self._last_round))

    def _of_fragment(self, number: int) -> int:
        """The first round from this one on that is of the fragment which this peer's next is of, if the run has it."""
        own, turns = self.position().round, self.store.state.fragments.turns
        while turns(number - 1).fragment != turns(own).fragment:
            number += 1
        return number if number <= self._last_round else min(own + 1, self._last_round)

    def _drawn(self, number: int) -> tuple[str, ...]:
        """The group of this peer in a round. Each fragment has its own draws: a grid's axes follow each other in it."""
        return self._draw.group(self.store.state.fragments.turns(number - 1).rounds + 1, self._live())

    @property
    def _mixing(self) -> Mixing:
        """What the next round is made with."""
        return self._mixings[self.store.state.fragments.turns(self.position().round).fragment]

    def _weigh(self, claims: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        return tuple(self._rule.weigh(claims, {}))
