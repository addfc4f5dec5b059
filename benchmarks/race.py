"""What the search and the races of recipes share: simulated runs of a task, each kept as soon as it has ended."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import COLOURS, RESUME, ResumableRows, Say, benchmark_parser, check_count
from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.protocol.manifest import RunManifest
from peer.sim.campaign.job import Row, run_job
from peer.sim.campaign.label import parse_label
from peer.sim.campaign.plan import Job, SwarmPlan, WindowPair, build_swarm, meta_layout, plan_jobs, windows_for
from peer.sim.campaign.pool import JobProgress, Pool
from peer.sim.world.network import reduce_traffic, ring_allreduce_bytes
from peer.system.resources import usable_cores

PEERS = 4
DATA_PARALLELISM = "ddp"
OPTIMIZERS = ("adamw", "muon")
RATES = (0.004, 0.008, 0.016)
Gaps = Mapping[float, float]  # place -> percent of loss above data parallelism
HEADER = ("recipe", "validation loss", "gap to the best ddp", "fewer bytes than ddp")


@dataclass(frozen=True, kw_only=True)
class RaceRow:
    """One run.

    Attributes:
        numel: parameters of the model.
        tokens: of all peers together.
        loss: of the validation text at the end; None for a run that diverged.
        reduction: how many times fewer bytes each peer sent than with fp32 gradients at every step.
    """

    label: str
    numel: int
    peers: int
    tokens: int
    seed: int
    loss: float | None
    reduction: float
    seconds: float

    @property
    def recipe(self) -> str:
        """The name before the label's colon."""
        return self.label.split(":")[0]

    @property
    def rank(self) -> float:
        """To sort by: the loss, or infinity."""
        return math.inf if self.loss is None else self.loss


