"""What the search and the races of recipes share: simulated runs of a task, each kept as soon as it has ended."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from benchmarks.figures import COLOURS, RESUME, ResumableRows, Say, benchmark_parser, check_count
from peer.data.packing import PackedTokens
from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.protocol.manifest import RunManifest
from peer.sim.campaign.job import Row, run_job
from peer.sim.campaign.label import parse_label
from peer.sim.campaign.plan import Job, SwarmPlan, WindowPair, build_swarm, common_settings, meta_layout, plan_jobs
from peer.sim.campaign.pool import JobProgress, Pool
from peer.sim.learner.language_task import VALIDATION_BYTES, load_windows
from peer.sim.world.network import reduce_traffic, ring_allreduce_bytes
from peer.system.resources import usable_cores
from peer.train.device import device_name

PEERS = 4
DATA_PARALLELISM = "ddp"
AVERAGED_BASELINE = "average=0.99"  # each step is a round of data parallelism
OPTIMIZERS = ("adamw", "muon")
RATES = (0.004, 0.008, 0.016)
BEHIND = 3.0
ALL_TOKENS = 2**40
Gaps = Mapping[float, float]  # place -> percent of loss above data parallelism
HEADER = ("recipe", "validation loss", "gap to the best ddp", "fewer bytes than ddp")


@dataclass(frozen=True, kw_only=True)
class RaceRow:
    """One run.

    Attributes:
        numel: parameters of the model.
        tokens: of all peers together.
        digest: of everything that its recipe and its seed decide.
        scored: tokens of the validation text whose loss it is.
        loss: at the end; None for a run that diverged.
        reduction: how many times fewer bytes each peer sent than with fp32 gradients at every step.
        device: where its inner steps were made.
    """

    label: str
    numel: int
    peers: int
    tokens: int
    seed: int
    digest: str
    scored: int
    loss: float | None
    reduction: float
    seconds: float
    device: str = "cpu"

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
    same = "model, text, recipe, tokens and seed"
    parser.add_argument("--device", default="cpu", metavar="NAME", help="of inner steps: as of atoll compare")
    parser.add_argument("--resume", type=Path, metavar="FILE", help=RESUME.format(same=same))
    return parser


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """How the runs of a race are made.

    Attributes:
        jobs: runs at the same time.
        device: of inner steps.
    """

    jobs: int = 1
    seed: int = 0
    device: str = "cpu"
    peers: int = PEERS

    @classmethod
    def of(cls, arguments: argparse.Namespace, peers: int = PEERS) -> RunSetup:
        """As the flags of `race_parser` say."""
        check_count("--jobs", arguments.jobs, 1)
        return cls(jobs=arguments.jobs, seed=arguments.seed, device=arguments.device, peers=peers)


class Race:
    """Runs of one model, several at a time.

    Args:
        path: of all rows, which later sessions take over where model and text are the same; None: none are kept.
        full: tokens of a run that is scored on all of the validation text; shorter ones are on its beginning.

    Attributes:
        kept: the rows of the file.
        rows: those that were asked for.
    """

    def __init__(
        self, manifest: RunManifest, path: Path | None, full: int, say: Say, setup: RunSetup | None = None
    ) -> None:
        self._manifest, self._full, self._say, self._setup = manifest, full, say, setup or RunSetup()
        self._layout = layout = meta_layout(manifest)
        self.numel = layout.numel
        self._train, self._held_out = load_windows(manifest, (), ALL_TOKENS)
        self.kept = ResumableRows(RaceRow, path, self._under())
        self.rows: list[RaceRow] = []

    def _under(self) -> dict[str, Any]:
        settings = common_settings(self._swarm(self._full), (self._train, self._held_out))
        return {key: settings[key] for key in ("model", "inner", "data")}

    def _swarm(self, tokens: int) -> SwarmPlan:
        return build_swarm(
            self._manifest, network="ideal", peers=self._setup.peers, tokens=str(tokens), step_s=1.0, evaluations=1,
            device=self._setup.device,
        )

    def run(self, labels: Sequence[str], tokens: int) -> list[RaceRow]:
        """The rows of these labels after `tokens`, in their order.

        Raises:
            UserError: a label that is none, or, once all others have ended, a run that failed.
        """
        swarm, windows = self._swarm(tokens), self._windows(tokens)
        jobs = plan_jobs(swarm, [parse_label(label) for label in labels], [self._setup.seed], swarm.steps_per_peer,
                         self._layout)  # fmt: skip
        missing = list({job.digest: job for job in jobs if self._known(job, tokens) is None}.values())
        failed = []
        if missing:
            with self._rows_of(missing, windows) as rows:
                for number, (job, ended) in enumerate(rows, 1):
                    if ended["status"] in ("failed", "stopped"):
                        failed.append(f"{job.label}: {ended['note']}")
                        continue
                    kept = self.kept.keep(RaceRow(
                        label=job.label, numel=self.numel, peers=swarm.peers, tokens=tokens, seed=self._setup.seed,
                        digest=job.digest, scored=len(windows[1].tokens) - 1, loss=ended["val_loss"],
                        reduction=ended["reduction_vs_ddp"], seconds=ended["wall_seconds"],
                        device=device_name(swarm.device) if swarm.device.type == "cuda" else "cpu",
                    ))
                    of = f"{number} of {len(missing)}, {self.numel:,} parameters, {tokens:,} tokens"
                    self._say(f"{of}: {kept.rank:.4f} after {kept.seconds:.0f} s, {job.label}")
        if failed:
            raise UserError("; ".join(failed))
        found = [row for job in jobs if (row := self._known(job, tokens)) is not None]
        self.rows = list(dict.fromkeys([*self.rows, *found]))
        return found

    def note(self) -> str:
        """What a report says of rows that are older, or of another device."""
        elsewhere = [row.device for row in self.rows if row.device != "cpu"]
        moved = f"Inner steps of {len(elsewhere)} rows on {', '.join(sorted(set(elsewhere)))}." if elsewhere else ""
        return "\n".join(filter(None, [self.kept.note(), moved]))

    def _windows(self, tokens: int) -> WindowPair:
        if tokens >= self._full:
            return self._train, self._held_out
        first = self._held_out
        return self._train, PackedTokens(
            first.tokens[: VALIDATION_BYTES + 1], first.sequence_length, first.document_end
        )

    @contextmanager
    def _rows_of(self, jobs: Sequence[Job], windows: WindowPair) -> Iterator[Iterator[tuple[Job, Row]]]:
        if min(self._setup.jobs, len(jobs)) == 1:
            yield ((job, run_job(job, windows)) for job in jobs)
            return
        with Pool(self._setup.jobs, windows, _Unwatched()) as pool:
            yield pool.run(jobs)

    def steps(self, tokens: int) -> int:
        """Of each peer."""
        return tokens // (self._setup.peers * self._manifest.tokens_per_step)

    def best_inner(self, start: str, tokens: int) -> list[str]:
        """The best rate of each inner optimizer behind the label `start`, with a worse one tried on either side.

        Returns:
            The settings as a label has them, the best first; no optimizer that is BEHIND by more than a percentage.
        """
        rates = {optimizer: list(RATES) for optimizer in OPTIMIZERS}
        found: dict[str, tuple[float, str]] = {}
        while open_ones := [optimizer for optimizer in OPTIMIZERS if optimizer not in found]:
            settings = {one: [f"inner.optimizer={one},inner.learning_rate={rate:g}" for rate in rates[one]]
                        for one in open_ones}  # fmt: skip
            rows = iter(self.run([start + each for one in open_ones for each in settings[one]], tokens))
            for optimizer in open_ones:
                own = [next(rows) for _ in rates[optimizer]]
                best = min(range(len(own)), key=lambda place: own[place].rank)
                if own[best].loss is None:
                    raise UserError(f"{start}{settings[optimizer][0]}: diverges, as all other rates do")
                if 0 < best < len(own) - 1:
                    found[optimizer] = own[best].rank, settings[optimizer][best]
                elif best == 0:
                    rates[optimizer].insert(0, rates[optimizer][0] / 2)
                else:
                    rates[optimizer].append(rates[optimizer][-1] * 2)
        ranked = sorted(found.values())
        return [settings for rank, settings in ranked if rank <= (1.0 + BEHIND / 100.0) * ranked[0][0]]

    def baselines(self, tokens: int) -> list[str]:
        """Data parallelism with the best rate of each inner optimizer (see `best_inner`), each without and with the
        average of its steps.
        """
        found = self.best_inner(f"{DATA_PARALLELISM}:", tokens)
        return [f"{DATA_PARALLELISM}:{average}{each}" for average in ("", f"{AVERAGED_BASELINE},") for each in found]

    def _known(self, job: Job, tokens: int) -> RaceRow | None:
        scored = len(self._windows(tokens)[1].tokens) - 1
        return self.kept.find(
            digest=job.digest, numel=self.numel, peers=self._setup.peers, tokens=tokens, scored=scored
        )


class _Unwatched:
    """A line for each run is enough."""

    def started(self, job: object) -> None:
        """Nothing."""

    def progress(self, progress: JobProgress) -> None:
        """Nothing."""


def most_rounds(compressor: str, numel: int, reduction: float, steps: int) -> int:
    """Rounds in so many steps with which PEERS peers send `reduction` times fewer bytes than an fp32 all-reduce at
    every step.
    """
    payload = codec(compressor).wire_bytes(numel)
    sent = float(reduce_traffic(PEERS, payload, payload)[0])
    return math.floor(steps * ring_allreduce_bytes(numel, PEERS) / (reduction * sent))


def shortest_round(compressor: str, numel: int, reduction: float, steps: int) -> int:
    """Steps a round that make so many rounds at most, the last of which may be shorter."""
    return math.ceil(steps / max(1, most_rounds(compressor, numel, reduction, steps)))


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

    Where all lines have a dozen points at most, each has its number; else those of the first line.

    Args:
        along: what the horizontal axis is of, logarithmic.
        ticks: place on it -> its words; none: powers of ten.
    """
    picture = Picture(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    few = sum(map(len, lines.values())) <= 12
    for number, ((name, gaps), colour) in enumerate(zip(lines.items(), COLOURS, strict=False)):
        axes.plot(list(gaps), list(gaps.values()), "o-", color=colour, linewidth=1.2, markersize=4, label=name)
        above = 7 if number == 1 else -12
        for place, percent in gaps.items() if few or number == 0 else ():
            axes.annotate(f"{percent:+.1f}%", (place, percent), (0, above), textcoords="offset points", ha="center",
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
