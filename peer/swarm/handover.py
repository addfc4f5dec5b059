"""What the rounds and the trainer hand each other: contributions one way, anchors the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torch import Tensor

from peer.link.messages import Anchor, Progress, Snapshot, ToTrainer, WantSnapshot
from peer.outer.round import Due
from peer.swarm.keeper import Position


class Handover:
    """This peer's contribution, from the trainer's progress towards it to the anchor that it went into.

    Args:
        snapshot: -> the shared vector that contributions lie in.
        position: where this peer stands.
        tell: sends a message to the trainer.

    Attributes:
        due: the contribution that waits for a round.
        in_round: a round is under way.
        progress: the trainer's last report.
        merged: set while the trainer has read the newest anchor.
        work: set when something has come that the rounds may wait for.
    """

    def __init__(
        self, snapshot: Callable[[], Tensor], position: Callable[[], Position], tell: Callable[[ToTrainer], None]
    ) -> None:
        self._snapshot, self._position, self._tell = snapshot, position, tell
        self.merged = asyncio.Event()
        self.merged.set()
        self.work = asyncio.Event()
        self.due: Due | None = None
        self.in_round = False
        self.progress: Progress | None = None
        self._wanted = False
        self._kept = False  # a call
        self._last_sequence = 0
        self._progress_at = 0.0

    # -- what others see ---------------------------------------------------------------------------------------------

    def due_in_s(self) -> float:
        """Seconds until the next contribution, as the trainer's last report says."""
        if self.due is not None or self.in_round:
            return 0.0
        if self.progress is None or self.progress.due_in_s is None:
            return float("inf")
        return max(0.0, self.progress.due_in_s - (_now() - self._progress_at))

    @property
    def called(self) -> bool:
        """Whether rounds begin when a peer calls for one, and at no other time."""
        return self.progress is not None and self.progress.due_in_s is None

    def halfway(self) -> bool:
        """Whether no more is left to train for the next contribution than has been trained for it."""
        progress, due_in_s = self.progress, self.due_in_s()
        if progress is None or due_in_s == 0.0:
            return due_in_s == 0.0
        if progress.due_in_s is None:
            return True  # there is no half of what nobody knows the end of
        trained = progress.unsent_tokens + (_now() - self._progress_at) * progress.tokens_per_s
        return due_in_s * progress.tokens_per_s <= trained

    # -- from the trainer --------------------------------------------------------------------------------------------

    def on_progress(self, progress: Progress) -> None:
        self.progress, self._progress_at = progress, _now()

    def on_snapshot(self, message: Snapshot) -> None:
        """A contribution is ready, unless it was taken before the trainer saw the newest anchor."""
        self._last_sequence = max(self._last_sequence, message.sequence)
        self._wanted = False
        if not self.merged.is_set():
            return
        self.due = Due(message.sequence, message.tokens, self._snapshot())
        self.work.set()

    def on_merged(self) -> None:
        self.merged.set()
        self.work.set()
        self._answer()

    # -- to the trainer ----------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Ask the trainer for what it has, unless a contribution is ready or asked for already.

        Where any peer may call for a round, a call that comes before the end of the one before is kept until then.
        """
        if self.in_round or not self.merged.is_set():
            self._kept = self.called
        elif self.due is None and not self._wanted:
            self.want_snapshot()

    def _answer(self) -> None:
        if self._kept and not self.in_round and self.merged.is_set():
            self._kept = False
            self.hurry()

    def want_snapshot(self) -> None:
        """Ask the trainer for a contribution in place of its last one."""
        self._wanted = True
        self._tell(WantSnapshot(after=self._last_sequence))

    def announce_anchor(self, contributed: int | None) -> None:
        """The anchor is new; `contributed` is the snapshot that went into it. One that still waits is of another."""
        self.merged.clear()
        self.due = None
        now = self._position()
        self._tell(Anchor(round=now.round, lineage_id=now.lineage_id, contributed=contributed))

    def spent(self, due: Due) -> None:
        """The round of this contribution is over, unless the trainer has handed over the next one meanwhile."""
        if self.due is due:
            self.due = None
        self._answer()


def _now() -> float:
    return asyncio.get_running_loop().time()
