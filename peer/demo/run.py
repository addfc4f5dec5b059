"""`atoll demo`: flags, the play from curtain to curtain, the summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console

from peer.demo.children import Children
from peer.demo.folder import fresh_folder, manifest_text
from peer.demo.play import KILLED_AFTER_ROUND, LATECOMER, DemoError, Play, PlaySetup
from peer.demo.report import MIN_ROUNDS, demo_report, shortcomings
from peer.errors import UserError
from peer.settings import ENV_PREFIX
from peer.swarm.net.socket_folder import open_socket_folder
from peer.system.exit_signals import ending_signals
from peer.system.output_files import check_output_file, named_path, replace_file
from peer.system.preflight import check_shared_memory
from peer.telemetry.console import LiveSwarm, setup_logging
from peer.telemetry.figures import human_count
from peer.telemetry.metrics import finite_json

log = logging.getLogger(__name__)
DEFAULT_OUTPUT_DIR = Path("runs/demo")
DEFAULT_ROUNDS = 12
DEFAULT_SECONDS_LIMIT = 600.0
MAX_SEED = 2**31 - 16
INTERRUPTED = 130
_PAST_TENSE = {"join": "joined at", "kill": "was killed after", "abort": "gave up"}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What a person may choose.

    Raises:
        UserError: a value out of its range.
    """

    output_dir: Path = DEFAULT_OUTPUT_DIR
    report: Path | None = None
    rounds: int = DEFAULT_ROUNDS
    seconds_limit: float = DEFAULT_SECONDS_LIMIT
    seed: int | None = None
    json_lines: bool = False

    def __post_init__(self) -> None:
        if not MIN_ROUNDS <= self.rounds <= 1000:
            cues = f"a peer is killed after round {KILLED_AFTER_ROUND}, and the others must continue"
            raise UserError(f"--rounds={self.rounds}: must be from {MIN_ROUNDS} to 1000", f"In the demo {cues}.")
        if not 0 < self.seconds_limit <= 86_400:
            raise UserError(f"--seconds-limit={self.seconds_limit:g}: must be above 0 and at most 86400")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"--seed={self.seed}: must be from 0 to {MAX_SEED}")


