"""What the organiser decides reaches the rounds of this peer, its trainer, and the person at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from peer.link.channel import TrainerLink
from peer.link.messages import Notice, Steered
from peer.protocol.control import Control
from peer.swarm.state.run_control import RunControl

WORDS = {
    "paused": "the organiser has paused the run: nothing is lost, and training continues when the run does",
    "running": "the organiser has resumed the run",
    "finished": "the organiser ends the run: this peer makes the last rounds, exports the model and leaves",
}


class Steering:
    """Hands on what a `RunControl` hears."""

    def __init__(self, control: RunControl, trainer: TrainerLink) -> None:
        self._control, self._trainer = control, trainer
        self._state, self._said = "running", ""
        self._steer: Callable[[], None] | None = None
        if control.newest is not None:  # this peer has shown it in an earlier life
            self._said = control.newest.announcement
        control.on_change = self._changed

    def begin(self, steer: Callable[[], None]) -> None:
        """The trainer has its first anchor: it, and by `steer` the rounds, hear from now on what holds."""
        self._steer = steer
        if self._control.newest is not None:
            self._hand_on()

    def expel(self, reason: str) -> None:
        """This peer is no longer invited: its trainer ends."""
        self._tell("expelled", reason)

    def ended(self) -> None:
        """The rounds have ended: with the run, if its organiser has ended it."""
        if self._control.state == "finished":
            self._tell("finished")

    def _changed(self, control: Control) -> None:
        if control.announcement and control.announcement != self._said:
            self._trainer.tell(Notice(text=f"the organiser says: {control.announcement}"))
        self._said = control.announcement
        self._hand_on()

    def _hand_on(self) -> None:
        if self._control.state != self._state:
            self._state = self._control.state
            self._trainer.tell(Notice(text=WORDS[self._state]))
        if self._steer is not None:
            self._steer()
            self._tell("paused" if self._control.paused else "running")

    def _tell(self, state: Literal["running", "paused", "finished", "expelled"], reason: str = "") -> None:
        control = self._control
        self._trainer.tell(Steered(
            state=state, reason=reason, rounds_total=control.rounds_total, tokens_total=control.tokens_total
        ))  # fmt: skip
