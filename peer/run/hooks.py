"""Everything optional around the training loop: metrics, validation of the anchor, checkpoints, the live table."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from peer.checkpoint.writer import CheckpointWriter
from peer.data.batches import DataState
from peer.link.messages import Anchor, LivePeers, Message, Notice, RoundEnded, Saved
from peer.link.supervisor import AgentGoneError
from peer.outer.record import RoundRecord
from peer.protocol.line_limits import ActiveHours
from peer.run.assemble import Peer
from peer.run.checkpointing import Inner, Saving, inner_half
from peer.run.figures import TrainerReport
from peer.run.resume import checkpoint_folder
from peer.run.task_scores import TaskScores
from peer.run.tasks import Scores
from peer.telemetry.console import LiveSwarm
from peer.telemetry.metrics import MetricsFile
from peer.telemetry.status import PeerRow, write_status
from peer.telemetry.write_guard import WriteGuard
from peer.train.batch import Batch
from peer.train.evaluate import evaluate
from peer.train.step import StepResult
from peer.train.utilisation import Throughput, TimedBatches, flops_per_token, memory_used, peak_flops

log = logging.getLogger(__name__)
REST_POLL_S = 1.0


def throughput_of(peer: Peer) -> Throughput:
    """What a peer's steps make of its device."""
    flops = flops_per_token(peer.model, peer.manifest.data.sequence_length)
    return Throughput(flops, peak_flops(peer.model.device, peer.trainer.precision))


