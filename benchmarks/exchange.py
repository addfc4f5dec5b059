"""Averaging one fp32 vector among processes: our exchange, hivemind's averager and gloo, one after another."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import default_folder, prepared
from benchmarks.exchange_report import ABOUT, NAME, ExchangeRow, NotMeasured, Run, draw, figures, notes, table
from benchmarks.figures import (
    RESUME,
    BenchReport,
    ResumableRows,
    Say,
    benchmark_parser,
    check_count,
    documents,
    median,
    run_benchmark,
)
from benchmarks.peers import AveragingOutcome, PeerFailedError, Peers, PeersSetup
from benchmarks.processes import available_bytes
from peer.errors import UserError, did_you_mean

PEERS = (2, 4, 8)
PARAMS = (1_000_000, 10_000_000, 50_000_000, 125_000_000)
REPEATS = 5
MIN_PARAMS = 10_000


@dataclass(frozen=True, kw_only=True)
class System:
    """One of those that are compared.

    Attributes:
        module: of its peers.
        codecs: the `relative_error` that a right average may have, by codec, for two peers and more.
        from_last: count from the last member that begins, not from the first.
        peer_bytes, parameter_bytes: rough memory of a peer: its constant and what each parameter adds, at the peak.
        more_bytes: that each parameter adds with a codec, on top.
    """

    module: str
    codecs: Mapping[str, float]
    peer_bytes: float
    parameter_bytes: float
    more_bytes: Mapping[str, float] = field(default_factory=dict)
    from_last: bool = False

    def needed_bytes(self, peers: int, params: int, codec: str) -> float:
        """Memory of all peers."""
        return peers * (self.peer_bytes + (self.parameter_bytes + self.more_bytes.get(codec, 0.0)) * params)


SYSTEMS = {
    "atoll": System(
        module="benchmarks.averaging", peer_bytes=3.0e8, parameter_bytes=18.0, more_bytes={"int2": 8.0},
        codecs={"int8": 0.03, "int4": 0.2, "int2": 0.7, "fp16": 1e-3, "fp32": 1e-5},
    ),
    "hivemind": System(
        module="benchmarks.hivemind_peer", peer_bytes=3.5e8, parameter_bytes=17.0, from_last=True,
        codecs={"none": 1e-5, "fp16": 1e-3, "scaled-fp16": 1e-3, "uniform-8bit": 0.1, "quantile-8bit": 0.1,
                "blockwise-8bit": 0.1},
    ),
    "gloo": System(module="benchmarks.gloo", peer_bytes=1.7e8, parameter_bytes=8.0, codecs={"fp32": 1e-5}),
}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Every peer is a process of its own with one torch thread, all on this machine. Each result is compared with\n"
        "the mean; a wrong one has no time and is counted. hivemind's peers run in an environment of their own with\n"
        "an older numpy, without which its 8-bit codecs average nothing.",
    )
    codecs = sorted({codec for system in SYSTEMS.values() for codec in system.codecs})
    lists: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": int}
    parser.add_argument("--peers", default=list(PEERS), help=f"default: {' '.join(map(str, PEERS))}", **lists)
    parser.add_argument("--params", default=list(PARAMS), help=f"default: {' '.join(map(str, PARAMS))}", **lists)
    parser.add_argument("--most", type=int, metavar="N", help="leave out what is more than N parameters in all peers")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"of each (default: {REPEATS})")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--codecs", nargs="+", metavar="CODEC", help=f"only these of {', '.join(codecs)}")
    parser.add_argument("--environment", type=Path, default=default_folder(), metavar="DIR",
                        help="of hivemind, made when absent (default: atoll/benchmark-hivemind in the user's cache)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds over parameters to this PNG")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help=RESUME.format(same="seed and repeats"))
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Every run of the grid."""
    runs = list(plan(arguments))
    pythons = {}
    if any(run.system == "hivemind" for run in runs):
        pythons["hivemind"] = prepared(arguments.environment, say)
    rows: list[ExchangeRow] = []
    missing: list[NotMeasured] = []
    whole: list[str] = []
    under = {"seed": arguments.seed, "repeats": arguments.repeats}
    kept = ResumableRows(ExchangeRow, arguments.resume, under)
    for run in runs:
        try:
            known = kept.find(**vars(run))
            rows.append(known or kept.keep(measure_run(run, arguments.seed, arguments.repeats, pythons)))
            say(describe(rows[-1]))
        except (PeerFailedError, UserError) as error:
            whole.append(f"{run}: {error}")
            say(whole[-1])
            reason = str(error).splitlines()[0]  # a log would name this machine's paths
            missing.append(NotMeasured(**vars(run), reason=reason))
    if not rows:
        raise UserError("nothing could be measured", "\n".join(whole))
    if arguments.plot is not None:
        draw(arguments.plot, rows)
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, table=table(rows),
        notes=notes(missing, left_out(arguments), kept.note()), options=options(arguments),
        more={"rows": documents(rows), "not_measured": documents(missing)},
    )


def left_out(arguments: argparse.Namespace) -> list[str]:
    """Each system and codec that the command line does without."""
    chosen = arguments.codecs
    return [
        f"{name} {codec}"
        for name in dict.fromkeys(arguments.systems)
        for codec in SYSTEMS[name].codecs
        if chosen is not None and codec not in chosen
    ]


