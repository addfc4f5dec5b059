"""docs/results/README.md from the reports beside it: `python -m benchmarks.table`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("docs/results")
INTRODUCTION = """\
# Results

Written by `python -m benchmarks.table` from the JSON files beside this page, which hold the raw samples, the seed and
the machine of the command above each table. `make bench` runs the commands that take minutes; those that take longer
(among them wan, losses, goodput, fragments, exchange, links, attacks and the campaigns of chaos) were run one by one.
Each table is one run. The peers of a benchmark share one machine, so that every second below includes their competition
for its cores.
"""


def main() -> None:
    """Read every report in the folder, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    folder = parser.parse_args().folder
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    pictures = {path.stem for path in folder.glob("*.png")}
    (folder / "README.md").write_text(page(reports, pictures))


def page(reports: Mapping[str, dict[str, Any]], pictures: Collection[str] = ()) -> str:
    """The whole page as Markdown; `pictures` are the names of PNGs, each of the report whose name it begins with."""
    sections = []
    for name, report in reports.items():
        if "benchmark" in report:
            sections.append(section(name, report, name in pictures))
        elif "summary" in report:
            sections.append(comparison(name, report, sorted(p for p in pictures if p.startswith(f"{name}-loss-"))))
    return "\n".join([INTRODUCTION, *sections])


def comparison(name: str, report: dict[str, Any], pictures: Sequence[str]) -> str:
    """A report of `atoll compare` as Markdown."""
    task = report["task"]
    lines = [
        f"## {name}",
        "",
        f"{report['notes'] + ' ' if 'notes' in report else ''}{report['peers']} simulated peers, a model of "
        f"{task['parameters']:,} parameters, {report['tokens']:,} tokens, seeds "
        f"{', '.join(map(str, report['seeds']))}. Mean over the seeds and standard deviation; the gap is to the best "
        f"of {_listed(report['baselines'])} with the same seed: `{report['best_baseline']}`. "
        f"Rows and curves: [{name}.json]({name}.json).",
        "",
        f"    {report['command']}",
        "",
        "| recipe | steps per round | validation loss | gap | MB sent per peer | reduction | utilisation |",
        "|---|---|---|---|---|---|---|",
        *map(_compared, report["summary"]),
        "",
        *(f"![{picture}]({picture}.png)\n" for picture in pictures),
    ]
    return "\n".join(lines)


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(f"`{label}`" for label in labels)


def _compared(row: dict[str, Any]) -> str:
    if row["val_loss"] is None:
        return f"| `{row['label']}` | {row['steps_per_round']} | - | {'; '.join(row['notes'])} | | | |"
    reduction = f"{row['reduction_vs_ddp']:,.0f}x" if row["reduction_vs_ddp"] is not None else "nothing sent"
    spread = f" +- {row['val_loss_std']:.4f}" if row["val_loss_std"] is not None else ""
    return (
        f"| `{row['label']}` | {row['steps_per_round']} | {row['val_loss']:.4f}{spread} | "
        f"{100 * row['gap']:+.2f}% | {row['bytes_sent_per_peer'] / 1e6:.3g} | {reduction} | "
        f"{row['utilization']:.2f} |"
    )


def section(name: str, report: dict[str, Any], picture: bool = False) -> str:
    """One report as Markdown; `name` is that of its file, and of the picture."""
    machine = report["machine"]
    lines = [
        f"## {name}",
        "",
        f"{report['about']}. Raw samples: [{name}.json]({name}.json).",
        "",
        f"    {report['command']}",
        "",
        "| figure | value | target | met |",
        "|---|---|---|---|",
        *map(_row, report["figures"]),
        "",
        *_side_by_side(report.get("table", ())),
        *([report["notes"], ""] if "notes" in report else ()),
        *([f"![{name}]({name}.png)", ""] if picture else ()),
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