class PeerHooks:
    """The `Hooks` of one peer.

    Args:
        guard: of all that only reports.

    Attributes:
        batches: those of the peer, timed.
        validation: (round, loss of the anchor), in order.
    """

    def __init__(
        self, peer: Peer, metrics: MetricsFile, live: LiveSwarm, stop_requested: Callable[[], bool],
        guard: WriteGuard | None = None,
    ) -> None:
        self._peer, self._metrics, self._live, self._stop_requested = peer, metrics, live, stop_requested
        self._guard = guard or WriteGuard()
        folder = checkpoint_folder(peer.settings.output_dir, peer.manifest.run_id)
        writer = CheckpointWriter(folder, peer.settings.save_total_limit)
        self._saving = Saving(peer.agent, writer, self._inner_state, self._guard)
        self._data_state = peer.batches.state
        end = peer.text.validation.document_end
        self.batches = TimedBatches((Batch.of(rows, end), state) for rows, state in peer.batches)
        self._throughput, self._report = throughput_of(peer), TrainerReport(peer)
        hours = peer.settings.active_hours
        self._hours = None if hours is None else ActiveHours.parse(hours)
        self._agent_starts = peer.agent.starts
        self.records: list[RoundRecord] = []
        self.validation: list[tuple[int, float]] = []
        self.seconds_training = 0.0
        self._tasks = TaskScores(peer, self._note_scores) if peer.settings.eval_tasks else None

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested()

    def after_step(self, result: StepResult, data_state: DataState) -> None:
        self._data_state = data_state
        sync, settings = self._peer.sync, self._peer.settings
        self.seconds_training += result.seconds
        if self._peer.agent.starts != self._agent_starts:
            self._agent_starts = self._peer.agent.starts
            self._metrics.write("agent_restart", step=sync.step, starts=self._agent_starts)
            self._live.note("the agent was restarted; training continued meanwhile")
        if sync.step % settings.logging_steps == 0:
            self._log_step(result)
        every = settings.eval_every_rounds
        validated = self.validation[-1][0] if self.validation else None
        if every and sync.round != validated and sync.round % every == 0:
            self.validate(settings.eval_sequences)
        if self._tasks is not None:
            self._tasks.after_step()
        if settings.save_steps and sync.step % settings.save_steps == 0:
            self._saving.ask_in_passing(sync.step)
        if self._hours is not None and not self._hours.now():
            self._rest(self._hours)

    def _rest(self, hours: ActiveHours) -> None:
        """Neither train nor exchange until this peer's hours come, or it is asked to stop."""
        self._live.note(f"resting until the hours {self._peer.settings.active_hours} (active_hours)")
        try:
            while not hours.now() and not self.stop_requested:
                self._peer.sync.poll(timeout_s=REST_POLL_S)
        except AgentGoneError:
            return  # the next step starts another one, and is followed by the rest of the rest
        self._live.note("these are active hours again; training on")

    def on_message(self, message: Message) -> None:
        """Messages of the agent that are not for the merge."""
        if isinstance(message, RoundEnded):
            self._note_round(message.record)
        elif isinstance(message, LivePeers):
            self._show(message)
        elif isinstance(message, Saved):
            self._saving.answered(message, self._peer.sync.step, self._peer.sync.round)
        elif isinstance(message, Notice):
            log.warning("%s", message.text)
        elif isinstance(message, Anchor):
            log.debug("anchor of round %d", message.round)

    def validate(self, max_sequences: int) -> float:
        """Loss of what the run yields, on the validation text, in nats per token; leaves the local parameters alone."""
        peer, sync = self._peer, self._peer.sync
        batch = peer.trainer.micro_batch or peer.text.batch_sequences
        with self._result_in_model():
            loss = evaluate(peer.model, peer.text.validation, max_sequences, batch)
            self._report.sample()
        self._report.validated(sync.round, sync.swarm_tokens, loss)
        self.validation.append((sync.round, loss))
        self._metrics.write(
            "validation",
            round=sync.round,
            loss=loss,
            tokens=sync.tokens,
            step=sync.step,
            swarm_tokens=sync.swarm_tokens,
        )
        return loss

    def _note_scores(self, round: int, step: int, found: Scores) -> None:
        named = {f"{task}/{name}": value for task, scores in found.items() for name, value in scores.items()}
        self._metrics.write("tasks", round=round, step=step, **named)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in named.items() if "stderr" not in name)
        self._live.note(f"round {round}: {shown}")

    @contextlib.contextmanager
    def _result_in_model(self) -> Iterator[None]:
        """The model holds what the run yields, and the local parameters again afterwards."""
        peer, sync = self._peer, self._peer.sync
        local = sync.anchor.clone()
        peer.replica.read(local)
        peer.replica.write(sync.result)
        try:
            yield
        finally:
            peer.replica.write(local)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_last(self) -> None:
        """Return when the agent's part of the last checkpoint is there, or will not be."""
        mapped, sync = self._peer.mapped, self._peer.sync
        self._saving.last(sync.step, 4 * mapped.numel * (1 + mapped.num_buffers), lambda s: sync.poll(timeout_s=s))

    def close(self) -> bool:
        """End the scoring of tasks, finish the checkpoint under way; whether the last one that was tried stands."""
        if self._tasks is not None:
            self._tasks.close()
        self._saving.close()
        return self._saving.complete

    def _inner_state(self, saved: Saved) -> Inner:
        peer = self._peer
        return inner_half(
            peer.sync, peer.replica, peer.state.tensors(), saved, peer.manifest.run_id,
            self._data_state.to_dict(), peer.text.origin,
        )  # fmt: skip

    # -- what a person sees -----------------------------------------------------------------------------------------

    def _log_step(self, result: StepResult) -> None:
        sync, trainer = self._peer.sync, self._peer.trainer
        throughput = self._throughput.since_last(sync.tokens)
        self._report.trained(self.seconds_training, throughput["mfu"])
        self._metrics.write(
            "step",
            step=sync.step,
            round=sync.round,
            loss=result.loss,
            tokens=sync.tokens,
            tokens_per_s=sync.tokens_per_s,
            **throughput,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            skipped_steps=trainer.skipped_steps,
            loss_spikes=trainer.spikes.count,
            micro_batch=trainer.micro_batch,
            data_wait_s=self.batches.seconds,
            handover_wait_s=sync.seconds_waiting,
            longest_handover_s=sync.longest_wait_s,
            memory_bytes=memory_used(self._peer.model.device),
        )

    def _note_round(self, record: RoundRecord) -> None:
        self.records.append(record)
        self._metrics.write("round", **record.model_dump(mode="json"))
        if record.status == "committed":
            exchange_s = record.seconds["total"] - record.seconds.get("match", 0.0)  # gathering waits for the late
            peers = len(record.members)
            if record.drawn and peers == 1:
                why = record.reason or "no partner drawn this time"
                self._live.note(f"round {record.round} made alone: {why}; nothing is lost")
            else:
                self._live.note(f"round {record.round} committed by {peers} peers, exchanged in {exchange_s:.2f} s")
        elif record.status == "caught_up":
            self._live.note(f"caught up to round {record.round}: {record.reason}")
        elif record.status == "banned":
            self._live.note(f"banned {record.culprit} for good: {record.reason}")
        elif record.alone:
            meanwhile = "waiting for others" if self._peer.recipe.payload == "gradient" else "training on"
            self._live.note(f"round {record.round}: no peer to average with yet; {meanwhile}")
        else:
            self._live.note(f"round {record.round} aborted in {record.phase}: {record.reason}; nothing is lost")

    def _show(self, message: LivePeers) -> None:
        rows = [PeerRow.from_record(peer_id, record) for peer_id, record in message.peers.items()]
        peer, newest = self._peer, self.validation[-1:]
        if self._live.course is not None:
            self._live.course.move_end(peer.sync.limits.rounds_total, peer.sync.limits.tokens_total)
        self._live.advance(
            peer.sync.round, peer.sync.swarm_tokens, newest[0][1] if newest else None, self._report.utilisation
        )
        self._live.update(rows)
        path = self._peer.settings.output_dir / "status.json"
        with self._guard.writing(str(path)):
            write_status(path, rows, self._peer.manifest.name)
