"""How much of its work a swarm keeps while its peers are killed and join again: real peers, real training."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import BenchReport, Say, benchmark_parser, check_count, documents, run_benchmark
from benchmarks.goodput_report import HEADER, PUBLISHED, GoodputRow, draw, figures, line, lost_to_starts
from peer.errors import UserError
from peer.telemetry.metrics import read_metrics
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import LAUNCH, LOOPBACK, TEXT, descendants, environment

NAME, PEERS, RATES, MINUTES = "goodput", 8, (0, 30, 60, 120), 10.0
ABOUT = "Tokens in committed rounds while peers are killed and join again, of those without faults"
NOTES = """\
{peers} peers (`atoll join`, one torch thread each) train a model of some thousand parameters on one machine for
{minutes:g} minutes at each rate of faults, after their first round of all. A step takes at least {step:g} s, so that
the computers of all fit into one; {steps} steps make a round, and each waits a fifth of that for a late peer.
A fault is SIGKILL to every process of one peer, drawn from a seed among those that take part, at even distances; the
same command starts again at once, in the same folder. `goodput` is tokens a second in committed rounds, of those at no
faults: what a victim loses, what survivors wait, and the time in which the victim starts again all count. `to next
commit` and `to return` are medians from a kill to the next round of any survivor, and to the first with the victim's
contribution. Decoupled DiLoCo (arXiv 2604.21428) publishes {published:g}% with chips and failures that are simulated.
All processes share this machine's cores, and every start takes some seconds of them: see the load."""
STEPS, STEP_S, LOOK_S, START_S, RETURN_S = 20, 0.25, 0.2, 400.0, 120.0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME, "Starts a bootstrap and peers, lets them train, and kills one of them now and then; rate after rate."
    )
    parser.add_argument("--peers", type=int, default=PEERS, metavar="N", help=f"default: {PEERS}")
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), metavar="N",
                        help=f"faults an hour; 0 is always among them (default: {' '.join(map(str, RATES))})")
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="N",
                        help=f"of each rate (default: {MINUTES:g})")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw goodput over the rates to this PNG")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Everything, one swarm after the other."""
    check_count("--peers", arguments.peers, 3)
    if not 0.2 <= arguments.minutes <= 600.0:
        raise UserError(f"--minutes={arguments.minutes:g}: must be from 0.2 to 600", "10 is a good length")
    if (wrong := next((rate for rate in arguments.rates if not 0 <= rate <= 3600), None)) is not None:
        raise UserError(f"--rates {wrong}: must be from 0 to 3600 faults an hour", "60 is one a minute")
    rows: list[GoodputRow] = []
    for rate in sorted({0, *arguments.rates}):
        with swarm(arguments.peers) as group:
            rows.append(group.row(rate, 60.0 * arguments.minutes, random.Random(f"{arguments.seed}/{rate}")))
        say(" | ".join(f"{name} {value}" for name, value in zip(HEADER, line(rows[-1], rows), strict=True)))
    if arguments.plot is not None:
        draw(arguments.plot, rows)
    notes = NOTES.format(
        peers=arguments.peers, minutes=arguments.minutes, step=STEP_S, steps=STEPS, published=PUBLISHED,
    )  # fmt: skip
    notes = f"{notes}\n{lost_to_starts(rows, arguments.peers)}".strip()
    options = ("--peers", str(arguments.peers), "--rates", *map(str, arguments.rates), "--minutes",
               f"{arguments.minutes:g}")  # fmt: skip
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=notes,
        table=(HEADER, *(line(row, rows) for row in rows)), options=options, more={"rows": documents(rows)},
    )  # fmt: skip


