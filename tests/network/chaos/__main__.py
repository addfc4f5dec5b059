"""The full campaigns: `python -m tests.network.chaos --report FILE`. The slices of `test_chaos` are the same code."""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks import break_point
from peer.errors import UserError
from tests.network.chaos import (
    absence,
    asks,
    attacks,
    canaries,
    claims,
    clocks,
    crowds,
    disk,
    donors,
    forgeries,
    fuzz,
    kills,
    links,
    partitions,
    rejoins,
    soak,
    stalls,
    stops,
)
from tests.network.chaos.report import ChaosReport, Counts
from tests.network.chaos.swarm import ChaosSwarm

MEMBERS = 8
OPEN_WITHIN_S = 600.0
KILLS, ROUNDS = 500, 300
STOPS = 200
STALLED_S = 180.0
QUICK_STEPS, STEPS, PACE_S = 20, 50, 0.1
INPUTS = 1_000_000
PARTS = 200
SOAK_MINUTES = 120
Tell = Callable[[Counts], None]
Campaign = Callable[[int, Counts, float, Path, Tell], Counts]


@contextmanager
def opened(folder: Path, members: int, steps: int = QUICK_STEPS) -> Iterator[ChaosSwarm]:
    """A swarm whose members stand at one place; they train for `steps` times PACE_S between two rounds."""
    swarm = ChaosSwarm(folder, steps=steps, pace_s=PACE_S)
    try:
        swarm.open(*(f"peer{number}" for number in range(members)))
        swarm.run_until(swarm.settled, OPEN_WITHIN_S)
        yield swarm
    finally:
        swarm.close()