def race_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The flags of all races."""
    parser = benchmark_parser(name, description)
    parser.set_defaults(seed=0)
    parser.add_argument("--jobs", type=int, default=usable_cores(), metavar="N", help="runs at once (default: cores)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help=RESUME.format(same="model, tokens and seed"))
    return parser


class Race:
    """Runs of one model, several at a time.

    Args:
        kept: all rows, which later sessions take over.
        jobs: runs at the same time.
    """

    def __init__(
        self, manifest: RunManifest, kept: ResumableRows[RaceRow], jobs: int, seed: int, say: Say
    ) -> None:
        check_count("--jobs", jobs, 1)
        self._manifest, self._kept, self._jobs, self._seed, self._say = manifest, kept, jobs, seed, say
        layout = meta_layout(manifest)
        self._layout, self.numel = layout, layout.numel
        self._windows: WindowPair | None = None
        self.rows: list[RaceRow] = []

    def run(self, labels: Sequence[str], tokens: int) -> list[RaceRow]:
        """The rows of these labels after `tokens`, in their order."""
        swarm = build_swarm(
            self._manifest, network="ideal", peers=PEERS, tokens=str(tokens), step_s=1.0, evaluations=1
        )
        missing = [label for label in dict.fromkeys(labels) if self._known(label, tokens) is None]
        jobs = plan_jobs(swarm, [parse_label(label) for label in missing], [self._seed], swarm.steps_per_peer,
                         self._layout)  # fmt: skip
        if jobs:
            with self._rows_of(jobs, swarm) as rows:
                for number, (job, ended) in enumerate(rows, 1):
                    if ended["status"] in ("failed", "stopped"):
                        raise UserError(f"{job.label}: {ended['note']}")
                    kept = self._kept.keep(RaceRow(
                        label=job.label, numel=self.numel, peers=PEERS, tokens=tokens, seed=self._seed,
                        loss=ended["val_loss"], reduction=ended["reduction_vs_ddp"], seconds=ended["wall_seconds"],
                    ))
                    of = f"{number} of {len(jobs)}, {self.numel:,} parameters, {tokens:,} tokens"
                    self._say(f"{of}: {kept.rank:.4f} after {kept.seconds:.0f} s, {job.label}")
        found = [row for label in labels if (row := self._known(label, tokens)) is not None]
        self.rows = list(dict.fromkeys([*self.rows, *found]))
        return found

    @contextmanager
    def _rows_of(self, jobs: Sequence[Job], swarm: SwarmPlan) -> Iterator[Iterator[tuple[Job, Row]]]:
        self._windows = self._windows or windows_for(swarm, jobs, ())
        if min(self._jobs, len(jobs)) == 1:
            yield ((job, run_job(job, self._windows)) for job in jobs)
            return
        with Pool(self._jobs, self._windows, _Unwatched()) as pool:
            yield pool.run(jobs)

    def steps(self, tokens: int) -> int:
        """Of each peer."""
        return tokens // (PEERS * self._manifest.tokens_per_step)

    def best(self, labels: Sequence[str], tokens: int) -> int:
        """The place of the label with the lowest loss."""
        ranks = [row.rank for row in self.run(labels, tokens)]
        return ranks.index(min(ranks))

    def best_inner(self, start: str, tokens: int) -> list[str]:
        """The best rate of each inner optimizer behind the label `start`, with a worse one tried on either side.

        Returns:
            The settings as a label has them, those of the better optimizer first.
        """
        found = []
        for optimizer in OPTIMIZERS:
            rates = list(RATES)
            while True:
                settings = [f"inner.optimizer={optimizer},inner.learning_rate={rate:g}" for rate in rates]
                rows = self.run([start + setting for setting in settings], tokens)
                best = min(range(len(rows)), key=lambda place: rows[place].rank)
                if rows[best].loss is None:
                    raise UserError(f"{start}{settings[0]}: diverges, as all other rates do")
                if 0 < best < len(rates) - 1:
                    found.append((rows[best].rank, settings[best]))
                    break
                rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]
        return [settings for _, settings in sorted(found)]

    def _known(self, label: str, tokens: int) -> RaceRow | None:
        return self._kept.find(label=label, numel=self.numel, peers=PEERS, tokens=tokens, seed=self._seed)


class _Unwatched:
    """A line for each run is enough."""

    def started(self, job: object) -> None:
        """Nothing."""

    def progress(self, progress: JobProgress) -> None:
        """Nothing."""


def shortest_round(compressor: str, numel: int, reduction: float) -> int:
    """Steps a round with which PEERS peers send `reduction` times fewer bytes than an fp32 all-reduce at every step."""
    payload = codec(compressor).wire_bytes(numel)
    sent = reduce_traffic(PEERS, payload, payload)
    return max(1, math.ceil(reduction * float(sent[0]) / ring_allreduce_bytes(numel, PEERS)))


def reference_of(rows: Sequence[RaceRow]) -> RaceRow:
    """The best data parallelism among rows."""
    return min((row for row in rows if row.recipe == DATA_PARALLELISM), key=lambda row: row.rank)


def gap(row: RaceRow, reference: RaceRow) -> float:
    """By how many percent the loss is above that of the reference."""
    return 100.0 * (row.rank / reference.rank - 1.0)


def ranking(rows: Sequence[RaceRow]) -> Iterator[tuple[str, ...]]:
    """As lines of a table with HEADER: the lowest loss first."""
    reference = reference_of(rows)
    for row in sorted(rows, key=lambda row: row.rank):
        loss = ("diverged", "") if row.loss is None else (f"{row.loss:.4f}", f"{gap(row, reference):+.2f}%")
        yield f"`{row.label}`", *loss, f"{row.reduction:,.0f}x"


def draw_gaps(path: Path, title: str, along: str, ticks: Mapping[float, str], lines: Mapping[str, Gaps]) -> None:
    """Write a PNG: percent of loss above data parallelism, a line for each name.

    Args:
        along: what the horizontal axis is of, logarithmic.
        ticks: place on it -> its words; none: powers of ten.
    """
    picture = Picture(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    for (name, gaps), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(list(gaps), list(gaps.values()), "o-", color=colour, linewidth=1.2, markersize=4, label=name)
        for place, percent in gaps.items():
            axes.annotate(f"{percent:+.1f}%", (place, percent), (0, 6), textcoords="offset points", ha="center",
                          fontsize=8, color=colour)  # fmt: skip
    axes.set_xscale("log")
    if ticks:
        axes.set_xticks(list(ticks), labels=list(ticks.values()))
        axes.minorticks_off()
    axes.axhline(0.0, color="#888888", linewidth=0.8)
    axes.margins(x=0.1, y=0.18)
    axes.set_xlabel(along)
    axes.set_ylabel("% of loss above data parallelism")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title(title, fontsize=12, fontweight="bold", loc="left")
    picture.savefig(path, format="png")
