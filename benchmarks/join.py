"""How long a newcomer takes: seconds to its first step, rounds of the swarm to its first contribution."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from peer.demo.children import Children
from peer.demo.folder import manifest_text
from peer.demo.play import LOOPBACK, published_address
from peer.demo.report import Observed, observe
from peer.errors import UserError
from peer.settings import ENV_PREFIX

NAME = "join"
ABOUT = "Joining a running swarm of two peers on one machine: quickstart model, one torch thread each"
FOUNDERS = ("first", "second")
SWARM_ROUNDS = 10_000
START_TIMEOUT_S = 900.0  # a machine may be busy
JOIN_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 20.0
POLL_S = 0.1
STEP_LIMIT_S = 15.0
ROUNDS_LIMIT = 2


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Starts a bootstrap and two peers, waits until they average, and then lets one newcomer after another join\n"
        "with `atoll join`, each in a fresh folder. Seconds count from the start of the command and include loading\n"
        "Python, torch, the text and the swarm's state.",
    )
    parser.add_argument("--joins", type=int, default=3, metavar="N", help="newcomers, one after another (default: 3)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Run the swarm, let the newcomers join and leave."""
    check_count("--joins", arguments.joins, 1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    children = Children(environment)
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder:
        swarm = RunningSwarm(Path(folder), children, arguments.seed)
        try:
            say("starting a bootstrap and two peers")
            swarm.start()
            joins = []
            for number in range(arguments.joins):
                joins.append(swarm.join(f"newcomer-{number + 1}", arguments.seed + len(FOUNDERS) + number))
                say(f"newcomer {number + 1}: {describe(joins[-1])}")
        finally:
            children.stop()
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(joins), samples={"joins": joins})


class RunningSwarm:
    """A bootstrap and two founders as child processes.

    Args:
        folder: gets a folder and a log for each process.
        children: starts and ends them.
        seed: of the run; makes the data order of each peer a given one.
        rounds: after which the run ends.
    """

    def __init__(self, folder: Path, children: Children, seed: int, rounds: int = SWARM_ROUNDS) -> None:
        self._folder, self._children, self._seed, self._rounds = folder, children, seed, rounds
        self.address = ""

    def start(self) -> None:
        """Until both founders have committed two rounds."""
        manifest = self._folder / "run.yaml"
        manifest.write_text(manifest_text(self._rounds, self._seed))
        command = [sys.executable, "-m", "bootstrap.cli", str(manifest), "--json", "--host-maddrs", LOOPBACK]
        command += ["--state-dir", str(self._folder / "bootstrap"), "--no-nat-port-map"]
        log_path = self._children.start("bootstrap", command, self._folder / "bootstrap.log").log_path
        self._wait(lambda: published_address(log_path) is not None, START_TIMEOUT_S, "no address from the bootstrap")
        self.address = str(published_address(log_path))
        for index, name in enumerate(FOUNDERS):
            self._start_peer(name, self._seed + index)
        self._wait(
            lambda: all(len(self._observe(name).committed) >= 2 for name in FOUNDERS),
            START_TIMEOUT_S,
            "the first two peers did not average",
        )

    def join(self, name: str, data_seed: int) -> dict[str, Any]:
        """One newcomer, from its command to its first committed round; then it leaves."""
        began = time.time()
        child = self._start_peer(name, data_seed)
        self._wait(lambda: bool(self._observe(name).committed), JOIN_TIMEOUT_S, f"{name} committed no round")
        newcomer, witness = self._observe(name), self._observe(FOUNDERS[0])
        child.terminate()
        child.wait(LEAVE_TIMEOUT_S)
        return timeline(began, newcomer, witness)

    def _start_peer(self, name: str, data_seed: int) -> Any:
        command = [sys.executable, "-m", "peer.cli", "join", self.address, "--output-dir", str(self._folder / name)]
        command += ["--nickname", name, "--host-maddrs", LOOPBACK, "--no-nat-port-map", "--torch-threads", "1"]
        command += ["--device", "cpu", "--save-steps", "0", "--logging-steps", "1", "--data-seed", str(data_seed)]
        return self._children.start(name, command, self._folder / f"{name}.log").process

    def _observe(self, name: str) -> Observed:
        return observe(name, self._folder / name)

    def _wait(self, until: Callable[[], bool], timeout_s: float, problem: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in self._folder.glob("*.log"))
                raise UserError(f"{problem} within {timeout_s:g} s", logs)
            time.sleep(POLL_S)


def timeline(began: float, newcomer: Observed, witness: Observed) -> dict[str, Any]:
    """What happened to a newcomer, in seconds since its command and in rounds of the swarm.

    Args:
        began: unix seconds of the command.
        newcomer: has a first step and a committed round.
        witness: a peer that was there all the time.
    """
    first_step = newcomer.of("step")[0]["time"]
    first_round = newcomer.committed[0]
    at_step = _round_at(witness, first_step)
    return {
        "first_step_s": first_step - began,
        "first_committed_round_s": first_round["time"] - began,
        "swarm_round_at_command": _round_at(witness, began),
        "joined_at_round": newcomer.of("start")[0]["round"],
        "swarm_round_at_first_step": at_step,
        "first_committed_round": first_round["round"],
        "rounds_to_first_committed": first_round["round"] - at_step,
        "aborted_rounds": sum(event["status"] == "aborted" for event in newcomer.of("round")),
    }


def _round_at(witness: Observed, time_s: float) -> int:
    return max((event["round"] for event in witness.committed if event["time"] <= time_s), default=0)


def describe(join: dict[str, Any]) -> str:
    """For a progress line."""
    return (
        f"first step after {join['first_step_s']:.1f} s, with the swarm at round {join['swarm_round_at_first_step']}; "
        f"part of round {join['first_committed_round']}"
    )


def figures(joins: Sequence[dict[str, Any]]) -> tuple[Figure, ...]:
    """Medians over the newcomers, and the worst."""
    steps = [join["first_step_s"] for join in joins]
    rounds = [float(join["rounds_to_first_committed"]) for join in joins]
    committed = [join["first_committed_round_s"] for join in joins]
    return (
        Figure(name="command to first step, median", value=median(steps), unit="s", limit=STEP_LIMIT_S),
        Figure(name="command to first step, worst", value=max(steps), unit="s"),
        Figure(name="rounds to first committed, median", value=median(rounds), unit="rounds", limit=ROUNDS_LIMIT),
        Figure(name="rounds to first committed, worst", value=max(rounds), unit="rounds", limit=ROUNDS_LIMIT),
        Figure(name="command to first committed round, median", value=median(committed), unit="s"),
    )


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
