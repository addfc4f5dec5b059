"""How much of their time peers on slow, distant lines compute, and what they send: real peers, real training."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import BenchReport, Say, benchmark_parser, check_count, documents, run_benchmark
from benchmarks.wan_report import HEADER, WanRow, draw, figures, line, peak_mbit
from peer.errors import UserError
from peer.telemetry.metrics import read_metrics
from tests.network.bootstraps import BootstrapProcess
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.relay import Link

NAME, PEERS, FRAGMENTS = "wan", 4, 4
ABOUT = "How much of their time four peers compute that train a model together over slow, distant lines"
NOTES = """\
Four peers (`atoll join`) train the quickstart's model of 0.8M parameters, each in a network namespace behind a relay
with {slow:g} Mbit/s each way, {delay:g} ms one way and {loss:.0%} loss, for {seconds:g} s after their first two
rounds and the first that all are in (but the slow one, if one is); on {fast:g} Mbit/s, one of 8M parameters; `ddp` on
{ddp:g} Mbit/s without loss. A step takes at least {step:g} s, so that four computers fit into one. {steps} steps make
a round; where the recipe streams, each of {fragments} fragments has one in so many steps. `computing` is the share of
a peer's time in which its trainer does not wait for its agent: the median over the peers, and the least. `waiting`:
the trainer stops until its round is over, as in published DiLoCo. One slow peer takes ten times as long for a step.
`peak` is the mean rate in the busiest {window:g} s, the time between two fragments, with everything that goes over
the line; on {fast:g} Mbit/s streaming is compared with DiLoCo. All processes share this machine's cores with whatever
else ran: see the load. A peak between two looks is that of half a second. In the picture DiLoCo's contribution and
result are seconds apart, so that no window holds both, while one holds parts of two fragments; and what does not
belong to a round is always there."""
RECIPE_TEXT = {
    "diloco": "name: diloco, compressor: int8, outer_momentum: 0.6",
    "streaming-diloco": f"name: streaming-diloco, compressor: int8, schedule: {{num_fragments: {FRAGMENTS}}}",
    "lagoon": "name: lagoon",
    "ddp": "name: ddp",
}
SLOW_MBIT, FAST_MBIT, DELAY_MS, LOSS = 2.0, 20.0, 100.0, 0.01
DDP_MBIT = 16.0  # and no loss: on slower lines ddp makes no round in minutes
STEPS, STEP_S, SLOWNESS = 20, 0.5, 10.0
LOOK_S, START_S, WARM_ROUNDS = 0.5, 360.0, 2
PORT = "/ip4/0.0.0.0/tcp/4001"
LARGER = {  # what the quickstart's model and batches are on the fast line: 8M parameters, and steps that fit
    "hidden_size: 128": "hidden_size: 384", "intermediate_size: 344": "intermediate_size: 1216",
    "sequence_length: 128": "sequence_length: 64", "batch_sequences: 8": "batch_sequences: 1",
}  # fmt: skip
MANIFEST = Path(__file__).parent.parent / "configs" / "runs" / "quickstart.yaml"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: a recipe, whether trainers wait, the line, whether one peer is slow.

    Attributes:
        last_mbit: of the last peer's line, where it has another one.
        steps: of a round.
        step_s: a step takes at least so long, of the slow peer SLOWNESS times as long.
    """

    recipe: str
    waits: bool = False
    mbit: float = SLOW_MBIT
    slow: bool = False
    loss: float = LOSS
    peers: int = PEERS
    last_mbit: float | None = None
    steps: int = STEPS
    step_s: float = STEP_S

    @property
    def what(self) -> str:
        """For a message."""
        waiting, slow = ", waiting" if self.waits else "", ", one slow peer" if self.slow else ""
        return f"{self.recipe}{waiting} on {self.mbit:g} Mbit/s{slow}"


