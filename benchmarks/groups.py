"""What a round costs while its group stands, what it costs to let a peer in, and to go on without one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import (
    COLOURS,
    BenchReport,
    Figure,
    Say,
    benchmark_parser,
    check_count,
    median,
    quantile,
    run_benchmark,
)
from benchmarks.rounds import PHASES, together
from benchmarks.vectors import NOISE, Shape, vector_swarm
from tests.network.harness import TestSwarm
from tests.network.members import Member

NAME = "groups"
ABOUT = "A persistent group of real agents: seconds of a round, to admit a newcomer, and to continue after a kill"
SHAPE = Shape(hidden=128, intermediate=344, layers=5, steps_per_round=1)
PACE_S = 0.005
WARM_UP = 5
PROBATION = 10  # rounds; of open runs, unless a manifest says otherwise
TIMEOUT_S = 300.0
ROUND_LIMIT_S = 0.06
KILL_LIMIT_S = 1.0
GATHERED = ("sparseloco", "demo", "distro")
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Real agents average vectors of 1M parameters, int8, after every step. A round counts from the moment the\n"
        "last member is ready until the last one has installed the update; by phase, the slowest member of each.\n"
        "Then a newcomer joins: from its first anchor to the first round with all members. When it has passed its\n"
        "probation, its agent is killed: to the survivors' next round, which begins after its streams have ended.\n"
        "(After a newcomer that died in its first rounds, a run admits no other for a while.) Finally, rounds of\n"
        "recipes whose payloads are sent to all. All processes share this machine, also that of the trainers.",
    )
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="members of the group (default: 4)")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="rounds before anything else (default: 50)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="newcomers and kills (default: 5)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw rounds, newcomers and kills to this PNG")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Measure rounds, then newcomers and kills in turn."""
    check_count("--rounds", arguments.rounds, 2)
    check_count("--repeats", arguments.repeats, 1)
    check_count("--peers", arguments.peers, 2)
    names = NAMES[: arguments.peers]
    generator = torch.Generator().manual_seed(arguments.seed)
    with vector_swarm(SHAPE, arguments.seed, names) as swarm:
        rounds = persistent_rounds(swarm, arguments.rounds)
        say(f"{len(rounds)} rounds of {len(names)} peers, median {median([one['total'] for one in rounds]):.3f} s")
        let_in, go_on = [], []
        for number in range(arguments.repeats):
            let_in.append(newcomer(swarm, f"newcomer-{number}", generator))
            go_on.append(kill(swarm))
            say(f"let a newcomer in after {let_in[-1]:.2f} s, went on {go_on[-1]:.2f} s after a kill")
    samples: dict[str, Any] = {"rounds": rounds, "newcomers": let_in, "kills": go_on}
    found = figures(len(names), rounds, let_in, go_on)
    for recipe in GATHERED:
        with vector_swarm(replace(SHAPE, recipe=f"name: {recipe}"), arguments.seed, names) as swarm:
            samples[recipe] = persistent_rounds(swarm, arguments.rounds)
        seconds = median([one["total"] for one in samples[recipe]])
        say(f"{recipe}: {len(samples[recipe])} rounds, median {seconds:.3f} s")
        size = f"{len(names)} x {SHAPE.numel / 1e6:.1f}M"
        found.append(Figure(name=f"{size}, {recipe}: round, median", value=seconds, unit="s"))
    if arguments.plot is not None:
        draw(arguments.plot, len(names), samples)
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(found), samples=samples)


def persistent_rounds(swarm: TestSwarm, rounds: int) -> list[dict[str, float]]:
    """Seconds by phase of `rounds` rounds in a row that all members committed together, after a few to warm up.

    As with a recipe that averages every step, no member steps before its round is over.
    """
    for member in swarm.members:
        member.waits = True

    def found() -> list[dict[str, float]]:
        return together([member.committed for member in swarm.members])

    def reached() -> bool:
        """Asked after every message, on the agents' cores: counts before it sorts."""
        wanted = WARM_UP + rounds
        return all(len(member.committed) >= wanted for member in swarm.members) and len(found()) >= wanted

    swarm.drive(reached, TIMEOUT_S, PACE_S)
    for member in swarm.members:
        member.waits = False
    return found()[WARM_UP:]


def newcomer(swarm: TestSwarm, name: str, generator: torch.Generator) -> float:
    """Seconds from a newcomer's first anchor to the first round with all members."""
    (joined,) = swarm.add(name)
    joined.push = torch.randn(SHAPE.numel, generator=generator) * NOISE
    alive = _alive(swarm)
    return _seconds_until(swarm, lambda: bool(joined.committed) and len(joined.committed[-1].members) == len(alive))


