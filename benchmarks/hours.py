"""Whether honest peers keep each other from making rounds: hours of virtual time under honest faults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, documents, run_benchmark
from peer.errors import UserError
from tests.swarm.hours import PROGRAMMES, play

NAME = "hours"
ABOUT = "The longest time without a round though enough honest machines are there, in virtual time under faults"
NOTES = """\
Whole peers in one process: rounds, matchmaking, the directory and the rules of blame are the production ones, with
their default waits; machines, lines, the DHT's table and the trainers are played, and time jumps to the next timer.
Machines are there from the beginning or come later; their lines go down for 3 to 60 s (all-needed: 120 s), every 200 to
400 s each, alone, together, or only to one other machine, one way or both; their processes are killed and start again;
halves are apart for 10 to 240 s; machines sleep; and there are more machines (6) than seats (4).
`pause` is the longest time without a round though enough machines were there, in parts of what a programme allows: the
longest training, two straggler windows and 30 s. `counted` is the share of a machine's time, its faults included, whose
tokens the longest chain has, of the least lucky; `healed` the longest time from the last fault to a round of all."""
HEADER = ("programme", "machines", "hours", "rounds", "faults", "counted", "refused", "pause", "healed")


@dataclass(frozen=True, kw_only=True)
class HoursRow:
    """All swarms of one programme.

    Attributes:
        machines: that are there in the end.
        rounds, faults, refused_s: of all swarms together.
        share: of its time that counts, of the least lucky machine.
        pause, pause_s: the longest, of what the programme allows and in seconds; `pause_seed` shows it again.
        healed_s: the longest; None: in one swarm no round of all came.
    """

    programme: str
    machines: int
    hours: float
    rounds: int
    faults: int
    share: float
    refused_s: float
    pause: float
    pause_s: float
    pause_seed: int
    healed_s: float | None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(NAME, "Plays whole swarms in virtual time, programme after programme; a minute an hour.")
    parser.add_argument("--programmes", nargs="+", default=list(PROGRAMMES), metavar="NAME",
                        help=f"of: {', '.join(PROGRAMMES)} (default: all)")  # fmt: skip
    parser.add_argument("--swarms", type=int, default=3, metavar="N", help="of each, with a seed each (default: 3)")
    parser.add_argument("--hours", type=float, default=1.0, metavar="N", help="of each swarm (default: 1)")
    parser.add_argument("--log", action="store_true", help="print what the peers log")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Each programme with each seed."""
    check_count("--swarms", arguments.swarms, 1)
    if (wrong := next((name for name in arguments.programmes if name not in PROGRAMMES), None)) is not None:
        raise UserError(f"--programmes {wrong}: there is none of this name", f"take some of {', '.join(PROGRAMMES)}")
    if not 0.1 <= arguments.hours <= 100.0:
        raise UserError(f"--hours={arguments.hours:g}: must be from 0.1 to 100", "1 is a good length")
    rows = []
    for name in dict.fromkeys(arguments.programmes):
        seeds = range(arguments.seed, arguments.seed + arguments.swarms)
        rows.append(played(name, seeds, arguments.hours, arguments.log))
        say(" | ".join(f"{head} {value}" for head, value in zip(HEADER, line(rows[-1]), strict=True)))
    chosen = () if arguments.programmes == list(PROGRAMMES) else ("--programmes", *arguments.programmes)
    options = (*chosen, "--swarms", str(arguments.swarms), "--hours", f"{arguments.hours:g}")
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=figures(rows), samples={}, notes=NOTES,
        table=(HEADER, *map(line, rows)), options=options, more={"rows": documents(rows)},
    )  # fmt: skip


def played(name: str, seeds: range, hours: float, echo: bool) -> HoursRow:
    """A programme with each of these seeds."""
    programme = PROGRAMMES[name]
    outcomes = {seed: play(programme, seed, hours, echo) for seed in seeds}
    worst = max(outcomes, key=lambda seed: outcomes[seed].pause_s)
    healed = [outcome.healed_s for outcome in outcomes.values()]
    return HoursRow(
        programme=name, machines=programme.peers + programme.newcomers, hours=hours * len(outcomes),
        rounds=sum(one.rounds for one in outcomes.values()), faults=sum(one.faults for one in outcomes.values()),
        share=min(min(one.shares) for one in outcomes.values()), refused_s=sum(o.refused_s for o in outcomes.values()),
        pause=outcomes[worst].pause_s / programme.patience_s, pause_s=outcomes[worst].pause_s, pause_seed=worst,
        healed_s=None if None in healed else max(healed),
    )  # fmt: skip


def figures(rows: list[HoursRow]) -> tuple[Figure, ...]:
    """What must hold in all programmes."""
    healed = sum(row.healed_s is not None for row in rows)
    return (
        Figure(name="longest pause, of what is allowed", value=max(row.pause for row in rows), unit="", limit=1.0),
        Figure(name="share of a machine's time that counts, least", value=100.0 * min(r.share for r in rows), unit="%"),
        Figure(name="programmes that did not heal", value=float(len(rows) - healed), unit="", limit=0.0),
        Figure(name="hours of virtual time", value=sum(row.hours for row in rows), unit="h"),
    )


def line(row: HoursRow) -> tuple[str, ...]:
    """A row of the table."""
    return (
        row.programme, str(row.machines), f"{row.hours:g}", str(row.rounds), str(row.faults),
        f"{100.0 * row.share:.0f}%", f"{row.refused_s:,.0f} s", f"{row.pause:.2f} ({row.pause_s:.0f} s)",
        "no" if row.healed_s is None else f"{row.healed_s:.0f} s",
    )  # fmt: skip


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