def add_demo_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `atoll demo`."""
    add = parser.add_argument
    add("--report", type=named_path, metavar="FILE", help="also write the figures to this JSON file")
    add("--output-dir", type=named_path, default=DEFAULT_OUTPUT_DIR, metavar="DIR",
        help=f"logs, figures, picture, model (default: {DEFAULT_OUTPUT_DIR}; an earlier demo's is moved, not deleted)")
    add("--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N", help=f"rounds to make (default: {DEFAULT_ROUNDS})")
    add("--seconds-limit", type=float, default=DEFAULT_SECONDS_LIMIT, metavar="S",
        help=f"give up after this long (default: {DEFAULT_SECONDS_LIMIT:.0f})")
    add("--seed", type=int, metavar="N", help="seed of the model and of each peer's data order")
    add("--json", action="store_true", help="print JSON lines instead of the live table")


def run_demo_command(arguments: argparse.Namespace) -> int:
    """The parsed flags -> `run_demo`."""
    options = DemoOptions(
        output_dir=arguments.output_dir, report=arguments.report, rounds=arguments.rounds,
        seconds_limit=arguments.seconds_limit, seed=arguments.seed, json_lines=arguments.json,
    )
    return run_demo(options)


def run_demo(options: DemoOptions) -> int:
    """A whole swarm on this machine, watched from the terminal.

    Returns:
        0 when everything happened that should; 1 when a process died or something did not happen; 130 on Ctrl-C.

    Raises:
        UserError: the output folder, shared memory or a folder for sockets cannot be used.
    """
    console = Console()
    if options.report is not None:
        check_output_file(options.report, "--report", options.output_dir)
    check_shared_memory()
    open_socket_folder()
    with fresh_folder(options.output_dir) as folder:
        (folder / "run.yaml").write_text(manifest_text(options.rounds, options.seed), encoding="utf-8")
        setup_logging(folder / "demo.log", "info", options.json_lines, console)
        children = Children(child_environment(os.environ))
        try:
            with _termination_is_an_interrupt():
                return _perform(options, folder, children, console)
        except KeyboardInterrupt:
            log.warning("interrupted; the logs are in %s", folder)
            return INTERRUPTED
        except DemoError as error:
            tail = f"\nthe last lines of its log:\n{indent(error.log_tail, '  ')}" if error.log_tail else ""
            log.error("demo: %s%s\nall logs are in %s", error, tail, folder)
            return 1


def _perform(options: DemoOptions, folder: Path, children: Children, console: Console) -> int:
    as_table = False if options.json_lines else None
    try:
        with LiveSwarm(console, title="Atoll demo", live=as_table) as live:
            setup = PlaySetup(
                folder=folder, rounds=options.rounds, seconds_limit=options.seconds_limit, seed=options.seed
            )
            play = Play(setup, children, live)
            play.run()
    finally:
        with _signals(signal.SIG_IGN):  # takes less than 5 s, so impatience gains nothing
            children.stop()
    report = demo_report(play.peers, play.killed)
    problems = shortcomings(report, options.rounds)
    with _told_as(problems):
        for path in {folder / "report.json", options.report or folder / "report.json"}:
            replace_file(path, (json.dumps(finite_json(report), indent=2) + "\n").encode())
        from peer.demo.picture import draw  # matplotlib takes a second to load: only when there is something to draw

        draw(folder / "loss.png", play.peers, play.killed)
    if options.json_lines:
        console.file.write(json.dumps({"event": "summary", **report}) + "\n")
    else:
        sample = next((peer.report["sample"] for peer in play.peers if peer.report and peer.report["sample"]), "")
        console.print("\n" + summary(report, sample, folder), markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        log.error("not as expected: %s", problem)
    return 1 if problems else 0


@contextlib.contextmanager
def _told_as(problems: list[str]) -> Iterator[None]:
    """What cannot be written is one more problem; the summary is still shown."""
    try:
        yield
    except OSError as error:
        problems.append(f"cannot write {error.filename or 'the report'}: {error.strerror}")


def summary(report: Mapping[str, Any], sample: str, folder: Path) -> str:
    """The figures of a demo for a person."""
    first, last = report["val_loss_first"], report["val_loss_last"]
    loss = f"{first:.3f} -> {last:.3f}  ({(last / first - 1) * 100:+.1f}%)" if first and last else "not measured"
    lines = [
        f"rounds            {report['rounds']}",
        f"validation loss   {loss}",
        f"tokens            {human_count(report['tokens'])} by {len(report['peers'])} peers",
        f"traffic           {report['wire_bytes_per_parameter_per_round']:.2f} bytes sent per parameter and round",
    ]
    for number, event in enumerate(event for event in report["events"] if _is_notable(event)):
        reason = f" ({event['reason']})" if event["reason"] else ""
        text = f"{event['peer']} {_PAST_TENSE[event['kind']]} round {event['round']}{reason}"
        lines.append(f"{'' if number else 'events':<18}{text}")
    digests = {str(peer["state_digest"])[:16] for peer in report["peers"] if peer["left_at_round"] is None}
    lines.append(f"state             {'equal on all survivors: ' if len(digests) == 1 else ''}{', '.join(digests)}")
    lines += [f"picture           {folder / 'loss.png'}", f"model             {report['export_path']}"]
    lines += [f"report            {folder / 'report.json'}", f"logs              {folder}"]
    if sample:
        lines += ["", "what the model writes now:", *(f"  | {line}" for line in sample.splitlines())]
    return "\n".join(lines)


def _is_notable(event: Mapping[str, Any]) -> bool:
    """All but the entrance of the founders."""
    return bool(event["kind"] != "join" or event["peer"] == LATECOMER)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours, without settings meant for other peers, with one thread for each numerical library and no hub access."""
    kept = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _termination_is_an_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, and that also where a shell started us with SIGINT ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _signals(interrupt):
        yield


@contextlib.contextmanager
def _signals(handler: Callable[..., None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