def kill(swarm: TestSwarm) -> float:
    """Seconds from the kill of the newest member's agent, once it is established, to the survivors' next round."""
    newest = _alive(swarm)[-1]
    swarm.drive(lambda: len(newest.committed) > PROBATION, TIMEOUT_S, PACE_S)
    newest.kill()
    survivors = _alive(swarm)
    before = [member.round for member in survivors]
    return _seconds_until(
        swarm, lambda: all(member.round > round for member, round in zip(survivors, before, strict=True))
    )


def _alive(swarm: TestSwarm) -> list[Member]:
    return [member for member in swarm.members if not member.frozen]


def _seconds_until(swarm: TestSwarm, done: Callable[[], bool]) -> float:
    began = time.monotonic()
    swarm.drive(done, TIMEOUT_S, PACE_S)
    return time.monotonic() - began


def figures(
    peers: int, rounds: Sequence[dict[str, float]], let_in: Sequence[float], go_on: Sequence[float]
) -> list[Figure]:
    """Medians and 90th percentiles."""
    totals = [one["total"] for one in rounds]
    limit = ROUND_LIMIT_S if peers == 4 else None
    size = f"{peers} x {SHAPE.numel / 1e6:.1f}M"
    phases = [
        Figure(name=f"{size}: {phase}, median", value=median([one[phase] for one in rounds]), unit="s")
        for phase in PHASES
    ]
    return [
        Figure(name=f"{size}: round, median", value=median(totals), unit="s", limit=limit),
        Figure(name=f"{size}: round, p90", value=quantile(totals, 0.9), unit="s"),
        *phases,
        Figure(name="newcomer in a round with all members, median", value=median(let_in), unit="s"),
        Figure(name="newcomer in a round with all members, worst", value=max(let_in), unit="s"),
        Figure(name="next round after a kill, median", value=median(go_on), unit="s", limit=KILL_LIMIT_S),
        Figure(name="next round after a kill, worst", value=max(go_on), unit="s"),
    ]


def draw(path: Path, peers: int, samples: Mapping[str, Any]) -> None:
    """Write a PNG: the share of rounds that were over after so many seconds, and every newcomer and kill."""
    picture = Picture(figsize=(8.8, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    left, right = picture.subplots(1, 2, width_ratios=(1.9, 1.0))
    _draw_rounds(left, {"int8": samples["rounds"], **{recipe: samples[recipe] for recipe in GATHERED}})
    left.set_title(f"Rounds of {peers} x {SHAPE.numel / 1e6:.1f}M", fontsize=11, loc="left")
    _draw_changes(right, {"newcomer in": samples["newcomers"], "on after a kill": samples["kills"]})
    right.set_title("Who comes, who dies", fontsize=11, loc="left")
    picture.suptitle("A persistent group of real agents", fontsize=12, fontweight="bold", x=0.01, ha="left")
    picture.savefig(path, format="png")


def _draw_rounds(axes: Axes, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for (name, own), colour in zip(rounds.items(), COLOURS, strict=False):
        totals = sorted(one["total"] for one in own)
        shares = [100.0 * (index + 1) / len(totals) for index in range(len(totals))]
        axes.step([totals[0], *totals], [0.0, *shares], where="post", color=colour, label=name)
    axes.axvline(ROUND_LIMIT_S, color="#888888", linewidth=0.8, linestyle="--", label="goal, int8")
    axes.set_xscale("log")
    axes.set_xlabel("seconds, from when the last member is ready")
    axes.set_ylabel("% of rounds that are over")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(rounds) + 1, fontsize=9)


def _draw_changes(axes: Axes, changes: Mapping[str, Sequence[float]]) -> None:
    for place, (seconds, colour) in enumerate(zip(changes.values(), COLOURS, strict=False)):
        axes.plot([place] * len(seconds), seconds, "o", color=colour, alpha=0.5, markersize=5)
        axes.plot([place - 0.2, place + 0.2], [median(seconds)] * 2, color=colour, linewidth=2.0)
    axes.plot([0.7, 1.3], [KILL_LIMIT_S] * 2, color="#888888", linewidth=0.8, linestyle="--")
    axes.annotate("goal", (1.0, KILL_LIMIT_S), (0, 3), textcoords="offset points", ha="center", color="#888888")
    axes.set_xticks(range(len(changes)), list(changes))
    axes.set_xlim(-0.5, len(changes) - 0.5)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("seconds, median and each")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
