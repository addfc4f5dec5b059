"""The production agent, which stops itself (SIGSTOP) in a phase that somebody waits for: the place to be killed in.

Its arguments are FOLDER and the flags of `peer.swarm.agent.process`. The file `gate` in FOLDER holds the phase and for
how many seconds the agent goes on in it; without that file the agent is the production agent.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("train", "match", "exchange", "commit", "install", "catch_up")
SHORTEST_S = 0.001


class Gate:
    """Stops this process in the phase that the file names.

    Args:
        path: the file. It is gone once the agent has entered the phase.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._visits = 0
        self._inside: list[tuple[str, int]] = []
        self._armed: tuple[str, float] | None = None

    def enter(self, phase: str) -> int:
        """The agent is in the phase from now on; -> the number of this visit."""
        self._visits += 1
        self._inside.append((phase, self._visits))
        if self._armed is None:
            with contextlib.suppress(FileNotFoundError):
                wanted, delay_s = self._path.read_text().split()
                self._armed = (wanted, float(delay_s))
        if self._armed is not None and self._armed[0] == phase:
            self._path.unlink(missing_ok=True)
            _, delay_s = self._armed
            self._armed = None
            if delay_s < SHORTEST_S:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                timer = threading.Timer(delay_s, self._stop, (phase, self._visits, delay_s))
                timer.daemon = True
                timer.start()
        return self._visits

    def leave(self, phase: str, visit: int) -> None:
        """It is not any more."""
        self._inside.remove((phase, visit))

    def _stop(self, phase: str, visit: int, delay_s: float) -> None:
        if (phase, visit) in self._inside:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:  # the phase was shorter: stop earlier in the next one
            self._armed = (phase, delay_s / 2)

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Every call of this method is a visit of the phase."""
        original = getattr(owner, name)
        setattr(owner, name, (self._around if inspect.iscoroutinefunction(original) else self._around_plain)(
            original, phase
        ))

    def _around(self, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(original)
        async def run(*arguments: Any) -> Any:
            visit = self.enter(phase)
            try:
                return await original(*arguments)
            finally:
                self.leave(phase, visit)

        return run

    def _around_plain(self, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*arguments: Any) -> Any:
            visit = self.enter(phase)
            try:
                return original(*arguments)
            finally:
                self.leave(phase, visit)

        return run


def arm(folder: Path, phase: str, delay_s: float) -> None:
    """Let the agent of this folder stop when it has been in the phase for so long."""
    text = folder / "gate.tmp"
    text.write_text(f"{phase} {delay_s:.4f}")
    text.replace(folder / "gate")  # whole at any moment: the agent reads it whenever it likes


def disarm(folder: Path) -> None:
    """Unless it has begun to."""
    (folder / "gate").unlink(missing_ok=True)


def watch_phases(gate: Gate) -> None:
    """Where the phases of a peer are. `install` is entered three times: at its beginning, with the chain written but
    the state old, and with the state new but its head not written.
    """
    from peer.outer.state.outer_state import OuterState
    from peer.swarm.catchup.fork_choice import ForkChoice
    from peer.swarm.lineage.round_loop import LineageRounds
    from peer.swarm.state.store import StateStore

    gate.watch(LineageRounds, "_wait_for_work", "train")
    for phase in ("match", "exchange", "commit", "install"):
        gate.watch(LineageRounds, phase, phase)
    gate.watch(OuterState, "apply", "install")
    gate.watch(StateStore, "_write_head", "install")
    gate.watch(LineageRounds, "join", "catch_up")
    gate.watch(ForkChoice, "catch_up", "catch_up")
    gate.watch(StateStore, "adopt", "catch_up")


def main() -> None:
    """Be the agent, and watch the phases as soon as it has armed its death signals."""
    gate = Gate(Path(sys.argv.pop(1)) / "gate")
    from peer.swarm.agent import process as agent

    prepare = agent.trim_malloc_arenas

    def prepare_and_watch() -> None:
        prepare()
        watch_phases(gate)

    agent.trim_malloc_arenas = prepare_and_watch
    agent.main()

