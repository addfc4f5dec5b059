"""The life of one peer, from its settings to its report."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence

import transformers
from rich.console import Console

from peer.errors import UserError
from peer.link.messages import Anchor, Message, Published, Start, Stop, Stopped, TokenizerFetched
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.protocol.invitation import ASK
from peer.run.assemble import FoundRun, Peer, assemble
from peer.run.device_checks import device_finding, log_finding
from peer.run.devices import FurtherRanks, NoFurther, start_ranks
from peer.run.drain import Drain
from peer.run.figures import SAMPLE_PROMPT
from peer.run.final_report import export, export_at_once, report_of, write_report
from peer.run.hooks import PeerHooks
from peer.run.leader import RanksTrainer
from peer.run.limits import DOES_NOT_FIT, await_hours, limits_in_words
from peer.run.resume import checkpoint_folder
from peer.run.run_file import keep_manifest
from peer.run.tasks import check_tasks
from peer.settings import PeerSettings
from peer.system.exit_signals import ending_signals
from peer.system.finding import Finding
from peer.system.spot_notice import SpotNotice
from peer.telemetry.console import LiveSwarm, setup_logging
from peer.telemetry.course import Course
from peer.telemetry.metrics import MetricsFile
from peer.telemetry.trackers import RunLabels, Trackers
from peer.telemetry.write_guard import WriteGuard
from peer.train.device import pick_device, set_threads
from peer.train.evaluate import sample_text
from peer.train.loop import train
from peer.train.orders import RankOrder

log = logging.getLogger(__name__)
PUBLISHED_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 3600.0
LINGER_S = 15.0
DRAIN_S = 1.5
CLIENT_NOTICE = (
    "this machine accepts no connection: running as a client, which dials all others. Two clients reach each other "
    "only through a relay, which takes some minutes to find; until then a group admits one client at a time. Others "
    "cannot join through this address. To run as a full peer, open a TCP port and give it with --host-maddrs, and with "
    "--announce-maddrs if the public address is another one"
)
SAMPLE_TOKENS = 200


class StopSignal:
    """SIGINT, SIGTERM, SIGHUP: before training they interrupt, while training they ask it to stop; twice: at once. A
    spot notice is one of them before training, while a `Drain` hears of it itself later.
    """

    def __init__(self) -> None:
        self.requested = False
        self.draining = False
        for number in ending_signals():
            signal.signal(number, self._on_signal)

    def on_notice(self) -> None:
        """Called in the thread that has seen the notice."""
        if not self.draining:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _on_signal(self, *_: object) -> None:
        if self.requested or not self.draining:
            raise KeyboardInterrupt
        self.requested = True


def live(
    settings: PeerSettings, start: Start, agent: AgentProcess, findings: Sequence[Finding] = (), *, told: bool = False
) -> int:
    """Join a run and train until it ends or a signal comes; -> exit code.

    The caller has checked the surroundings (`peer.system.preflight`) and holds the identity's lock.

    Args:
        start: the agent's first message.
        agent: has been started; ends with this call, however that ends.
        findings: of those checks, none of which has failed; warnings are logged.
        told: the agent has its first message already.

    Raises:
        UserError: anything that a person can mend, before training starts.
    """
    ranks: FurtherRanks = NoFurther()
    notice: SpotNotice | None = None
    try:
        stop, console, guard = StopSignal(), Console(), WriteGuard()
        try:
            setup_logging(settings.output_dir / "peer.log", settings.log_level, settings.json_lines, console, guard)
            for finding in (*findings, device_finding(settings).require()):
                log_finding(finding)
            if settings.spot_notice is not None:
                notice = SpotNotice(settings.spot_notice, on_notice=stop.on_notice)
                notice.start()
            _prepare(settings)
            await_hours(settings.active_hours)
            ranks = start_ranks(settings)
            drain = Drain(stop, settings.drain_s, notice)
            return _run(settings, start, agent, drain, (console, guard), ranks, told=told)
        except RuntimeError:
            if lost := ranks.lost():
                _leave(agent)
                raise lost from None
            raise
        except KeyboardInterrupt:
            log.warning("stopped %s", "in the middle of the end" if stop.draining else "before the first step")
            return 130
    except KeyboardInterrupt:
        return 130
    finally:
        ranks.close()
        agent.close()


def _leave(agent: AgentProcess) -> None:
    """Let the other peers know at once that this one is gone."""
    with contextlib.suppress(AgentGoneError, UserError):
        agent.send(Stop(linger_s=0.0))
        agent.expect(Stopped, DRAIN_S)


def _prepare(settings: PeerSettings) -> None:
    if settings.eval_tasks:
        check_tasks(settings.eval_task_folder)
        pick_device(settings.eval_tasks_device)
    set_threads(settings.torch_threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _run(
    settings: PeerSettings, start: Start, agent: AgentProcess, drain: Drain, shown: tuple[Console, WriteGuard],
    ranks: FurtherRanks, *, told: bool,
) -> int:  # fmt: skip
    receive, (console, guard) = _Late(), shown
    try:
        if not told:
            agent.send(start)
        peer, anchor = _arrive(settings, start, agent, receive, drain.leaves, ranks)
    except AgentGoneError as gone:
        raise UserError(f"the agent process ended unexpectedly: {gone}", f"its log is {agent.log_path}") from None
    manifest, published, drain.sync = peer.manifest, peer.published, peer.sync
    with guard.writing("the run's manifest"):
        keep_manifest(checkpoint_folder(settings.output_dir, manifest.run_id), manifest)
    labels = RunLabels(
        project=settings.project, name=settings.run_name or published.nickname, group=manifest.run_id,
        folder=settings.output_dir, config=published.manifest,
    )  # fmt: skip
    trackers = Trackers(settings.report_to, labels)
    metrics = MetricsFile(settings.output_dir / "metrics.jsonl", guard, follow=trackers.take)
    metrics.write(
        "start", peer_id=published.peer_id, nickname=published.nickname, run_id=manifest.run_id, round=anchor.round
    )
    title = f"{manifest.name}  {manifest.run_id[:12]}"
    own_id, as_table = published.peer_id, False if settings.json_lines else None
    with LiveSwarm(console, title=title, own_id=own_id, live=as_table, guard=guard, course=Course()) as table:
        hooks = PeerHooks(peer, metrics, table, drain.leaves, guard)
        receive.target = hooks.on_message
        drain.stop.draining = True
        if settings.eval_every_rounds:
            hooks.validate(settings.eval_sequences)
        table.note(f"training from round {anchor.round}")
        train(peer.trainer, hooks.batches, peer.sync, hooks)
        peer.text.corpus.close()
        code = _wind_down(peer, hooks, metrics, anchor.round)
    if isinstance(peer.trainer, RanksTrainer):
        ranks.dismiss()
        peer.trainer.leader.order(RankOrder.STOP)
    trackers.close()
    return code


def _arrive(
    settings: PeerSettings, start: Start, agent: AgentProcess, receive: Callable[[Message], None],
    stopping: Callable[[], bool], ranks: FurtherRanks,
) -> tuple[Peer, Anchor]:
    """Find the run, build this peer's parts, take the swarm's state."""
    log.info("looking for the run at %s", ", ".join(start.initial_peers))
    published: Published = agent.expect(Published, PUBLISHED_TIMEOUT_S)
    run = FoundRun.of(published)
    plan, manifest = run.plan, run.plan.manifest
    log.info("run %s (%s); this peer is %s", manifest.name, manifest.run_id[:16], published.peer_id)
    log.info("%s", plan.in_words())
    if published.client:
        log.warning("%s", CLIENT_NOTICE)
    else:
        log.info("others can join through %s as well", ", ".join(published.maddrs))
    if manifest.tokenizer.files:
        agent.expect(TokenizerFetched, STATE_TIMEOUT_S)
    peer = assemble(settings, start, run, agent, receive, stopping, ranks.connect())
    for line in limits_in_words(start.limits, plan, peer.mapped.numel):
        log.log(logging.WARNING if DOES_NOT_FIT in line else logging.INFO, "%s", line)
    agent.send(peer.mapped)
    log.info("model of %s parameters is built; fetching the swarm's state", f"{peer.mapped.numel:,}")
    anchor: Anchor = agent.expect(Anchor, STATE_TIMEOUT_S)
    peer.sync.begin(anchor)
    peer.sync.share(peer.text.corpus.shared, plan.claim_rule.most_parts)
    return peer, anchor


class _Late:
    """A callback that is connected once its target exists; messages before that are dropped."""

    def __init__(self) -> None:
        self.target: Callable[[Message], None] | None = None

    def __call__(self, message: Message) -> None:
        if self.target is not None:
            self.target(message)


def _wind_down(peer: Peer, hooks: PeerHooks, metrics: MetricsFile, joined_at: int) -> int:
    """Leave in order: save, tell the agent, evaluate, export, report."""
    interrupted = not peer.sync.finished
    if peer.settings.save_steps:
        hooks.save_last()
    stopped: Stopped | None = None
    try:
        peer.agent.send(Stop(linger_s=0.0 if interrupted else LINGER_S))
    except AgentGoneError as gone:
        log.warning("the agent is gone already: %s", gone)
    sample = ""
    if interrupted:
        export_path = export_at_once(peer, hooks)
    else:
        if peer.settings.eval_every_rounds:
            hooks.validate(peer.settings.eval_sequences)
        peer.replica.write(peer.sync.result)
        sample = sample_text(peer.model, peer.text.tokenizer, SAMPLE_PROMPT, SAMPLE_TOKENS, peer.manifest.seed)
        export_path = export(peer, hooks)
    try:
        stopped = peer.agent.expect(Stopped, DRAIN_S if interrupted else LINGER_S + 5.0)
    except UserError as error:
        log.warning("the agent left without its figures: %s", error.what)
    missing = [] if hooks.close() else ["the last checkpoint"]
    missing += ["the exported model"] if export_path is None and not interrupted else []
    reason = peer.sync.goal or "stopped"
    metrics.write("end", reason=reason)
    report = report_of(peer, hooks, stopped, joined_at, export_path, sample)
    if peer.settings.report is not None and not write_report(peer.settings.report, {**report, "reason": reason}):
        missing.append("the report")
    log.info("left at round %d (%s)%s", peer.sync.round, reason, f"; the model: {export_path}" if export_path else "")
    if missing:
        log.error("not written: %s; the reasons are above", ", ".join(missing))
    if peer.sync.expelled:
        log.error("this peer %s; %s", peer.sync.expelled, ASK)
        return 2
    return 1 if missing else 0
