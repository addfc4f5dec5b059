"""An open run against a quarter of Byzantine peers: `python -m benchmarks.attacks --report docs/results/attacks.json`.

16 simulated peers, 4 of them Byzantine, learn the task of configs/sim/long.yaml for 60 rounds under each of ten
attacks, with the aggregator of open runs. As on a swarm, the vector is cut into one shard per member, each shard is
judged and averaged by itself, and contributions and means are sent as 8-bit integers. `none` is the same run with
honest peers only; under the plain mean it is the reference of the others. `absent` shows the cost of missing peers
alone: the plain mean of the honest ones. Passed: the validation loss is at most 2% above clean, and less than 1% of the
honest contributions to shards are dropped. Existing rows of the report are not computed again; --slice is a short run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.attacks_report import ABSENT, CLEAN, AttackRow, judged, line, report_of
from benchmarks.figures import ResumableRows, describe_machine
from peer.errors import UserError
from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.gram import inner_products, largest_magnitude
from peer.outer.compress.registry import compressor
from peer.outer.recipe.recipe import word_of
from peer.outer.recipe.resolve import resolve
from peer.outer.recipe.validation import checked
from peer.outer.state.flat_layout import shards_of
from peer.outer.state.reduced_update import SLICE
from peer.protocol.manifest import RecipeSpec, RunManifest
from peer.sim.campaign.job import one_thread
from peer.sim.campaign.plan import WindowPair, load_task
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.learner.language_task import language_task, load_windows
from peer.sim.world.scenario import Attack, PeerProfile
from peer.system.output_files import check_output_file

TASK = "configs/sim/long.yaml"
PEERS, BAD = 16, (3, 7, 11, 15)
ATTACKS: dict[str, tuple[Attack, float | None]] = {
    "sign-flip": ("sign-flip", None),
    "x1000": ("scale", 1000.0),
    "nan": ("nan", None),
    "a little is enough": ("little", 1.0),
    "copies": ("copy", None),
    "inner product": ("inner-product", 0.5),
    "mean reversed x10": ("inner-product", 10.0),
    "noise x10": ("noise", 10.0),
    "zero": ("zero", None),
    "constant": ("constant", 1.0),
}
GATES = {"holds": "not finite", "norm": "norm", "near-duplicate": "copy", "median": "direction", "largest": "direction"}
SLICE_OF_CI = (("sign-flip", "x1000", "inner product"), (0,), 12)


@dataclass(frozen=True, kw_only=True)
class ByShards(Aggregator):
    """An aggregator as the reducers of a swarm apply it: to each slice of each member's shard by itself.

    Attributes:
        inner: the aggregator.
        members: number of shards of the vector.
        block: of the codec; no shard cuts one.
        bad: the Byzantine members.
        tally: counts of slices, and of honest and Byzantine contributions that were dropped.
        gates: how often each gate dropped an honest contribution.
        cosines: the mean cosine between honest contributions in each slice.
    """

    separable: ClassVar[bool] = False
    inner: Aggregator
    members: int
    block: int
    bad: tuple[int, ...] = ()
    tally: Counter[str] = field(default_factory=Counter)
    gates: Counter[str] = field(default_factory=Counter)
    cosines: list[float] = field(default_factory=list)

    def aggregate(self, contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """See `Aggregator.aggregate`."""
        # non-finite contributions were dropped before; every missing one was Byzantine
        who = [i for i in range(self.members) if len(contributions) == self.members or i not in self.bad]
        results = []
        for first, last in shards_of(contributions[0].numel(), self.members, self.block):
            for start in range(first, last, SLICE):
                inputs = [contribution[start : min(start + SLICE, last)] for contribution in contributions]
                results.append(self._one(inputs, weights, who))
        return torch.cat(results)

    def _one(self, inputs: Sequence[Tensor], weights: Sequence[float], who: Sequence[int]) -> Tensor:
        self.tally["slices"] += 1
        self._count_cosine([x for i, x in zip(who, inputs, strict=True) if i not in self.bad])
        result, reasons = self.inner.judged(inputs, weights)
        for place, reason in reasons.items():
            copied = reason.startswith("near-duplicate") and who[int(reason.rsplit(" ", 1)[1])] in self.bad
            kind = "bad" if who[place] in self.bad else "copied" if copied else "honest"
            self.tally[kind] += 1
            if kind == "honest":
                self.gates[GATES[reason.split(" ", 1)[0]]] += 1
        return result

    def _count_cosine(self, honest: Sequence[Tensor]) -> None:
        products = inner_products(honest, [largest_magnitude(vector) for vector in honest])
        norms = [math.sqrt(products[i][i]) for i in range(len(honest))]
        if min(norms) > 0:
            pairs = [products[i][j] / (norms[i] * norms[j]) for i in range(len(honest)) for j in range(i)]
            self.cosines.append(sum(pairs) / len(pairs))


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What all runs have in common; `bad` are the places of the Byzantine peers."""

    manifest: RunManifest
    windows: WindowPair
    rounds: int
    steps: int
    bad: tuple[int, ...] = BAD

    def run(self, name: str, aggregator: Aggregator, seed: int) -> AttackRow:
        """One run; `none` has honest peers only."""
        kind, scale = ATTACKS["nan" if name == ABSENT else name] if name != CLEAN else ("none", None)
        bad = self.bad if name != CLEAN else ()
        spec = RecipeSpec(name="diloco", compressor="int8", steps_per_round=self.steps, outer_momentum=0.6)
        judged = ByShards(inner=aggregator, members=PEERS, block=compressor("int8").block, bad=bad)
        honest = PeerProfile()
        byzantine = replace(honest, attack=kind, attack_scale=scale)
        each = self.manifest.inner.batch_sequences * self.manifest.data.sequence_length
        setup = SimulationSetup(
            recipe=checked(replace(resolve(spec), aggregator=judged)), inner=self.manifest.inner,
            profiles=tuple(byzantine if peer in bad else honest for peer in range(PEERS)),
            tokens=self.rounds * self.steps * each * PEERS, seed=seed, evaluations=1,
        )
        result = Simulation(setup, language_task(self.manifest, self.windows, seed)).run()
        loss = result.val_loss
        return AttackRow(
            attack=name, aggregator=word_of("aggregator", aggregator), seed=seed,
            rounds=self.rounds, steps_per_round=self.steps,
            val_loss=loss if loss is not None and math.isfinite(loss) else None,
            honest_contributions=judged.tally["slices"] * (PEERS - len(bad)), honest_drops=judged.tally["honest"],
            honest_drops_by_gate=dict(sorted(judged.gates.items())),
            bad_contributions=judged.tally["slices"] * len(bad) if kind != "nan" else 0,
            bad_drops=judged.tally["bad"], counted_as_their_copy=judged.tally["copied"],
            honest_cosine=sum(judged.cosines) / len(judged.cosines) if judged.cosines else None,
            wall_seconds=result.wall_seconds,
        )


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    add = parser.add_argument
    add("--report", type=Path, required=True, metavar="FILE", help="JSON; existing rows are kept")
    add("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME", help="default: all ten")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--rounds", type=int, default=60, metavar="N", help="default: 60")
    add("--steps", type=int, default=10, metavar="N", help="inner steps of each peer in a round (default: 10)")
    add("--slice", action="store_true", help="three attacks, one seed, twelve rounds")
    add("--max-minutes", type=float, default=math.inf, metavar="M", help="begin no further run after this long")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every run that was made passed, 1 if one did not, 2 on a user's error."""
    arguments = build_parser().parse_args(argv)
    names, seeds, rounds = arguments.attacks, arguments.seeds, arguments.rounds
    if arguments.slice:
        names, seeds, rounds = SLICE_OF_CI
    one_thread()
    began = time.monotonic()
    options = ("--report", "docs/results/attacks.json", "--rounds", str(rounds), "--steps", str(arguments.steps))
    setting = {"peers": PEERS, "bad": len(BAD), "task": TASK}
    written = partial(report_of, machine=describe_machine(), options=options, setting=setting)
    try:
        check_output_file(arguments.report, "--report")
        report, passed = ResumableRows(AttackRow, arguments.report, report=written), True
        manifest = load_task(TASK)
        campaign = Campaign(
            manifest=manifest, windows=load_windows(manifest, ()), rounds=rounds, steps=arguments.steps
        )
    except UserError as error:
        print(error.render("attacks"), file=sys.stderr)
        return 2
    for seed in seeds:
        clean: AttackRow | None = None
        controls: list[tuple[str, Aggregator]] = [(CLEAN, Mean()), (ABSENT, Mean()), (CLEAN, Gated())]
        runs = [*controls, *((name, Gated()) for name in names)]
        for name, aggregator in runs:
            row = report.find(
                attack=name, aggregator=word_of("aggregator", aggregator), seed=seed, rounds=rounds,
                steps_per_round=arguments.steps,
            )
            if row is None:
                if time.monotonic() - began > 60 * arguments.max_minutes:
                    print("time limit reached; run the command again to continue")
                    return 0 if passed else 1
                row = campaign.run(name, aggregator, seed)
                clean = clean or row
                row = judged(row, clean)
                report.keep(row)
            clean = clean or row
            passed = passed and (row.passed or name not in ATTACKS)
            print(line(row), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
