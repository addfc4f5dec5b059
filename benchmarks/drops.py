"""Contributions of honest peers that the aggregator of open runs drops, counted while four real peers train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, run_benchmark
from benchmarks.losses import TASK, trained
from peer.outer.record import RoundRecord
from peer.protocol.manifest import parse_manifest
from peer.sim.learner.language_task import language_task, load_windows

NAME = "drops"
ABOUT = "Contributions of honest peers that the gate of an open run drops, counted while real peers train"
NOTES = """\
{peers} agents with chains, signatures and sockets of this machine, each with the production trainer, make rounds of the
demo task (a byte-level Llama of 0.1M parameters) in an open run: aggregator gated. Each member judges the slices of
the shard that it reduces; a contribution counts as dropped by the share of a member's slices that it was left out of.
The fewer steps a round, the noisier is a contribution, and the harder is an honest one to tell from a hostile one."""
PEERS, TARGET = 4, 1.0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(NAME, "Trains four peers in an open run and counts what their gates drop.")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="of each length (default: 100)")
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 10], metavar="N", help="to a round (default: 2 10)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Each length of a round in a swarm of its own."""
    check_count("--rounds", arguments.rounds, 1)
    rows: list[dict[str, Any]] = []
    for steps in dict.fromkeys(arguments.steps):
        check_count("--steps", steps, 1)
        rows.append({"steps": steps, **judged(records_of(steps, arguments.rounds, arguments.seed))})
        say(str(rows[-1]))
    figures = [
        Figure(name=f"{row['steps']} steps a round: dropped", value=100.0 * row["dropped"], unit="%", limit=TARGET)
        for row in rows
    ]
    table = (("steps a round", "rounds", "contributions judged", "dropped"),
             *((str(row["steps"]), str(row["rounds"]), str(row["judged"]), f"{100.0 * row['dropped']:.2f}%")
               for row in rows))  # fmt: skip
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(figures), samples={}, table=table,
        notes=NOTES.format(peers=PEERS), options=("--rounds", str(arguments.rounds)), more={"rows": rows},
    )  # fmt: skip


def records_of(steps: int, rounds: int, seed: int) -> list[RoundRecord]:
    """What all members recorded of so many rounds."""
    torch.set_num_threads(1)
    head = TASK.read_text().split("\nrecipe:")[0].replace("\nseed: 1\n", f"\nseed: {seed}\n")
    text = (
        f"{head}\nrecipe: {{name: diloco, compressor: int8, steps_per_round: {steps}}}\n"
        f"trust: {{identity_work: 0}}\nrounds: {{straggler_wait_s: 30, min_group: {PEERS}}}\n"
    )
    manifest = parse_manifest(text.encode(), "benchmark")
    task = language_task(manifest, load_windows(manifest, ()), seed)
    with trained(text, manifest, task, steps * rounds, waits=True, peers=PEERS) as members:
        return [record for member in members for record in member.committed]


def judged(records: Sequence[RoundRecord]) -> dict[str, Any]:
    """How many contributions members judged, and what share of them was dropped."""
    count = sum(len(record.members) for record in records)
    dropped = sum(drop.slices / drop.of for record in records for drop in record.dropped)
    return {"rounds": len({record.round for record in records}), "judged": count, "dropped": dropped / count}


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
