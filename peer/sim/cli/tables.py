"""What the simulator's commands print: the recipes, the result of a comparison, the figures of one run in words."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peer.outer.policy.schedules import every
from peer.outer.recipe.recipe import Recipe, describe
from peer.outer.recipe.shown import BESIDE
from peer.telemetry.figures import human_bytes, human_count, human_duration

WIDE_COLUMNS, FILE_COLUMNS = 130, 150
_PAPER = re.compile(r"[0-9]{4}\.[0-9]{5}")


def simulator_console() -> Console:
    """As wide as the terminal; in a pipe or a file, wide enough that no table is folded."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_COLUMNS)


def recipes_table(recipes: Iterable[Recipe], columns: int) -> Table:
    """All recipes, one a line, and how near real peers came to the simulator with it, see `Shown`; below WIDE_COLUMNS
    a paper is its number alone.
    """
    table = new_table("name", "real peers", "payload", "when", "codec", "exchange", "outer", "source")
    table.columns[0].no_wrap = True
    for recipe in recipes:
        feedback = " + feedback" if recipe.feedback is not None else ""
        source = recipe.source if columns >= WIDE_COLUMNS else " ".join(_PAPER.findall(recipe.source))
        table.add_row(
            Text(recipe.name, style="bold"), BESIDE.get(recipe.name, "-"), recipe.payload, recipe.schedule.in_words(),
            recipe.compressor + feedback, recipe.exchange, describe(recipe)["outer"]["name"],
            Text(source or "-", style="dim"),
        )
    return table


def recipe_table(recipe: Recipe) -> Table:
    """One recipe, one part a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, part in describe(recipe).items():
        table.add_row(key, _part_in_words(part))
    table.add_row("when", recipe.schedule.in_words())
    return table


def result_table(summary: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The summary of a report as a table, in its order."""
    table = new_table("recipe", title=title)
    for header in ("val loss", "gap", "sent/peer", "factor", "time", "util"):
        table.add_column(header, justify="right", no_wrap=True)
    for entry in summary:
        note = f"\n{'; '.join(entry['notes'])}" if entry["notes"] else ""
        table.add_row(
            Text.assemble((str(entry["label"]), "bold"), (note, "red")),
            _loss(entry), _percent(entry["gap"]), _megabytes(entry["bytes_sent_per_peer"]),
            _factor(entry["reduction_vs_ddp"]), human_duration(entry["virtual_seconds"]),
            "-" if entry["utilization"] is None else f"{entry['utilization']:.0%}",
        )
    return table


def run_in_words(row: Mapping[str, Any], parameters: int, step_s: float) -> str:
    """The figures of one run for a person."""
    tally = row["tally"]
    loss = "not simulated (--timing-only)" if not row["curve"] else _first_to_last(row)
    reduction = row["reduction_vs_ddp"]
    lines = [
        f"recipe            {row['label']}, {every(row['steps_per_round'])}",
        f"model             {human_count(parameters)} parameters",
        f"peers             {human_count(row['peers'])}",
        f"tokens            {human_count(row['tokens'])} in {human_count(tally['steps'])} steps of all peers together",
        f"validation loss   {loss}",
        f"traffic           {human_bytes(row['bytes_sent_per_peer'])} sent by each peer on average"
        + (f", {_factor(reduction)} less than data parallelism in fp32" if reduction is not None else ""),
        f"virtual time      {human_duration(row['virtual_seconds'])} at {step_s:g} s a step",
        f"utilisation       {row['utilization']:.1%} of the peers' time was training",
        f"rounds            {human_count(tally['committed'])} committed, {human_count(tally['aborted'])} aborted",
        f"contributions     {human_count(tally['contributions'])}, {human_count(tally['late'])} late, "
        f"{human_count(sum(tally['dropped'].values()))} dropped{_droppers(tally['dropped'])}",
    ]
    if tally["joins"] or tally["leaves"] or tally["heals"]:
        times = f"{tally['joins']} times a peer joined, {tally['leaves']} times one left"
        lines.append(f"churn             {times}, {tally['heals']} partitions healed")
    lines.append(f"took              {human_duration(row['wall_seconds'])} here")
    if row["note"]:
        lines.append(f"note              {row['note']}")
    return "\n".join(lines)


def new_table(*headers: str, title: str | None = None) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.HORIZONTALS, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _part_in_words(part: Any) -> str:
    if part is None:
        return "none"
    if not isinstance(part, dict):
        return str(part)
    numbers = ", ".join(f"{key} {_number(value)}" for key, value in part.items() if key != "name")
    return f"{part['name']}{': ' if numbers else ''}{numbers}"


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_part_in_words(value)})"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _loss(entry: Mapping[str, Any]) -> str:
    mean, spread = entry["val_loss"], entry["val_loss_std"]
    if mean is None:
        return "-"
    return f"{mean:.4f}" + (f" ± {spread:.4f}" if spread is not None else "")


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:+.2%}"


def _factor(factor: float | None) -> str:
    if factor is None or not math.isfinite(factor):
        return "-"
    return f"{factor:,.1f}x" if factor < 100 else f"{factor:,.0f}x"


def _megabytes(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e6:.3f} MB"


def _first_to_last(row: Mapping[str, Any]) -> str:
    first, last = row["curve"][0]["val_loss"], row["val_loss"]
    if last is None or first is None:
        return "not a number"
    return f"{first:.3f} -> {last:.4f}"


def _droppers(dropped: Mapping[str, int]) -> str:
    if not dropped:
        return ""
    worst = sorted(dropped, key=lambda peer: -dropped[peer])[:5]
    more = ", ..." if len(dropped) > len(worst) else ""
    return f" (of peers {', '.join(worst)}{more})"
