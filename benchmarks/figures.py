"""What all benchmarks share: statistics, the report as JSON, the table, the command line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from peer.errors import UserError
from peer.system.output_files import check_output_file

DEFAULT_SEED = 17
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # of plots; Okabe and Ito (2008)
RESUME = "keep each row in FILE as soon as it is measured, and take over those that are there, if {same} are the same"
Say = Callable[[str], None]
R = TypeVar("R")  # a row: a frozen dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number with its unit and, where there is one, the limit that it has to keep.

    Attributes:
        limit: None when the figure is for information.
        at_most: the figure must be at most `limit`; otherwise at least.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def target(self) -> str:
        """`<= 15 s`, or nothing."""
        if self.limit is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {self.limit:g} {self.unit}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """A JSON document."""
        limit = {"limit": self.limit, "target": self.target, "met": self.met}
        return {"name": self.name, "value": self.value, "unit": self.unit, **limit}


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The outcome of one benchmark.

    Attributes:
        name: of the module in `benchmarks`.
        about: one sentence: what was measured against what.
        figures: in the order to show them.
        samples: the raw measurements behind the figures.
        machine: as `describe_machine` gives it.
        table: rows of text, the header first, where figures are easier to compare side by side.
        notes: how to read it.
        options: of the command, as far as they decide what is measured.
        more: further entries of the JSON document, where something reads them by name.
    """

    name: str
    about: str
    seed: int
    figures: tuple[Figure, ...]
    samples: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    table: tuple[tuple[str, ...], ...] = ()
    notes: str = ""
    options: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON document."""
        return {
            "benchmark": self.name,
            "about": self.about,
            "command": " ".join((f"python -m benchmarks.{self.name}", *self.options)),
            "seed": self.seed,
            "machine": self.machine,
            "figures": [figure.to_dict() for figure in self.figures],
            **({"table": self.table} if self.table else {}),
            **({"notes": self.notes} if self.notes else {}),
            **self.more,
            "samples": self.samples,
        }


class ResumableRows(Generic[R]):
    """Rows of a long grid, each on disk as soon as it is measured, so that later sessions take them over.

    Args:
        kind: the dataclass of a row.
        path: of the file; None: rows are kept in memory alone.
        under: what must be equal for a row to be taken over.
        report: all rows -> the report that the file holds; None: the file holds a line of JSON for each row.

    Attributes:
        rows: of earlier sessions, then of this one.

    Raises:
        UserError: the file holds something else.
    """

    def __init__(
        self, kind: type[R], path: Path | None, under: Mapping[str, Any] | None = None, *,
        report: Callable[[Sequence[R]], BenchReport] | None = None,
    ) -> None:
        self._path, self._under, self._report = path, dict(under or {}), report
        self._taken_over = set[int]()
        text = path.read_text() if path is not None and path.exists() else ""
        try:
            self.rows = [row_from(kind, document) for document in self._documents(text)]
        except (ValueError, KeyError, TypeError):
            what = f"{'--report' if report else '--resume'}={path}: not a file that this benchmark wrote"
            raise UserError(what, "give a new one") from None
        self._earlier = len(self.rows)

    def _documents(self, text: str) -> list[dict[str, Any]]:
        if self._report is not None:
            return list(json.loads(text)["rows"]) if text else []
        return [one["row"] for one in map(json.loads, text.splitlines()) if one["under"] == self._under]

    def find(self, **wanted: Any) -> R | None:
        """The row with these values, if this session or an earlier one measured it."""
        for place, row in enumerate(self.rows):
            if all(getattr(row, key) == wanted[key] for key in wanted):
                if place < self._earlier:
                    self._taken_over.add(place)
                return row
        return None

    def keep(self, row: R) -> R:
        """The same row, once it is on disk."""
        self.rows.append(row)
        if self._path is None:
            return row
        if self._report is not None:
            self._path.write_text(json.dumps(self._report(self.rows).to_dict(), indent=1) + "\n")
            return row
        with self._path.open("a") as file:
            file.write(json.dumps({"under": self._under, "row": documents([row])[0]}) + "\n")
        return row

    def note(self) -> str:
        """What a report says of the rows that were taken over; nothing where there are none."""
        count = len(self._taken_over)
        return f"Rows measured in an earlier session (`--resume`): {count}." if count else ""


def row_from(kind: type[R], document: Mapping[str, Any]) -> R:
    """A row out of JSON; raises TypeError where keys are missing or unknown."""
    return kind(**{name: _frozen(value) for name, value in document.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def documents(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows as JSON documents, with their fields in order."""
    return [asdict(row) for row in rows]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the sample lies, linear between neighbours (Hyndman and Fan's type 7)."""
    assert values
    assert 0.0 <= fraction <= 1.0
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares of y = slope x + intercept; -> (slope, intercept)."""
    assert len(x) == len(y) >= 2
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return slope, mean_y - slope * mean_x


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine or its owner. Call it before the work begins:
    the load average then tells what else the machine had to do.
    """
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average_1_min": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def benchmark_parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the report to FILE, as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, metavar="N", help=f"of model and data (default: {DEFAULT_SEED})"
    )
    return parser


def run_benchmark(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Say], BenchReport]) -> None:
    """Parse, measure with progress lines on stderr, show, write; exit code 2 on a user's error."""
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children are ended in order
    torch.set_num_threads(1)
    machine, began = describe_machine(), time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        for flag in ("report", "plot", "resume"):
            if isinstance(path := getattr(arguments, flag, None), Path):
                check_output_file(path, f"--{flag}")
        report = replace(measure(arguments, say), machine=machine)
    except UserError as error:
        print(error.render(parser.prog), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        kept = getattr(arguments, "resume", None)
        print(f"interrupted; {f'the rows in {kept} are kept' if kept else 'nothing is kept'}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    text = json.dumps(report.to_dict(), indent=2) + "\n"
    if arguments.report is not None:
        arguments.report.write_text(text)
    if arguments.json:
        print(text, end="")
    else:
        for table in shown(report):
            Console().print(table)


def shown(report: BenchReport) -> Iterator[Table]:
    """A report for a terminal."""
    if report.table:
        side_by_side = Table(*report.table[0])
        for row in report.table[1:]:
            side_by_side.add_row(*row)
        yield side_by_side
    yield figure_table(report)


def figure_table(report: BenchReport) -> Table:
    """The figures of a report for a terminal."""
    table = Table("figure", "value", "target", "met", title=report.about)
    for figure in report.figures:
        met = {True: "yes", False: "no", None: ""}[figure.met]
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}".rstrip(), figure.target, met)
    return table


def check_count(flag: str, value: int, at_least: int) -> None:
    """Raises UserError when the value of a flag is too small."""
    if value < at_least:
        raise UserError(f"{flag}={value}: must be at least {at_least}")
