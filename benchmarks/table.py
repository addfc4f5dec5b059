"""docs/results/README.md from the reports beside it: `python -m benchmarks.table`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("docs/results")
INTRODUCTION = """\
# Results

Written by `make bench`, which runs every command below and then `python -m benchmarks.table`. Each table is one run;
the JSON file beside it holds the raw samples, the seed and the machine. The peers of a benchmark share one machine,
so that every second below includes their competition for its cores.
"""


def main() -> None:
    """Read every report in the folder, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    folder = parser.parse_args().folder
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    pictures = {path.stem for path in folder.glob("*.png")}
    (folder / "README.md").write_text(page([report for report in reports if "benchmark" in report], pictures))


def page(reports: Sequence[dict[str, Any]], pictures: Collection[str] = ()) -> str:
    """The whole page as Markdown; `pictures` are the names of reports that have a PNG of the same name."""
    return "\n".join([INTRODUCTION, *(section(report, report["benchmark"] in pictures) for report in reports)])


def section(report: dict[str, Any], picture: bool = False) -> str:
    """One report as Markdown."""
    machine = report["machine"]
    lines = [
        f"## {report['benchmark']}",
        "",
        f"{report['about']}. Raw samples: [{report['benchmark']}.json]({report['benchmark']}.json).",
        "",
        f"    {report['command']}",
        "",
        "| figure | value | target | met |",
        "|---|---|---|---|",
        *map(_row, report["figures"]),
        "",
        *_side_by_side(report.get("table", ())),
        *([report["notes"], ""] if "notes" in report else ()),
        *([f"![{report['benchmark']}]({report['benchmark']}.png)", ""] if picture else ()),
        f"Machine: {machine['cores']} shared cores ({machine['cpu']}), {machine['memory_gb']:g} GB, "
        f"Python {machine['python']}, torch {machine['torch']}; load average {machine['load_average_1_min']:.1f} "
        f"before the run. Seed {report['seed']}.",
        "",
    ]
    return "\n".join(lines)


def _side_by_side(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""] if lines else []


def _row(figure: dict[str, Any]) -> str:
    met = {True: "yes", False: "**no**", None: ""}[figure["met"]]
    value = f"{figure['value']:.4g} {figure['unit']}".rstrip()
    return f"| {figure['name']} | {value} | {figure['target']} | {met} |"


if __name__ == "__main__":
    main()