def plan(arguments: argparse.Namespace) -> Iterator[Run]:
    """The runs in order: all of one cell together, so that what else the machine has to do hits all alike.

    Raises:
        UserError: a number out of range, a codec that no system has, or nothing left to run.
    """
    check_count("--repeats", arguments.repeats, 1)
    for peers in arguments.peers:
        check_count("--peers", peers, 2)
    for params in arguments.params:
        check_count("--params", params, MIN_PARAMS)
    known = {codec for name in arguments.systems for codec in SYSTEMS[name].codecs}
    for codec in arguments.codecs or ():
        if codec not in known:
            raise UserError(f"--codecs={codec}: not of {', '.join(arguments.systems)}", did_you_mean(codec, known))
    for params in dict.fromkeys(arguments.params):
        for peers in dict.fromkeys(arguments.peers):
            if arguments.most is not None and peers * params > arguments.most:
                continue
            for system in dict.fromkeys(arguments.systems):
                for codec in SYSTEMS[system].codecs:
                    if arguments.codecs is None or codec in arguments.codecs:
                        yield Run(system=system, codec=codec, peers=peers, params=params)


def measure_run(run: Run, seed: int, repeats: int, pythons: Mapping[str, str]) -> ExchangeRow:
    """Start the peers; average once while their memory is watched, `repeats` times for the clock, and once more.

    Raises:
        PeerFailedError: a peer died or said nothing in time.
        UserError: it would not fit into memory, or too few results are the average.
    """
    system = SYSTEMS[run.system]
    needed, free = system.needed_bytes(run.peers, run.params, run.codec), available_bytes()
    if needed > free:
        raise UserError(f"needs about {needed / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are available")
    setup = PeersSetup(module=system.module, codec=run.codec, numel=run.params, peers=run.peers, seed=seed)
    with Peers(setup, python=pythons.get(run.system)) as peers:
        peers.meet()
        idle = peers.memory_at_rest()
        first = peers.go(watch=True)
        repeated = right_averagings(run, peers, repeats)
        peers.meet()
        averaged = [first, *repeated, last := peers.go(watch=True)]
    row = row_of(run, [one for one in repeated if is_average(run, one)], idle, list(map(max, first.peaks, last.peaks)))
    return replace(row, averagings=len(averaged), wrong=sum(not is_average(run, one) for one in averaged))


def right_averagings(run: Run, peers: Peers, repeats: int) -> list[AveragingOutcome]:
    """Averagings until `repeats` of them are right, at most twice as many in all; those that are wrong stay in."""
    done: list[AveragingOutcome] = []
    while sum(is_average(run, one) for one in done) < repeats:
        if len(done) == 2 * repeats:
            wrong = [one.error for one in done if not is_average(run, one)]
            raise UserError(
                f"{len(wrong)} of {len(done)} results are not the average: relative error {median(wrong):.2g}, "
                f"where {run.codec} may have {SYSTEMS[run.system].codecs[run.codec]:g}"
            )
        done.append(peers.average())
    return done


def is_average(run: Run, averaged: AveragingOutcome) -> bool:
    """Whether the result is as near to the mean as its codec allows; NaN is not."""
    return averaged.error <= SYSTEMS[run.system].codecs[run.codec]


def row_of(
    run: Run, averaged: Sequence[AveragingOutcome], idle: Sequence[int], peaks: Sequence[int]
) -> ExchangeRow:
    """What is reported of a run.

    Args:
        averaged: those that are timed, all of them right.
        idle, peaks: memory of each peer in bytes, at rest and at most.
    """
    from_last = SYSTEMS[run.system].from_last
    seconds = tuple(one.seconds_from_last if from_last else one.seconds for one in averaged)
    middle = median(seconds)
    return ExchangeRow(
        **vars(run),
        seconds_median=middle,
        seconds=seconds,
        mb_per_second=4e-6 * run.params / middle,
        cpu_seconds=math.fsum(one.cpu_s for one in averaged) / len(averaged),
        cpu_seconds_p2pd=math.fsum(one.daemon_cpu_s for one in averaged) / len(averaged),
        phases={name: median([one.phases[name] for one in averaged]) for name in averaged[0].phases},
        relative_error=max(one.error for one in averaged),
        averagings=len(averaged),
        wrong=0,
        peak_memory_bytes=max(peak - before for peak, before in zip(peaks, idle, strict=True)),
        peak_memory_absolute_bytes=max(peaks),
        idle_memory_bytes=max(idle),
    )


def describe(row: ExchangeRow) -> str:
    """For a progress line."""
    return (
        f"{row}: {row.seconds_median:.3f} s, {row.mb_per_second:.0f} MB/s, {row.cpu_seconds:.2f} CPU s, "
        f"{row.peak_memory_bytes / 1e6:.0f} MB more memory"
    )


def options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The command line again, as far as it decides what is measured."""
    lists = {"--peers": arguments.peers, "--params": arguments.params, "--repeats": [arguments.repeats]}
    if arguments.most is not None:
        lists["--most"] = [arguments.most]
    if arguments.systems != list(SYSTEMS):
        lists["--systems"] = arguments.systems
    if arguments.codecs is not None:
        lists["--codecs"] = arguments.codecs
    return tuple(str(word) for flag, values in lists.items() for word in (flag, *values))


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