def cases(chosen: Sequence[str]) -> list[Case]:
    """In the order of the table."""
    found = [Case(recipe="diloco", waits=True)] if "diloco" in chosen else []
    found += [Case(recipe=name) for name in chosen if name != "ddp"]
    found += [Case(recipe=name, slow=True) for name in chosen if name != "ddp"]
    found += [Case(recipe=name, mbit=FAST_MBIT) for name in ("diloco", "streaming-diloco") if name in chosen]
    return found + [Case(recipe="ddp", mbit=DDP_MBIT, loss=0.0)] * ("ddp" in chosen)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Makes network namespaces (as root; with iproute2 and /dev/net/tun), puts a bootstrap and four peers into\n"
        "them, and lets them train over shaped lines, recipe after recipe.",
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPE_TEXT), choices=list(RECIPE_TEXT), metavar="NAME",
                        help=f"default: {' '.join(RECIPE_TEXT)}, as far as a swarm runs them")  # fmt: skip
    parser.add_argument("--seconds", type=int, default=40, metavar="N", help="of each measurement (default: 40)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates over time to this PNG")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Everything, one swarm after the other."""
    check_count("--seconds", arguments.seconds, 10)
    rows: list[WanRow] = []
    missing: list[dict[str, str]] = []
    for case in cases(list(dict.fromkeys(arguments.recipes))):
        try:
            with swarm(case) as machines:
                rows.append(machines.row(case, arguments.seconds))
        except UserError as error:
            say(f"{case.what}: {error}")
            missing.append({"case": case.what, "reason": error.what})
            continue
        say(" | ".join(f"{name} {value}" for name, value in zip(HEADER, line(rows[-1]), strict=True)))
    if not rows:
        raise UserError("nothing could be measured", "see above")
    if arguments.plot is not None:
        draw(arguments.plot, rows)
    return report_of(rows, missing, arguments)


def report_of(rows: Sequence[WanRow], missing: Sequence[dict[str, str]], arguments: argparse.Namespace) -> BenchReport:
    """The report of these rows; `missing`: cases that could not be measured, and why."""
    notes = NOTES.format(
        slow=SLOW_MBIT, fast=FAST_MBIT, ddp=DDP_MBIT, delay=DELAY_MS, loss=LOSS, seconds=arguments.seconds, step=STEP_S,
        steps=STEPS, fragments=FRAGMENTS, window=STEPS * STEP_S / FRAGMENTS,
    )  # fmt: skip
    for one in missing:
        notes = f"{notes} Not measured: {one['case']}: {one['reason'].split(':')[0]}."
    for row in rows:
        if not row.rounds:
            notes = f"{notes} The first peer was in no round within the time: {row.what} on {row.mbit:g} Mbit/s."
    options = ("--recipes", *arguments.recipes, "--seconds", str(arguments.seconds))
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows, FRAGMENTS), samples={}, notes=notes,
        table=(HEADER, *map(line, rows)), options=options, more={"rows": documents(rows), "not_measured": missing},
    )  # fmt: skip


def manifest_of(case: Case) -> str:
    """The quickstart's, with another recipe, and on a fast line a larger model."""
    head, rest = MANIFEST.read_text().split("\nrecipe:", 1)
    for own, larger in LARGER.items() if case.mbit == FAST_MBIT else ():
        assert own in head
        head = head.replace(own, larger)
    tail = rest[rest.index("\nrounds:") :]
    steps = "" if case.recipe == "ddp" else f", steps_per_round: {case.steps}"
    recipe = RECIPE_TEXT.get(case.recipe, f"name: {case.recipe}")
    return f"{head}\nrecipe: {{{recipe}{steps}}}\ntrust: {{identity_work: 0, mode: private}}\n{tail}"


