"""`SwarmSync`: the training loop's view of the swarm. Hands over snapshots, merges anchors, never blocks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from peer.link.agent_connection import AgentConnection
from peer.link.ledger import ContributionLedger
from peer.link.limits import ENDED, Limits
from peer.link.local_anchor import LocalAnchor
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Leased, LivePeers, Merged, Message, Saved, Steered, WantSnapshot
from peer.link.shared_data import DataPort, NothingShared
from peer.link.supervisor import AgentGoneError
from peer.link.tally import StepReport, TrainingTally
from peer.link.transfer import Pending
from peer.outer.policy.regular import Event, Regular
from peer.protocol.ranges import Range
from peer.system.clock import Clock

log = logging.getLogger(__name__)
LEASE_WAIT_S = 2.0  # before the first step
PAUSE_POLL_S = 0.5
HOPELESS_STEPS = 10  # skipped in a row: parameters that are finite and yield no finite loss


class SwarmSync:
    """Implements the `Sync` of `peer.train.loop` over an agent process.

    Args:
        local: the local parameters, and the anchor that they were trained from.
        on_message: called with every message that the trainer's side wants to see (rounds, swarm, saved).
        clock: monotonic seconds.
        on_drop: called when local progress was dropped: the inner optimizer's moments are of other parameters.

    Attributes:
        rounds_contributed: rounds that hold a contribution of this process.
        swarm_tokens: of all peers, committed up to the anchor of `round`.
        drops: how often local progress was dropped.
        data: what this peer reads of the data that peers share out.
        paused: by the organiser: no step is made.
        expelled: why this peer is no longer invited; empty: it is.
    """

    def __init__(
        self, agent: AgentConnection, local: LocalAnchor, schedule: Regular, limits: Limits,
        on_message: Callable[[Message], None], clock: Clock = time.monotonic,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.agent, self._local, self.schedule, self.limits = agent, local, schedule, limits
        self._on_message, self._on_drop = on_message, on_drop
        self._tally, self._ledger = TrainingTally(clock), ContributionLedger(local.fragments)
        self._held: Anchor | None = None  # until it is time to merge it
        self._merge_at = self.rounds_contributed = self.swarm_tokens = 0
        self._allotted: int | None = None  # steps from one merge to the next contribution
        self._merged_at = 0
        self._reading, self._merging = Pending(), Pending()
        self._resumed = False
        self._bad_steps = self.drops = self._fresh_since = 0
        self.data: DataPort = NothingShared()
        self.paused, self.expelled = False, ""

    def begin(self, anchor: Anchor) -> None:
        """Take the first anchor of this process: as the local parameters, or after `resume` under the resumed ones.
        Progress that those hold is dropped where an earlier life has contributed since: the anchor has most of it.
        """
        self._tally.begin()
        self._allotted, self._merged_at = anchor.steps, self.step
        if self._resumed:
            self._merge(anchor)
            self._settle_transfers()
            if anchor.earlier:
                lost = max(self._ledger.all_unsent(self.tokens))
                log.info("rounds after the checkpoint hold what this peer had trained: dropping %d tokens", lost)
                self._local.drop(self._sent_parameters)
                self._ledger.drop(self.tokens)
            return
        self._local.take(anchor.round)
        self.swarm_tokens = anchor.swarm_tokens // self._local.fragments
        self.agent.send(Merged(round=anchor.round))

    def resume(self, progress: Mapping[str, Any], tensors: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Continue from `progress()` and `tensors()` of an earlier process. The shared anchor must be the resumed one,
        the replica the resumed parameters, and no agent may have changed the anchor yet.
        """
        if beside := self._local.beside:
            beside.resume(**tensors)
        self._local.keep(progress["round"])
        self._tally.resume(progress["step"], progress["tokens"])
        self._ledger.resume(progress["steps_since_snapshot"], self.tokens, progress["unsent_tokens"])
        self._ledger.used.add(Range(*parts) for parts in progress.get("pending_data", ()))
        self._resumed = True

    def progress(self) -> dict[str, Any]:
        """What a checkpoint must remember of this object."""
        return {
            "round": self.round, "step": self.step, "tokens": self.tokens,
            "steps_since_snapshot": self.steps_since_snapshot, "unsent_tokens": self._ledger.all_unsent(self.tokens),
            "pending_data": [list(parts) for parts in self._ledger.used.pending],
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must remember beside the parameters."""
        return {} if self._local.beside is None else self._local.beside.tensors()

    @property
    def memory(self) -> SharedState:
        """What this process shares with its agent."""
        return self._local.memory

    @property
    def round(self) -> int:
        """Of the newest anchor that this process has merged."""
        return self._local.round

    @property
    def anchor(self) -> Tensor:
        """The anchor of `round`, fp32 [P]; a copy of this process that stays as it is until the next merge."""
        return self._local.base

    @property
    def result(self) -> Tensor:
        """What the run yields at `round`, fp32 [P]: to evaluate and to export. Usually the anchor."""
        return self._local.result

    @property
    def step(self) -> int:
        return self._tally.step

    @property
    def tokens(self) -> int:
        return self._tally.tokens

    @property
    def tokens_per_s(self) -> float:
        return self._tally.tokens_per_s

    @property
    def steps_since_fresh(self) -> int:
        """Since the inner optimizer had no moments: steps of this process, or since its progress was dropped."""
        return self._tally.steps_since_join - self._fresh_since

    @property
    def seconds_waiting(self) -> float:
        return self._tally.seconds_waiting

    @property
    def longest_wait_s(self) -> float:
        return self._tally.longest_wait_s

    @property
    def steps_since_snapshot(self) -> int:
        return self._ledger.steps

    @property
    def finished(self) -> bool:
        return self.goal is not None

    @property
    def goal(self) -> str | None:
        """What this peer has reached, in words; None while it has not."""
        return self.limits.reached(self.round, self.rounds_contributed, self.swarm_tokens)

    @property
    def global_step(self) -> float:
        """The swarm's progress in nominal steps, for learning-rate schedules."""
        return self.schedule.global_step(self.round, self.steps_since_snapshot)

    @property
    def _next(self) -> Event:
        """The round that this peer contributes to next."""
        return self.schedule.event(self.round + 1)

    @property
    def _due(self) -> bool:
        """Enough has been trained for a round."""
        return self._steps_left <= 0

    @property
    def _due_in_s(self) -> float | None:
        """Seconds until it has; None where others may call for a round at any step."""
        return self._tally.seconds_of(max(0, self._steps_left))

    @property
    def round_in_s(self) -> float:
        """Seconds until this peer contributes, 0 while it waits for a round that it has contributed to; infinite where
        that is unknown.
        """
        if self._ledger.outstanding is not None:
            return 0.0
        due_in_s = self._due_in_s
        return math.inf if due_in_s is None else due_in_s

    @property
    def _steps_left(self) -> int:
        """Of the next contribution. Work that is divided by speed begins with the merge, at one time for all."""
        if self._allotted is not None:
            return self._allotted - (self.step - self._merged_at)
        return self.schedule.length(self.round + 1) - self.steps_since_snapshot

    def after_step(self, result: StepReport) -> None:
        """Count the step, merge what has come, hand over what is due."""
        self._count(result)
        with self._tally.waiting():
            try:
                self._local.take_up(self.step)  # also while there is no agent
                self.poll()
                if self._held is not None:
                    self._merge(self._held)
                if self._ledger.armed and self._ledger.outstanding is None and self._due:
                    self._hand_over()
                self._show_progress()
            except AgentGoneError as gone:
                self._revive(gone)
        self._rest()

    def _rest(self) -> None:
        """Return when the organiser lets the run continue, or this peer is to stop."""
        try:
            while self.paused and not (self.finished or self.limits.stopping()):
                self.poll(PAUSE_POLL_S)
        except AgentGoneError as gone:
            self._revive(gone)  # the next agent says whether the run is paused still

    def _count(self, result: StepReport) -> None:
        self._tally.count(result)
        self._ledger.used.add(self.data.take_used())
        self._ledger.steps += 1
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        self._bad_steps = 0 if finite else self._bad_steps + 1
        hopeless = self._bad_steps % HOPELESS_STEPS == 0 and max(self._ledger.all_unsent(self.tokens)) > 0
        if not finite and (hopeless or not self._local.usable):
            self._ledger.armed = self._reading.cancel() or self._ledger.armed  # that holds what is dropped now
            self._drop_progress()

    def _drop_progress(self) -> None:
        """Continue from the swarm's state, the present or the next one: parameters that are not finite are lost."""
        self.drops += 1
        if self.drops & (self.drops - 1) == 0:  # once, and then ever more rarely
            lost = max(self._ledger.all_unsent(self.tokens))
            log.warning(
                "loss or parameters are not finite (NaN or infinity): dropping up to %d tokens of local progress and "
                "continuing from the anchor of round %d (%d times so far)", lost, self.round, self.drops,
            )  # fmt: skip
        self._on_drop()
        self._local.drop(self._sent_parameters)
        self._ledger.drop(self.tokens)
        self._fresh_since = self._tally.steps_since_join

    @property
    def _sent_parameters(self) -> int | None:
        """The fragment whose parameters are on their way into the anchor, and lie in the shared snapshot."""
        return self._ledger.sent

    def _show_progress(self) -> None:
        if self._tally.report_due():
            self.agent.send(self._tally.report(self._ledger.unsent(self.tokens, self._next.fragment), self._due_in_s))
            self._show_data()

    def _show_data(self) -> None:
        if (use := self.data.report(self._ledger.used.pending, self.tokens_per_s)) is not None:
            self.agent.send(use)

    def share(self, data: DataPort, most_parts: int) -> None:
        """Share out this data with other peers; returns once a shard is at hand, or LEASE_WAIT_S later.

        Args:
            most_parts: that one contribution may claim.
        """
        self.data, self._ledger.used.most_parts = data, most_parts
        given_up = time.monotonic() + LEASE_WAIT_S
        self._show_data()
        while self.data.waits and time.monotonic() < given_up:
            self.poll(timeout_s=0.1)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle every message that has arrived, after waiting at most `timeout_s` for the first."""
        self._reading.proceed()
        self._merging.proceed()
        for message in self.agent.messages(timeout_s):
            if isinstance(message, Anchor):
                self._merge(message)
            elif isinstance(message, WantSnapshot):
                self._wanted(message)
            elif isinstance(message, Leased):
                self.data.hear(message)
                self._show_data()
            elif isinstance(message, Steered):
                self._steer(message)
            else:
                if isinstance(message, LivePeers):
                    self.data.hear(message)
                if isinstance(message, Saved):
                    self._take_up_all()
                self._local.count_peers(message, first=not self.rounds_contributed)
                self._on_message(message)

    def _steer(self, message: Steered) -> None:
        self.expelled = message.reason
        if ended := message.state in ("finished", "expelled"):
            self._take_up_all()
        self.paused = message.state == "paused"
        self.limits = replace(
            self.limits, rounds_total=message.rounds_total, tokens_total=message.tokens_total,
            ended=(message.reason or ENDED) if ended else "",
        )

    def _wanted(self, message: WantSnapshot) -> None:
        self._settle_transfers()
        if self._ledger.outstanding in (None, message.after):
            self._hand_over()

    def _hand_over(self) -> None:
        event = self._next
        self._ledger.armed = False
        if not event.moments:
            self._ledger.mark(self.tokens)
        self._merge_at = self.step + event.apply_step - event.send_step
        self._reading.start(self._local.begin_read(event), partial(self._send_snapshot, event))

    def _send_snapshot(self, event: Event) -> None:
        if not self._local.snapshot_fits(event):
            self._ledger.outstanding = None  # the agent asks for another one: that is void
            self._drop_progress()
            self._local.begin_read(event).result()
            if not event.moments:
                self._ledger.mark(self.tokens)
        if event.moments:
            self.agent.send(self._ledger.hand_over_moments())
            return
        self._local.hand_over()
        self.agent.send(self._ledger.hand_over(event.fragment))

    def _merge(self, message: Anchor) -> None:
        """Merge a new anchor, one with this peer's contribution not before the schedule says so."""
        self._settle_transfers()  # of before this anchor
        if not self._ledger.is_in(message) or self.step >= self._merge_at:
            self._take_up(message)
        elif not self.schedule.spans_rounds:
            self._held = message
        elif message.fragment is None:  # of a new agent or a catch-up: to wait would hold up the next contribution
            self._take_up(message)
        else:
            self._local.put_off(message.round, message.fragment, self._merge_at)
            self._settle(message)

    def _take_up_all(self) -> None:
        """Merge what waits for its step, so that parameters and outer state are of one round."""
        if self._held is not None:
            self._take_up(self._held)
        self._settle_transfers()
        self._local.take_up()

    def _settle_transfers(self) -> None:
        self._merging.proceed(wait=True)
        self._reading.proceed(wait=True)

    def _take_up(self, message: Anchor) -> None:
        """Merge an anchor as soon as the device has it; the agent writes no other until it learns of the merge."""
        self._held = None
        self._ledger.armed = False
        moments = 0 if message.fragment is None else self.schedule.turn(message.round - 1).moments
        if moments:
            self._local.merge_moments(message.round, moments, self._ledger.is_in(message))
            self._tell_merged(message)
            return
        sent = self._ledger.sent if self._ledger.is_in(message) else None
        ready = self._local.begin_merge(message.fragment, sent)
        self._merging.start(ready, partial(self._finish_merge, message, sent))

    def _finish_merge(self, message: Anchor, sent: int | None) -> None:
        self._local.merge(message.round, message.fragment, sent)
        if sent is None:
            self._tell_merged(message)
        else:
            self._settle(message)

    def _settle(self, message: Anchor) -> None:
        """What this peer has sent is in the anchor."""
        self.rounds_contributed += 1
        self._ledger.settle_marked()
        self._tell_merged(message)

    def _tell_merged(self, message: Anchor) -> None:
        self.swarm_tokens = message.swarm_tokens // self._local.fragments  # each holds all of a peer's tokens
        self._ledger.close()
        self._merged_at = self.step
        if message.steps is not None:
            self._allotted = message.steps
        self.agent.send(Merged(round=message.round))
        self._on_message(message)
        if not self.schedule.length(self.round + 1):  # of this moment, before a further step
            self._hand_over()

    def _revive(self, gone: AgentGoneError) -> None:
        """Train on without an agent, until there is another one.

        The outstanding snapshot stays known: if the old agent committed it before it died, the next one says so.
        """
        self._reading.cancel()
        self._merging.cancel()  # the next agent announces that anchor again
        self._ledger.armed = False
        self.agent.revive(gone)
