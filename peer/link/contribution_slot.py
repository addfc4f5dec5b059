"""What the rounds and the trainer hand each other: contributions one way, anchors the other."""

from __future__ import annotations

import asyncio
from typing import Protocol

from peer.link.channel import TrainerLink
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Progress, Snapshot, WantSnapshot
from peer.outer.round import Due
from peer.protocol.lineage import Position
from peer.system.clock import Clock, awake_clock


class SharedPosition(Protocol):
    """The state that this peer's rounds change: its shared memory, and its position in the lineage."""

    @property
    def memory(self) -> SharedState: ...
    @property
    def position(self) -> Position: ...


class TrainerReports:
    """What the trainer has said last, and what follows from it for its next contribution.

    Args:
        clock: seconds in which this machine was awake: training stands still in the others.

    Attributes:
        sequence: of its last snapshot.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.progress: Progress | None = None
        self.sequence = 0
        self._progress_at = 0.0

    def hear(self, progress: Progress) -> None:
        self.progress, self._progress_at = progress, self.clock()

    def due_in_s(self) -> float:
        """Seconds until the next contribution; infinite if that is unknown."""
        if self.progress is None or self.progress.due_in_s is None:
            return float("inf")
        return max(0.0, self.progress.due_in_s - (self.clock() - self._progress_at))

    def halfway(self) -> bool:
        """Whether no more is left to train for the next contribution than has been trained for it."""
        progress, due_in_s = self.progress, self.due_in_s()
        if progress is None or due_in_s == 0.0:
            return due_in_s == 0.0
        trained = progress.unsent_tokens + (self.clock() - self._progress_at) * progress.tokens_per_s
        return trained > 0.0 and due_in_s * progress.tokens_per_s <= trained


class ContributionSlot:
    """This peer's contribution, from the trainer's progress towards it to the anchor that it went into.

    Args:
        store: the state; contributions lie in its memory.
        called: rounds begin when a peer calls for one, and at no other time.

    Attributes:
        due: the contribution that waits for a round.
        merged: set while the trainer has read the newest anchor.
        work: set when something has come that the rounds may wait for.
    """

    def __init__(
        self, store: SharedPosition, trainer: TrainerLink, called: bool = False, clock: Clock = awake_clock
    ) -> None:
        self.called, self.reports = called, TrainerReports(clock)
        self._store, self._trainer = store, trainer
        self.merged = asyncio.Event()
        self.merged.set()
        self.work = asyncio.Event()
        self.due: Due | None = None
        self._wanted = False
        self._kept = False  # a call
        self._due_at = self._asked_at = store.position
        self._round_from: Position | None = None  # of the round that is under way

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float:
        """Trained, as the trainer's last report says."""
        return self.reports.progress.tokens_per_s if self.reports.progress is not None else 0.0

    def due_in_s(self) -> float:
        """Seconds until the next contribution, as the trainer's last report says."""
        ready = self._occupied if self.called else self.due is not None or self._round_from is not None
        return 0.0 if ready else self.reports.due_in_s()

    @property
    def _occupied(self) -> bool:
        """A contribution for the round that follows this position is ready, or in it."""
        now = self._store.position
        return (self.due is not None and self._due_at == now) or self._round_from == now

    def halfway(self) -> bool:
        """Whether no more is left to train for the next contribution than has been trained for it."""
        if self.called:
            return True  # the end of this round is unknown, so "half-way" is undefined
        return self.due_in_s() == 0.0 or self.reports.halfway()

    # -- from the trainer --------------------------------------------------------------------------------------------

    def on_progress(self, progress: Progress) -> None:
        self.reports.hear(progress)

    def on_snapshot(self, message: Snapshot) -> None:
        """A contribution is ready, unless it was taken before the trainer saw the newest anchor."""
        self.reports.sequence = max(self.reports.sequence, message.sequence)
        self._wanted = False
        if not self.merged.is_set():
            return
        self.due = Due(message.sequence, message.tokens, self._store.memory.snapshot, message.ranges)
        self._due_at = self._store.position
        self.work.set()

    def on_merged(self) -> None:
        self.merged.set()
        self.work.set()
        self._answer()

    # -- to the trainer ----------------------------------------------------------------------------------------------

    def request_now(self) -> None:
        """Ask the trainer for what it has, unless a contribution is ready or asked for already.

        Where peers call for rounds, a call for a round whose predecessor is not over here yet is kept until it is.
        """
        busy = self._round_from is not None or self.due is not None or not self.merged.is_set()
        if busy and self.called and not self._occupied:
            self._kept = True
        elif not busy and not self._wanted:
            self.want_snapshot()

    def _answer(self) -> None:
        if self._kept and self.due is None and self._round_from is None and self.merged.is_set():
            self._kept = False
            self.request_now()

    def want_snapshot(self) -> None:
        """Ask the trainer for a contribution in place of its last one."""
        self._wanted, self._asked_at = True, self._store.position
        self._trainer.tell(WantSnapshot(after=self.reports.sequence))

    def announce_anchor(
        self, contributed: int | None, fragment: int | None = None, steps: int | None = None, *, earlier: bool = False
    ) -> None:
        """The anchor is new; `contributed` is the snapshot that went into it. One that still waits is of another.

        Args:
            fragment: the only one that is new; None: any may be.
            steps: of this peer to its next contribution, where work is divided by speed.
            earlier: see `Anchor`.
        """
        self.merged.clear()
        self.due = None
        now = self._store.position
        if self.called and self._wanted:  # what the trainer hands over before it sees this anchor is void
            self._wanted, self._kept = False, self._kept or self._asked_at == now
        self._trainer.tell(Anchor(
            round=now.round, lineage_id=now.lineage_id, contributed=contributed, fragment=fragment,
            swarm_tokens=now.weight, steps=steps, earlier=earlier,
        ))  # fmt: skip

    def begin_round(self) -> None:
        """A round is under way, until `release`."""
        self._round_from = self._store.position

    def release(self, due: Due) -> None:
        """The round of this contribution is over, unless the trainer has handed over the next one meanwhile."""
        began, self._round_from = self._round_from, None
        if self.due is due:
            self.due = None
        if self.called and began == self._store.position:
            self._wanted = True  # it has failed; the snapshot must stay until it is known whether for others, too
        self._answer()