@contextmanager
def swarm(case: Case) -> Iterator[Machines]:
    """A bootstrap on a fast line, and peers that train."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wan-")))
        internet = stack.enter_context(Internet())
        internet.host("bootstrap")
        with internet.hosts["bootstrap"].entered():
            bootstrap = BootstrapProcess(folder / "bootstrap", manifest_of(case), port=4001, host="0.0.0.0")
        stack.callback(bootstrap.close)
        address = f"/ip4/{internet.addresses['bootstrap']}/tcp/4001/p2p/{bootstrap.address.split('/p2p/')[1]}"
        machines = Machines(folder, internet)
        for index in range(case.peers):
            machines.start(index, address, case)
            stack.callback(machines.end, index)
        yield machines


class Machines:
    """The peers of one swarm.

    Args:
        folder: of the folders of all peers.
    """

    def __init__(self, folder: Path, internet: Internet) -> None:
        self._folder, self._internet = folder, internet
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, index: int, address: str, case: Case) -> None:
        """Start one of them behind its line; the last is the slow one, if any is."""
        name, own = f"peer{index}", self._folder / f"peer{index}"
        own.mkdir()
        last = index == case.peers - 1
        mbit = case.last_mbit if last and case.last_mbit is not None else case.mbit
        self._internet.behind(name, Link(mbit=mbit, delay_ms=DELAY_MS, loss=case.loss, queue_ms=500.0, seed=index))
        slow = SLOWNESS if case.slow and last else 1.0
        command = [
            sys.executable, "-m", "benchmarks.wan_peer", str(case.step_s * slow), "waits" if case.waits else "goes-on",
            address, "--output-dir", str(own), "--host-maddrs", PORT, "--nickname", name, "--logging-steps", "1",
            "--eval-every-rounds", "0", "--save-steps", "0", "--no-nat-port-map", "--torch-threads", "1", "--json",
            "--train-files", *map(str, sorted(Path(asyncio.__file__).parent.glob("*.py"))),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._internet.hosts[name].entered(), (own / "console.log").open("wb") as log:
            self._running.append(subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            ))  # fmt: skip

    def end(self, index: int) -> None:
        """Its agent and daemon end with it."""
        self._running[index].send_signal(signal.SIGKILL)
        self._running[index].wait()

    def await_rounds(
        self, peers: int, count: int = WARM_ROUNDS, timeout_s: float = START_S, *, together: int = 1
    ) -> None:
        """Until each of the first `peers` has committed so many, the newest with at least `together` members."""
        deadline = time.monotonic() + timeout_s
        while not all(_made(self.rounds(index), count, together) for index in range(peers)):
            if any(peer.poll() is not None for peer in self._running) or time.monotonic() > deadline:
                of = f" of {together}" if together > 1 else ""
                raise UserError(f"the peers made no {count} rounds{of} within {timeout_s:g} s: {self._last_words()}")
            time.sleep(LOOK_S)

    def row(self, case: Case, seconds: float) -> WanRow:
        """Wait until all take part in one round, then look at them for so many seconds."""
        alike = case.peers - case.slow
        self.await_rounds(alike, together=alike)
        began, first = time.monotonic(), time.time()
        sent = [(0.0, float(self._sent(0)))]
        while sent[-1][0] < seconds:
            time.sleep(LOOK_S)
            sent.append((time.monotonic() - began, float(self._sent(0))))
        rounds = [event for event in self.rounds(0) if event["time"] >= first]
        window_s = STEPS * STEP_S / FRAGMENTS
        start = sent[0][1]
        sent = [(at, total - start) for at, total in sent]
        return WanRow(
            recipe=case.recipe, waits=case.waits, mbit=case.mbit, slow=case.slow, rounds=len(rounds),
            computing=tuple(self._computing(index, first) for index in range(case.peers)),
            members=fmean([len(event["members"]) for event in rounds] or [0.0]), window_s=window_s,
            bytes_a_round=sent[-1][1] / max(1, len(rounds)), peak_mbit=peak_mbit(sent, window_s),
            load_average_1_min=os.getloadavg()[0], sent=tuple(sent),
        )  # fmt: skip

    def events(self, index: int, kind: str) -> list[dict[str, Any]]:
        """The metrics of one peer, of one kind."""
        events = read_metrics(self._folder / f"peer{index}" / "metrics.jsonl")
        return [event for event in events if event["event"] == kind]

    def rounds(self, index: int) -> list[dict[str, Any]]:
        """That it has committed."""
        return [event for event in self.events(index, "round") if event["status"] == "committed"]

    def _computing(self, index: int, first: float) -> float:
        """Percent of the time since `first` in which the trainer did not wait for its agent."""
        steps = [event for event in self.events(index, "step") if event["time"] >= first]
        if len(steps) < 2:
            return 0.0
        waited_s = steps[-1]["handover_wait_s"] - steps[0]["handover_wait_s"]
        return float(100.0 * (1.0 - waited_s / (steps[-1]["time"] - steps[0]["time"])))

    def _sent(self, index: int) -> int:
        """Bytes that have left the line of a peer: what its side of the router has received."""
        with self._internet.hub.entered():
            table = Path("/proc/thread-self/net/dev").read_text()
        device = f"t{self._internet.addresses[f'peer{index}'].split('.')[2]}"
        counted = dict(row.split(":") for row in table.splitlines() if ":" in row)
        return int({name.strip(): row for name, row in counted.items()}[device].split()[0])

    def _last_words(self) -> str:
        tails = self._folder.glob("peer*/console.log")
        return " / ".join(path.read_text()[-300:] for path in sorted(tails))


def _made(rounds: Sequence[dict[str, Any]], count: int, together: int) -> bool:
    return len(rounds) >= count and len(rounds[-1]["members"]) >= together


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
