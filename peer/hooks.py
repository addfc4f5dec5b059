"""Everything optional around the training loop: metrics, validation of the anchor, checkpoints, the live table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from peer.assemble import CHECKPOINTS, Peer
from peer.checkpoint.inventory import CheckpointError
from peer.checkpoint.writer import CheckpointWriter
from peer.data.batches import DataState
from peer.link.messages import Anchor, Message, Round, Save, Saved, Swarm
from peer.link.supervisor import AgentGoneError
from peer.outer.record import RoundRecord
from peer.telemetry.console import LiveSwarm
from peer.telemetry.metrics import MetricsFile
from peer.telemetry.status import PeerRow, write_status
from peer.train.evaluate import evaluate
from peer.train.optim import optimizer_tensors
from peer.train.step import StepResult

log = logging.getLogger(__name__)


class PeerHooks:
    """The `Hooks` of one peer.

    Args:
        peer: the wired peer.
        metrics: where events go.
        live: the live table.
        stop_requested: asked after every step.

    Attributes:
        records: every round record so far.
        validation: (round, loss of the anchor), in order.
    """

    def __init__(
        self, peer: Peer, metrics: MetricsFile, live: LiveSwarm, stop_requested: Callable[[], bool]
    ) -> None:
        self._peer, self._metrics, self._live, self._stop_requested = peer, metrics, live, stop_requested
        self._settings = peer.settings
        self._writer = CheckpointWriter(peer.settings.output_dir / CHECKPOINTS, peer.settings.save_total_limit)
        self._data_state = peer.batches.state
        self._saving: Path | None = None
        self._last_saved_step = -1
        self._swarm_tokens = 0
        self._agent_starts = peer.agent.starts
        self._validated_round = -1
        self.records: list[RoundRecord] = []
        self.validation: list[tuple[int, float]] = []
        self.seconds_training = 0.0

    @property
    def saving(self) -> bool:
        """A checkpoint waits for the agent's part."""
        return self._saving is not None

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested()

    def after_step(self, result: StepResult, data_state: DataState) -> None:
        self._data_state = data_state
        sync, settings = self._peer.sync, self._settings
        self.seconds_training += result.seconds
        if self._peer.agent.starts != self._agent_starts:
            self._agent_starts = self._peer.agent.starts
            self._metrics.write("agent_restart", step=sync.step, starts=self._agent_starts)
            self._live.note("the agent was restarted; training went on meanwhile")
        if sync.step % settings.logging_steps == 0:
            self._log_step(result)
        every = settings.eval_every_rounds
        if every and sync.round != self._validated_round and sync.round % every == 0:
            self.validate(settings.eval_sequences)
        if settings.save_steps and sync.step % settings.save_steps == 0:
            self.ask_to_save()

    def on_message(self, message: Message) -> None:
        """Messages of the agent that are not for the merge."""
        if isinstance(message, Round):
            self._note_round(message.record)
        elif isinstance(message, Swarm):
            self._show(message)
        elif isinstance(message, Saved):
            self._write_checkpoint(message)
        elif isinstance(message, Anchor):
            log.debug("anchor of round %d", message.round)

    def validate(self, max_sequences: int) -> float:
        """Loss of what the run yields, on the validation text, in nats per token; leaves the local parameters alone."""
        peer, sync = self._peer, self._peer.sync
        local = sync.anchor.clone()
        peer.replica.read(local)
        peer.replica.write(sync.result)
        try:
            loss = evaluate(peer.model, peer.text.validation, max_sequences, peer.text.batch_sequences)
        finally:
            peer.replica.write(local)
        self._validated_round = sync.round
        self.validation.append((sync.round, loss))
        self._metrics.write(
            "validation",
            round=sync.round,
            loss=loss,
            tokens=sync.tokens,
            step=sync.step,
            swarm_tokens=self._swarm_tokens,
        )
        return loss

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def ask_to_save(self) -> None:
        """Ask the agent for the outer state; the checkpoint is written when it has answered."""
        if self._saving is not None or self._peer.sync.step == self._last_saved_step:
            return
        self._saving = folder = self._writer.part(self._peer.sync.step)
        try:
            self._peer.agent.send(Save(path=str(folder)))
        except AgentGoneError as gone:
            log.warning("no checkpoint at step %d: %s", self._peer.sync.step, gone)
            self._abandon_saving()

    def close(self) -> None:
        """Finish the checkpoint that is being written."""
        self._abandon_saving()
        try:
            self._writer.close()
        except CheckpointError as error:
            log.error("%s", error)

    def _write_checkpoint(self, saved: Saved) -> None:
        """The outer state is on disk at the round that this process has merged; add the inner state at this step."""
        folder, sync = self._saving, self._peer.sync
        if folder is None or saved.path != str(folder):
            return
        problem = saved.problem
        if problem is None and saved.round != sync.round:
            problem = f"the outer state is of round {saved.round}, the parameters of round {sync.round}"
        if problem is None:
            try:
                self._writer.wait()
            except CheckpointError as error:
                log.error("the checkpoint before: %s", error)
            self._writer.submit(sync.step, self._inner_tensors(), self._checkpoint_state(saved), folder)
            self._last_saved_step = sync.step
        if problem is not None:
            log.error("no checkpoint at step %d: %s", sync.step, problem)
        self._saving = None

    def _abandon_saving(self) -> None:
        self._saving = None

    def _inner_tensors(self) -> dict[str, dict[str, Tensor]]:
        parameters = self._peer.sync.anchor.clone()
        self._peer.replica.read(parameters)
        return {"inner": {"parameters": parameters}, "optimizer": optimizer_tensors(self._peer.optimizer)}

    def _checkpoint_state(self, saved: Saved) -> dict[str, Any]:
        peer = self._peer
        return {
            "run_id": peer.manifest.run_id,
            "lineage_id": saved.lineage_id,
            "progress": peer.sync.progress(),
            "data": self._data_state.to_dict(),
        }

    # -- what a person sees -----------------------------------------------------------------------------------------

    def _log_step(self, result: StepResult) -> None:
        sync = self._peer.sync
        self._metrics.write(
            "step",
            step=sync.step,
            round=sync.round,
            loss=result.loss,
            tokens=sync.tokens,
            tokens_per_s=sync.tokens_per_s,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
        )

    def _note_round(self, record: RoundRecord) -> None:
        self.records.append(record)
        self._metrics.write("round", **record.model_dump(mode="json"))
        if record.status == "committed":
            self._swarm_tokens += sum(record.weights)
            exchange_s = record.seconds["total"] - record.seconds.get("match", 0.0)  # gathering waits for the late
            peers = len(record.members)
            if record.drawn and peers == 1:
                why = record.reason or "drawn for nobody this time"
                self._live.note(f"round {record.round} made alone: {why}; nothing is lost")
            else:
                self._live.note(f"round {record.round} committed by {peers} peers, exchanged in {exchange_s:.2f} s")
        elif record.status == "caught_up":
            self._live.note(f"caught up to round {record.round}: {record.reason}")
        elif record.status == "banned":
            self._live.note(f"banned {record.culprit} for good: {record.reason}")
        elif record.alone:
            meanwhile = "waiting for others" if self._peer.recipe.accumulates else "training on"
            self._live.note(f"round {record.round}: nobody to average with yet; {meanwhile}")
        else:
            self._live.note(f"round {record.round} aborted in {record.phase}: {record.reason}; nothing is lost")

    def _show(self, message: Swarm) -> None:
        rows = [PeerRow.from_record(peer_id, record) for peer_id, record in message.peers.items()]
        self._live.update(rows)
        write_status(self._settings.output_dir / "status.json", rows, self._peer.manifest.name)
