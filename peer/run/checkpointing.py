"""Checkpoints of a peer: the outer state from the agent and the inner state from this process, of one round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from peer.checkpoint.inventory import CheckpointError
from peer.checkpoint.writer import CheckpointWriter
from peer.link.messages import Save, Saved, ToAgent
from peer.link.second_trajectory import LocalParameters
from peer.link.supervisor import AgentGoneError
from peer.link.sync import SwarmSync
from peer.telemetry.write_guard import WriteGuard

log = logging.getLogger(__name__)
PATIENCE_S, POLL_S = 1.5, 0.1
WHAT = "checkpoints"
BYTES_PER_S = 100e6  # of a slow disk
Inner = tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, Any]]


def inner_half(
    sync: SwarmSync, replica: LocalParameters, optimizer: Mapping[str, Tensor], saved: Saved, run_id: str,
    data: Mapping[str, Any], origin: Mapping[str, Any],
) -> Inner:  # fmt: skip
    """This process's half of a checkpoint.

    Args:
        optimizer: its state, as named tensors.
        saved: the agent's half.
        data, origin: where the peer is in its data, and what the order of that depends on.

    Raises:
        CheckpointError: a value is not finite.
    """
    parameters = sync.anchor.clone()
    replica.read(parameters)
    tensors = {"inner": {"parameters": parameters}, "optimizer": optimizer}
    if second := sync.tensors():
        tensors["second"] = second
    for stem, named in tensors.items():
        for name, tensor in named.items():
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(
                    f"{stem}: {name} is not finite (NaN or infinity)", "the checkpoints before are kept"
                )
    return tensors, {
        "run_id": run_id, "lineage_id": saved.lineage_id, "progress": sync.progress(), "round": sync.round,
        "data": data, "origin": origin,
    }  # fmt: skip


class Agent(Protocol):
    """What is needed of the agent's process."""

    starts: int

    def send(self, message: ToAgent) -> None: ...


class Saving:
    """Asks the agent for the outer state, and writes a checkpoint when it has answered, while training continues.

    Nothing that goes wrong with a checkpoint ends the training: the log says it, and the next one is tried.

    Args:
        writer: writes the checkpoint; closed with this.
        inner: what it is given of an answer: the tensors of this process (file stem -> name -> tensor), and a JSON
            document, as they are now; raises CheckpointError where they are not worth keeping.
        guard: notes every checkpoint that could not be written.

    Attributes:
        complete: the newest checkpoint that was tried stands, or is being written.
    """

    def __init__(
        self, agent: Agent, writer: CheckpointWriter, inner: Callable[[Saved], Inner], guard: WriteGuard | None = None
    ) -> None:
        self._agent, self._writer, self._inner, self._guard = agent, writer, inner, guard or WriteGuard()
        self._folder: Path | None = None
        self._asked_of = 0
        self._saved_step = -1
        self.complete = True

    @property
    def waiting(self) -> bool:
        """The agent has been asked and has not answered; one that was started since knows nothing of it."""
        return self._folder is not None and self._asked_of == self._agent.starts

    def ask_in_passing(self, step: int) -> None:
        """As `ask`, but nothing if the checkpoint before is still being written: on a slow disk, steps would wait."""
        if self._writer.writing:
            log.info("no checkpoint at step %d: the one before is still being written", step)
        else:
            self.ask(step)

    def ask(self, step: int) -> None:
        """Ask for the outer state at this step, unless the agent is at it or that checkpoint is there already."""
        if self.waiting or (step == self._saved_step and self._is_written()):
            return
        if self._folder is not None:
            log.warning("the agent ended before it had written its part of a checkpoint; asking its successor")
        try:
            self._folder, self._asked_of = self._writer.part(step), self._agent.starts
            self._agent.send(Save(path=str(self._folder)))
        except (OSError, AgentGoneError) as error:
            self._failed(step, error)

    def answered(self, saved: Saved, step: int, round: int) -> None:
        """The outer state is on disk, or is not.

        Args:
            step, round: where this process is; the parameters are those of the outer state if the rounds are the same.
        """
        if self._folder is None or saved.path != str(self._folder):
            return
        folder, self._folder = self._folder, None
        if saved.problem is not None:
            self._failed(step, CheckpointError(saved.problem))
            return
        self._is_written()
        try:
            if saved.round != round:
                raise CheckpointError(f"the outer state is of round {saved.round}, the parameters of round {round}")
            self._writer.submit(step, *self._inner(saved), folder)
        except (OSError, CheckpointError) as error:
            self._failed(step, error)
        else:
            self._saved_step, self.complete = step, True

    def last(self, step: int, num_bytes: int, poll: Callable[[float], None]) -> None:
        """Ask once more, and return when the agent has answered, or has not for as long as its part may take.

        Args:
            num_bytes: of the outer state.
            poll: takes what the agent says, for so many seconds.
        """
        patience_s = PATIENCE_S + num_bytes / BYTES_PER_S
        began, told = time.monotonic(), False
        try:
            self.ask(step)
            while self.waiting and (waited_s := time.monotonic() - began) < patience_s:
                if waited_s > PATIENCE_S and not told:
                    told = True
                    log.info("writing the last checkpoint, of %.1f GB", num_bytes / 1e9)
                poll(POLL_S)
        except AgentGoneError as gone:
            self._failed(step, gone)
        if self.waiting:
            self._failed(step, CheckpointError(f"the agent has not written its part for {patience_s:.1f} s"))

    def close(self) -> None:
        """Finish the checkpoint that is being written."""
        self._folder = None
        self._is_written()
        try:
            self._writer.close()
        except OSError as error:
            self._guard.failed(WHAT, error)

    def _failed(self, step: int, error: Exception) -> None:
        """There is none at this step; each kind of failure is logged as a warning once."""
        self._folder, self._saved_step, self.complete = None, -1, False
        self._writer.remove_parts()  # they take up what space there is
        text = f"no checkpoint at step {step}: {error}"
        if not self._guard.failed(WHAT, error, text):
            log.info("%s", text)

    def _is_written(self) -> bool:
        """Whether the checkpoint that was being written, if any, is complete now."""
        try:
            written = self._writer.wait()
        except (OSError, CheckpointError) as error:
            self._failed(self._saved_step, error)
            return False
        if written is not None:
            self._guard.worked(WHAT)
        return True
