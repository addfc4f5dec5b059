"""The seeded search behind the default recipe: `python -m benchmarks.search --report docs/results/search.json`.

Every candidate must send at least 1000 times fewer bytes than fp32 data parallelism, so its codec decides how long a
round has to be. The search starts from DiLoCo's published numbers with two bits a value, and changes one knob at a
time, in the order of KNOBS: what hides the effect of others first, as the noise of a single anchor does. A change that
lowers the validation loss stays. Data parallelism and DiLoCo
(fp32, every 30 steps) get the same inner rates to choose from, so that no gap is that of an untuned baseline. The
recommendation is then compared on seeds that the search never saw, with `atoll compare`; see docs/results/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.sim.campaign.job import one_thread, run_job
from peer.sim.campaign.label import parse_label
from peer.sim.campaign.plan import SwarmPlan, WindowPair, build_swarm, load_task, meta_layout, plan_jobs, windows_for
from peer.sim.world.network import gather_traffic, reduce_traffic, ring_allreduce_bytes

PEERS, SEED, REDUCTION = 4, 0, 1000.0
TASK = "configs/sim/long.yaml"
TOKENS = "3145728"  # 93 for each of 33,696 parameters
# What each knob may be set to; `way` stands for codec, exchange and error feedback.
KNOBS: dict[str, tuple[str, ...]] = {
    "average": ("0", "0.75"),
    "inner.optimizer": ("adamw", "muon"),
    "outer": ("0.7 0.9", "0.7 0.8", "0.9 0.7"),
    "way": ("int2 reduce feedback", "int4 reduce"),
    "inner.learning_rate": ("0.008", "0.004"),
    "feedback.decay": ("1.0",),
}
INNER_RATES = ("0.008", "0.004")
BASELINES = ("ddp", "diloco:steps_per_round=30")


def shortest_round(compressor: str, exchange: str, numel: int) -> int:
    """Steps per round with which PEERS peers send REDUCTION times fewer bytes than an fp32 all-reduce every step."""
    payload = codec(compressor).wire_bytes(numel)
    sent = gather_traffic([payload] * PEERS) if exchange == "gather" else reduce_traffic(PEERS, payload, payload)
    return math.ceil(REDUCTION * float(sent[0]) / ring_allreduce_bytes(numel, PEERS))


def label_of(point: dict[str, str], numel: int) -> str:
    """A choice of knobs, as `atoll compare` takes it."""
    compressor, exchange, *feedback = point["way"].split()
    rate, momentum = point["outer"].split()
    settings = {
        "compressor": compressor,
        "exchange": exchange,
        "steps_per_round": str(shortest_round(compressor, exchange, numel)),
        "outer_learning_rate": rate,
        "outer_momentum": momentum,
        **{key: value for key, value in point.items() if key in ("inner.optimizer", "inner.learning_rate", "average")},
    }
    if feedback:
        settings["feedback.decay"] = point["feedback.decay"]
    return "diloco:" + ",".join(f"{key}={value}" for key, value in settings.items())


def baselines() -> Iterator[str]:
    """Data parallelism and DiLoCo with every inner rate."""
    for base in BASELINES:
        for rate in INNER_RATES:
            yield f"{base}{',' if ':' in base else ':'}inner.learning_rate={rate}"


class Search:
    """Runs labels once each and remembers their rows in the report file.

    Args:
        report: where rows are kept; what is there already is not run again.
        windows: the text.
        swarm: the task at full length.
    """

    def __init__(self, report: Path, windows: WindowPair, swarm: SwarmPlan, console: Console) -> None:
        self._report, self._windows, self._swarm, self._console = report, windows, swarm, console
        self._layout = meta_layout(swarm.manifest)
        self.rows: list[dict[str, Any]] = []
        if report.exists():
            self.rows = json.loads(report.read_text())["rows"]

    def loss(self, label: str, tokens: int) -> float:
        """Validation loss after `tokens`; infinity for a run that diverged."""
        known = next((r for r in self.rows if r["label"] == label and r["goal_tokens"] == tokens), None)
        row = known or self._run(label, tokens)
        return float(row["val_loss"]) if row["val_loss"] is not None else math.inf

    def _run(self, label: str, tokens: int) -> dict[str, Any]:
        swarm = replace(self._swarm, tokens=tokens)
        jobs = plan_jobs(swarm, [parse_label(label)], [SEED], swarm.steps_per_peer, self._layout)
        row = {**run_job(jobs[0], self._windows), "goal_tokens": tokens}
        self.rows.append({key: value for key, value in row.items() if key not in ("curve", "tally")})
        loss = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
        self.save()
        seconds = row["wall_seconds"] or 0.0
        self._console.print(f"{tokens:>9,} tokens  {loss}  {seconds:4.0f} s  {label}", highlight=False)
        return row

    def save(self, **more: Any) -> None:
        """Write everything that is known."""
        command = f"python -m benchmarks.search {' '.join(sys.argv[1:])}"
        document = {"command": command, "task": TASK, "peers": PEERS, "seed": SEED, **more, "rows": self.rows}
        partial = self._report.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self._report)

    def descend(self, numel: int) -> dict[str, str]:
        """One knob after the other, each to its best value with the others as they are."""
        point = {knob: values[0] for knob, values in KNOBS.items()}
        for knob, values in KNOBS.items():
            losses = {}
            for value in values:
                losses[value] = self.loss(label_of({**point, knob: value}, numel), self._swarm.tokens)
            point[knob] = min(losses, key=lambda value: losses[value])
        return point


def main() -> None:
    """Search, print the ranking, write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=Path("docs/results/search.json"), help="kept and continued")
    arguments = parser.parse_args()
    one_thread()
    console = Console()
    try:
        swarm = build_swarm(load_task(TASK), network="ideal", peers=PEERS, tokens=TOKENS, step_s=1.0, evaluations=1)
        layout = meta_layout(swarm.manifest)
        jobs = plan_jobs(swarm, [parse_label("ddp")], [SEED], swarm.steps_per_peer, layout)
        search = Search(arguments.report, windows_for(swarm, jobs, ()), swarm, console)
        for label in baselines():
            search.loss(label, swarm.tokens)
        best = search.descend(layout.numel)
    except UserError as error:
        sys.exit(error.render("benchmarks.search"))
    search.save(recommended=label_of(best, layout.numel))
    _show(console, search)


def _show(console: Console, search: Search) -> None:
    reference = min(row["val_loss"] for row in search.rows if row["recipe"] == "ddp")
    table = Table("recipe", "validation loss", "gap to the best ddp", "reduction", box=None)
    for row in sorted(search.rows, key=lambda row: row["val_loss"] or math.inf):
        gap = f"{100 * (row['val_loss'] / reference - 1):+.2f}%"
        table.add_row(row["label"], f"{row['val_loss']:.4f}", gap, f"{row['reduction_vs_ddp']:.0f}x")
    console.print(table)


if __name__ == "__main__":
    main()