def fault_times(rate: int, seconds: float, drawn: random.Random) -> list[float]:
    """When peers are killed: one in each 1 / rate of an hour, at a random moment of its middle half."""
    distance = 3600.0 / rate if rate else seconds + 1.0
    return [distance * (index + drawn.uniform(0.25, 0.75)) for index in range(int(seconds // distance))]


@contextmanager
def swarm(count: int) -> Iterator[Group]:
    """A bootstrap, and peers that train."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="goodput-")))
        manifest = MANIFEST.format(hidden=16, recipe=DILOCO, steps=STEPS, wait=STEPS * STEP_S / 5, total="")
        bootstrap = BootstrapProcess(folder / "bootstrap", manifest)
        stack.callback(bootstrap.close)
        group = Group(folder, bootstrap.address, count)
        stack.callback(group.close)
        for index in range(count):
            group.start(index)
        yield group


class Group:
    """The peers of one swarm, each with a folder that a restart continues with."""

    def __init__(self, folder: Path, address: str, count: int) -> None:
        self._folder, self._address, self.count = folder, address, count
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "text.txt").write_text(TEXT * 400)

    def start(self, index: int) -> None:
        """Start one of them, for the first time or again."""
        own = self._folder / f"peer{index}"
        own.mkdir(exist_ok=True)
        command = [
            *LAUNCH, sys.executable, "-m", "benchmarks.wan_peer", str(STEP_S), "goes-on", self._address,
            "--output-dir", str(own), "--host-maddrs", LOOPBACK, "--nickname", own.name, "--logging-steps", "20",
            "--eval-every-rounds", "0", "--save-steps", "0", "--no-nat-port-map", "--torch-threads", "1", "--json",
            "--train-files", str(self._folder / "text.txt"),
        ]  # fmt: skip
        with (own / "console.log").open("ab") as log:
            self._running[index] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True
            )

    def kill(self, index: int) -> None:
        """End every process of a peer at once, as when its machine loses power."""
        process = self._running[index]
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all."""
        for index in self._running:
            self.kill(index)

    def row(self, rate: int, seconds: float, drawn: random.Random) -> GoodputRow:
        """Wait until all take part in one round, then look at them for so long, and kill at this rate."""
        self._wait_for_all()
        first = time.time()
        kills: list[tuple[float, int]] = []
        due = fault_times(rate, seconds, drawn)
        while (passed := time.time() - first) < seconds:
            if due and passed >= due[0]:
                due.pop(0)
                victim = drawn.choice(self._taking_part(kills))
                self.kill(victim)
                kills.append((time.time(), victim))
                self.start(victim)
            time.sleep(LOOK_S)
        load, deadline = os.getloadavg()[0], time.monotonic() + RETURN_S
        while self._away(kills) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        commits = [[event for event in self._commits(index) if event["time"] >= first] for index in range(self.count)]
        return row_of(rate, (first, seconds), commits, kills, load)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + START_S
        while not any(len(event["members"]) == self.count for event in self._commits(0)):
            ended = [index for index, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                words = " / ".join(path.read_text()[-300:] for path in sorted(self._folder.glob("peer*/console.log")))
                raise UserError(f"{self.count} peers made no round of all within {START_S:g} s: {words}")
            time.sleep(LOOK_S)

    def _taking_part(self, kills: Sequence[tuple[float, int]]) -> list[int]:
        """Peers that are back from every kill; all, if none is."""
        away = self._away(kills)
        return [index for index in range(self.count) if index not in away] or list(range(self.count))

    def _away(self, kills: Sequence[tuple[float, int]]) -> list[int]:
        return [victim for at, victim in kills if not any(event["time"] > at for event in self._commits(victim))]

    def _commits(self, index: int) -> list[dict[str, Any]]:
        events = read_metrics(self._folder / f"peer{index}" / "metrics.jsonl")
        return [event for event in events if event["event"] == "round" and event["status"] == "committed"]


def row_of(
    rate: int, window: tuple[float, float], commits: Sequence[Sequence[dict[str, Any]]],
    kills: Sequence[tuple[float, int]], load: float,
) -> GoodputRow:  # fmt: skip
    """Figures of one rate.

    Args:
        window: when it began, and for how many seconds rounds count.
        commits: of each peer, the rounds that it committed since, late returns included.
        kills: when, and which peer.
    """
    first, seconds = window
    rounds = {event["round"]: event for own in commits for event in own if event["time"] < first + seconds}
    to_commit, to_return = [], []
    for at, victim in kills:
        others = [event["time"] for index, own in enumerate(commits) if index != victim for event in own]
        to_commit += [min(time for time in others if time > at) - at] if max(others, default=0.0) > at else []
        own = [event["time"] for event in commits[victim] if event["time"] > at]
        to_return += [min(own) - at] if own else []
    return GoodputRow(
        rate=rate, seconds=seconds, tokens=sum(sum(event["weights"]) for event in rounds.values()),
        rounds=len(rounds), members=fmean([len(event["members"]) for event in rounds.values()] or [0.0]),
        faults=len(kills), commit_s=tuple(to_commit), return_s=tuple(to_return),
        load_average_1_min=load,
    )  # fmt: skip


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