def g2(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """The break point of the aggregator, in the simulator. Its rows and its curve are kept in the folder."""
    report = folder / "break_point.json"
    if not done:
        report.unlink(missing_ok=True)
    rows = break_point.run(
        report, break_point.Runs(seeds=(seed,)), plot=report.with_suffix(".png"), minutes=minutes,
        tell=lambda rows: tell(break_point.counts(rows)),
    )  # fmt: skip
    return break_point.counts(rows)


def g3(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Kills at every phase."""
    before, rounds = done.get("kills_per_phase", {}), ROUNDS - done.get("rounds", 0)
    with opened(folder, MEMBERS) as swarm:
        return kills.run(seed, KILLS, swarm, at_once=4, minutes=minutes, rounds=rounds, before=before, tell=tell)


def g4(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Stops of 5 to 120 s, where rounds take 5 s or more: libp2p lets nobody dial a peer that it has just dialled in
    vain for 5 s, and who wakes up finds more than one line broken.
    """
    return _stopped(STEPS, seed, done, minutes, folder, tell)


def g4_quick(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """The same where rounds follow each other after 2 s, which nobody need catch up with as fast."""
    return _stopped(QUICK_STEPS, seed, done, minutes, folder, tell)


def _stopped(steps: int, seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    with opened(folder, MEMBERS, steps) as swarm:
        return stops.run(seed, STOPS - done.get("stops", 0), swarm, at_once=3, minutes=minutes, tell=tell)


def g5(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Partitions."""
    trials = partitions.TRIALS - done.get("trials", 0)
    return partitions.run(folder, trials=trials, seed=seed, minutes=minutes, tell=tell)


def g6(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Bad links."""
    conditions = links.CONDITIONS[done.get("conditions", 0) :]
    return links.run(folder, conditions=conditions, seed=seed, minutes=minutes, tell=tell)


def g7(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Absences of the bootstrap, a long one first."""
    left = absence.RESTARTS + 1 - done.get("absences", 0)
    long_s = absence.LONG_S if done.get("longest_away_s", 0.0) < absence.LONG_S else None
    absences = left - (long_s is not None)
    return absence.run(seed, folder, absences=absences, long_s=long_s, minutes=minutes, tell=tell)


def g8(_: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Clocks that are wrong."""
    return clocks.run(folder, trials=clocks.TRIALS[done.get("clocks", 0) :], minutes=minutes, tell=tell)


def g9(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Hostile bytes, then hostile peers."""
    fuzzed = fuzz.run(seed, INPUTS - done.get("inputs_fuzzed", 0), minutes=minutes, tell=tell)
    names = attacks.every()[done.get("attacks", 0) + done.get("attacks_not_brought_about", 0) :]
    with opened(folder, 2) as swarm:
        tried = attacks.run(seed, names, swarm, minutes=minutes, tell=lambda counts: tell({**fuzzed, **counts}))
    return {**fuzzed, **tried}


def g10(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Floods of the directory and of the routing tables."""
    ids, records = crowds.IDS - done.get("forged_ids", 0), crowds.RECORDS - done.get("records_offered", 0)
    readers = crowds.READERS - done.get("readers", 0)
    return crowds.run(seed, folder, ids=ids, records=records, readers=readers, minutes=minutes, tell=tell)


def g11(seed: int, done: Counts, _: float, __: Path, tell: Tell) -> Counts:
    """Lying donors."""
    return donors.run(seed, PARTS - done.get("parts_tampered", 0), tell=tell)


def stalling(_seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Members that stall: each way of it, and fresh identities, for as long as the minutes allow."""
    if done:
        return {}
    seconds = min(STALLED_S, 60.0 * minutes / (sum(stalls.LONGER.get(how, 1) for how in stalls.HOW) + 3))
    return stalls.run(folder, seconds=seconds, tell=tell)


def g12(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Interrupted checkpoints and flipped bits."""
    offsets, flips = disk.OFFSETS - done.get("offsets", 0), disk.FLIPS - done.get("bits_flipped", 0)
    return disk.run(seed, folder, offsets=offsets, flips=flips, minutes=minutes, tell=tell)


def g13(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell, cores: float = soak.CORES) -> Counts:
    """A soak."""
    minutes = min(minutes, SOAK_MINUTES - done.get("soak_minutes", 0.0))
    return soak.run(seed, folder, minutes=minutes, cores=cores, tell=tell)


def rejoining(_: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Kills and rejoins, and what the others hold more after each: one run, from its beginning."""
    return {} if done else rejoins.run(folder, minutes=minutes, tell=tell)


def g14(_: int, __: Counts, ___: float, folder: Path, tell: Tell) -> Counts:
    """Secrets in logs, and hostile strings."""
    return canaries.run(folder, tell=tell)


def g15(seed: int, done: Counts, minutes: float, folder: Path, tell: Tell) -> Counts:
    """Forged lineages."""
    return forgeries.run(folder, trials=forgeries.TRIALS - done.get("trials", 0), seed=seed, minutes=minutes, tell=tell)


def g16(_: int, __: Counts, ___: float, folder: Path, tell: Tell) -> Counts:
    """Manifests that ask too much."""
    return asks.run(folder, tell=tell)


def g17(seed: int, _: Counts, __: float, folder: Path, tell: Tell) -> Counts:
    """Claims without end."""
    return claims.run(folder, seed=seed, tell=tell)


CAMPAIGNS: dict[str, Campaign] = {
    "G2": g2, "G3": g3, "G4": g4, "G4-quick": g4_quick, "G5": g5, "G6": g6, "G7": g7, "G8": g8, "G9": g9, "G10": g10,
    "G11": g11, "G12": g12, "G13": g13, "G14": g14,
    "G15": g15, "G16": g16, "G17": g17,
    "stalls": stalling, "rejoins": rejoining,
}  # fmt: skip


def main() -> None:
    """Run the campaigns one after another; the report is written after each and several times in between."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.network.chaos",
        description="Faults and attacks against real peers on this machine. Exit code 1 when a figure was missed.",
    )
    parser.add_argument("--report", type=Path, required=True, metavar="FILE", help="where the counts are kept, as JSON")
    parser.add_argument(
        "--campaign", nargs="+", choices=[*CAMPAIGNS], default=[*CAMPAIGNS], metavar="NAME",
        help=f"of {', '.join(CAMPAIGNS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="add to the counts in FILE, with the next free seeds")
    parser.add_argument("--seed", type=int, default=17, metavar="N", help="of what happens to whom (default: 17)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, metavar="M", help="at most, for each campaign (default: 60)"
    )
    parser.add_argument(
        "--cores", type=float, default=soak.CORES, metavar="N",
        help=f"processors that G13 uses in the mean: its faults wait for it (default: {soak.CORES:g})",
    )  # fmt: skip
    parser.add_argument(
        "--merge", action="append", default=[], metavar="NAME=FILE",
        help="take the counts of another command (JSON) into the report, under NAME; runs no campaign unless named",
    )  # fmt: skip
    try:
        sys.exit(_run(parser.parse_args(), "--campaign" in sys.argv))
    except UserError as error:
        print(error.render(parser.prog), file=sys.stderr)
        sys.exit(2)


def _run(arguments: argparse.Namespace, named: bool) -> int:
    logging.disable(logging.WARNING)  # parsers in this process tell of everything that they refuse
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the swarm is ended in order
    torch.set_num_threads(1)
    chosen = [] if arguments.merge and not named else arguments.campaign
    command = shlex.join(["python", "-m", "tests.network.chaos", *sys.argv[1:]]) if chosen else ""
    report = ChaosReport(arguments.report, command, () if arguments.resume else chosen)
    for each in arguments.merge:
        name, _, path = each.partition("=")
        if not path:
            raise UserError(f"--merge={each}: must be NAME=FILE", "for example --merge G1=attacks.json")
        report.merge(name, Path(path))
    campaigns = {**CAMPAIGNS, "G13": partial(g13, cores=arguments.cores)}
    for name in chosen:
        seed = report.free_seed(name, arguments.seed)
        done = report.done(name)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="atoll-chaos-") as temporary:
            tell = partial(_tell, report, name, seed, began)
            folder = arguments.report.parent if name == "G2" else Path(temporary)
            tell(campaigns[name](seed, done, arguments.minutes, folder, tell))
    missed = [figure for figure in report.to_dict()["figures"] if figure["met"] is False]
    for figure in missed:
        print(f"missed: {figure['name']} is {figure['value']:g}, must be {figure['target']}", file=sys.stderr)
    return 1 if missed else 0


def _tell(report: ChaosReport, name: str, seed: int, began: float, counts: Counts) -> None:
    report.put(name, seed, {**counts, "seconds": round(time.monotonic() - began, 1)})
    shown = {key: value for key, value in counts.items() if value and not isinstance(value, list)}
    print(f"{time.monotonic() - began:7.1f} s  {name} seed {seed}: {shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
