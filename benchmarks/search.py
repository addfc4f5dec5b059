"""The seeded search behind the default recipe: `python -m benchmarks.search --report docs/results/search.json`.

Every candidate must send at least 1000 times fewer bytes than fp32 data parallelism, so the codec decides the shortest
round. Chance draws the rest: inner optimizer and its rate, outer optimizer, its rate and momentum, decay of error
feedback. All candidates train on a quarter of the tokens; the best quarter of them on all;
the best of those is the recommendation. Data parallelism and DiLoCo (fp32, every 30 steps) get the same choice of inner
rates, so that a gap is not an untuned baseline. The recommendation is then compared on seeds that the search never saw,
with `atoll compare`; see docs/results/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.sim.job import one_thread, run_job
from peer.sim.label import parse_label
from peer.sim.network import gather_traffic, reduce_traffic, ring_allreduce_bytes
from peer.sim.plan import Swarm, Windows, build_swarm, load_task, meta_layout, plan_jobs, windows_for

PEERS, SEED, REDUCTION = 4, 0, 1000.0
TASK = "configs/sim/long.yaml"
TOKENS = "3145728"  # 93 for each of 33,696 parameters
INNER_RATES = (4e-3, 8e-3)
# codec, exchange, error feedback: what each costs is computed, and the round is made as long as it has to be.
WAYS = (
    ("int4", "reduce", False),
    ("fp4", "reduce", False),
    ("int2", "reduce", True),
    ("sign", "reduce", True),
    ("top64/4096+int2", "gather", True),
)
BASELINES = ("ddp", "diloco:steps_per_round=30")


def shortest_round(compressor: str, exchange: str, numel: int) -> int:
    """Steps per round with which PEERS peers send REDUCTION times fewer bytes than an fp32 all-reduce every step."""
    payload = codec(compressor).wire_bytes(numel)
    sent = gather_traffic([payload] * PEERS) if exchange == "gather" else reduce_traffic(PEERS, payload, payload)
    return math.ceil(REDUCTION * float(sent[0]) / ring_allreduce_bytes(numel, PEERS))


def draw(chance: random.Random, numel: int) -> str:
    """One candidate, as `atoll compare` takes it."""
    compressor, exchange, feedback = chance.choice(WAYS)
    settings = [
        f"compressor={compressor}",
        f"exchange={exchange}",
        f"steps_per_round={shortest_round(compressor, exchange, numel)}",
        f"inner.optimizer={chance.choice(('adamw', 'muon', 'muon'))}",
        f"inner.learning_rate={chance.choice(INNER_RATES)}",
        f"outer_learning_rate={chance.choice((0.5, 0.7, 0.9))}",
        f"outer_momentum={chance.choice((0.5, 0.6, 0.7, 0.8, 0.9))}",
    ]
    if feedback:
        settings.append(f"feedback.decay={chance.choice((0.9, 0.95, 1.0))}")
    return "diloco:" + ",".join(settings)


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

    def __init__(self, report: Path, windows: Windows, swarm: Swarm, console: Console) -> None:
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

    def best(self, labels: Sequence[str], tokens: int, keep: int) -> list[str]:
        """The `keep` labels with the least loss."""
        losses = {}
        for label in labels:
            losses[label] = self.loss(label, tokens)
            self.save()
        return sorted(losses, key=lambda label: losses[label])[:keep]


def main() -> None:
    """Search, print the ranking, write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="candidates to draw (default: 20)")
    parser.add_argument("--report", type=Path, default=Path("docs/results/search.json"), help="kept and continued")
    arguments = parser.parse_args()
    one_thread()
    console = Console()
    try:
        swarm = build_swarm(load_task(TASK), network="ideal", peers=PEERS, tokens=TOKENS, step_s=1.0, evaluations=1)
        numel = meta_layout(swarm.manifest).numel
        chance = random.Random(SEED)
        drawn = list(dict.fromkeys(draw(chance, numel) for _ in range(arguments.trials)))
        jobs = plan_jobs(swarm, [parse_label("ddp")], [SEED], swarm.steps_per_peer, meta_layout(swarm.manifest))
        search = Search(arguments.report, windows_for(swarm, jobs, ()), swarm, console)
        finalists = search.best(drawn, swarm.tokens // 4, max(1, len(drawn) // 4))
        ranking = search.best(finalists, swarm.tokens, len(finalists))
        for label in baselines():
            search.loss(label, swarm.tokens)
        search.save(ranking=ranking, recommended=ranking[0])
    except UserError as error:
        sys.exit(error.render("benchmarks.search"))
    _show(console, search, [*ranking, *baselines()], swarm.tokens)


def _show(console: Console, search: Search, labels: Sequence[str], tokens: int) -> None:
    reference = min(search.loss(label, tokens) for label in labels if label.startswith("ddp"))
    table = Table("recipe", "validation loss", "gap to the best ddp", box=None)
    for label in sorted(labels, key=lambda label: search.loss(label, tokens)):
        loss = search.loss(label, tokens)
        table.add_row(label, f"{loss:.4f}", f"{100 * (loss / reference - 1):+.2f}%")
    console.print(table)


if __name__ == "__main__":
    main()
