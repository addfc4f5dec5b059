"""`atoll plan`: from flags to a table, a picture and words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table
from rich.text import Text

from peer.errors import UserError
from peer.outer.recipe.published import RECIPES
from peer.protocol.manifest import RoundSpec
from peer.sim.campaign.label import Choice, parse_label, with_room
from peer.sim.campaign.plan import load_task, meta_layout, parse_tokens
from peer.sim.cli.tables import new_table, simulator_console
from peer.sim.forecast.gpus import COMMON_MFU, gpu_step_s
from peer.sim.forecast.peers import parse_peers, planned_peers
from peer.sim.forecast.plan import (
    DAY_S,
    LONG_ROUND,
    Forecast,
    Needed,
    Subject,
    advice,
    bandwidth_needed,
    forecast,
    layout_of,
    published_needed,
)
from peer.system.output_files import check_output_file, replace_file
from peer.telemetry.figures import human_count, human_duration

DEFAULT_TOKENS_PER_STEP = 32_768
LIMIT_COLOURS = {
    "computing": "#009E73", "uplink": "#0072B2", "downlink": "#56B4E9", "bandwidth": "#CC79A7", "latency": "#E69F00",
    "slowest peer": "#D55E00",
}  # Okabe and Ito (2008)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The flags of `atoll plan`."""

    manifest: str | None
    parameters: str | None
    step_s: float | None
    gpu: str | None
    mfu: float | None
    tokens_per_step: int | None
    goal_tokens: str | None
    peers: tuple[str, ...]
    recipes: tuple[str, ...]
    steps_per_round: int | None
    target: float | None
    as_json: bool
    plot: Path | None


def run_plan(options: PlanOptions) -> int:
    """Print the plan; -> 0.

    Raises:
        UserError: flags that are missing, contradict each other, or are out of range.
    """
    if options.plot is not None:
        check_output_file(options.plot, "--plot")
    _check_flags(options)
    choices, subject = _choices(options), _subject(options)
    if options.target is not None:
        return _print_needed(options, subject, choices, options.target)
    goal = None if options.goal_tokens is None else parse_tokens(options.goal_tokens)
    forecasts = [
        forecast(choice.label, with_room(choice, choice.recipe(), subject.layout), subject, goal) for choice in choices
    ]
    forecasts.sort(key=lambda each: -each.tokens_a_day)
    if options.plot is not None:
        draw_plan(options.plot, forecasts, _title(subject))
    if options.as_json:
        print(json.dumps({**_described(subject), "recipes": [asdict(each) for each in forecasts],
                          "advice": advice(forecasts)}, indent=2))  # fmt: skip
        return 0
    console = simulator_console()
    console.print(f"[bold]{_title(subject)}[/]", highlight=False, soft_wrap=True)
    console.print(plan_table(forecasts))
    if late := next((each for each in forecasts if each.stretch > LONG_ROUND), None):
        console.print(f"{_steps(late)}: an exchange of {late.label} outlasts the steps of its round, which gets more",
                      style="dim", highlight=False, soft_wrap=True)  # fmt: skip
    console.print("\n" + advice(forecasts), markup=False, highlight=False)
    return 0


def _check_flags(options: PlanOptions) -> None:
    """Raises UserError where one flag leaves no use for another."""
    if options.target is not None:
        if not 0.0 < options.target < 1.0:
            raise UserError(f"--target-utilization={options.target:g}: must be between 0 and 1", "0.95 is common")
        for flag, value in (("--tokens", options.goal_tokens), ("--plot", options.plot)):
            if value is not None:
                raise UserError(f"{flag} has no use beside --target-utilization, which tells bandwidths alone",
                                f"leave out {flag}, or --target-utilization")  # fmt: skip
    if options.gpu is not None and options.step_s is not None:
        raise UserError("--gpu and --step-time both tell the time of a step", "give one of them")
    if options.mfu is not None and options.gpu is None and not any("gpu=" in text for text in options.peers):
        raise UserError(f"--mfu={options.mfu:g} has no use without a GPU", "--gpu NAME, or gpu= in --peers")


def _choices(options: PlanOptions) -> list[Choice]:
    labels = [name for label in options.recipes or ("all",) for name in (RECIPES if label == "all" else [label])]
    choices = [parse_label(label) for label in dict.fromkeys(labels)]
    if options.steps_per_round is None:
        return choices
    paced = []
    for choice in choices:
        if choice.recipe().steps_per_round > 1 and not choice.sets_pace:
            joint = "," if ":" in choice.label else ":"
            paced.append(parse_label(f"{choice.label}{joint}steps_per_round={options.steps_per_round}"))
        else:
            paced.append(choice)
    return paced


def _subject(options: PlanOptions) -> Subject:
    if (options.manifest is None) == (options.parameters is None):
        raise UserError("atoll plan needs a MANIFEST or --params", "for example --params 1e9")
    wait_s = RoundSpec().straggler_wait_s
    if options.manifest is not None:
        manifest = load_task(options.manifest)
        wait_s = manifest.rounds.straggler_wait_s
        name, layout = manifest.name, meta_layout(manifest)
        tokens = manifest.inner.batch_sequences * manifest.data.sequence_length
    else:
        assert options.parameters is not None
        parameters = parse_tokens(options.parameters, "--params", "parameters")
        layout, tokens = layout_of(parameters), None
        name = f"{EngFormatter(places=1, sep='')(parameters).replace('G', 'B')} parameters"
    tokens = options.tokens_per_step or tokens or DEFAULT_TOKENS_PER_STEP
    kinds = parse_peers(options.peers)
    seconds = [_step_s(options, kind.gpu, layout.numel, tokens) for kind in kinds]
    return Subject(
        name=name, layout=layout, tokens_per_step=tokens, peers=planned_peers(kinds, seconds), wait_s=wait_s
    )


def _step_s(options: PlanOptions, gpu: str | None, parameters: int, tokens: int) -> float:
    if gpu is None and options.step_s is not None:
        if not options.step_s > 0:
            raise UserError(f"--step-time={options.step_s:g}: must be above 0 seconds")
        return options.step_s
    name = gpu or options.gpu
    if name is None:
        raise UserError("atoll plan needs the time of a step", "--step-time SECONDS, --gpu NAME, or gpu= in --peers")
    return gpu_step_s(name, parameters, tokens, COMMON_MFU if options.mfu is None else options.mfu)


def _title(subject: Subject) -> str:
    peers = subject.peers
    price = f", {peers.price:,.2f} an hour together" if peers.price is not None else ""
    return (
        f"{subject.name}: {len(peers.profiles)} peers, {peers.step_s:.3g} s a step of "
        f"{human_count(subject.tokens_per_step)} tokens on the fastest{price}"
    )


def _described(subject: Subject) -> dict[str, Any]:
    peers = subject.peers
    return {
        "model": subject.name, "parameters": subject.layout.numel, "peers": len(peers.profiles),
        "step_seconds": peers.step_s, "tokens_per_step": subject.tokens_per_step, "price_per_hour": peers.price,
    }  # fmt: skip


def plan_table(forecasts: Sequence[Forecast]) -> Table:
    """One line per recipe, in the order given."""
    table = new_table("recipe")
    for header in ("utilisation", "a round", "steps", "GB/day, peer", "tokens/day", "takes", "cost"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    noted = any(each.note for each in forecasts)
    if noted:
        table.add_column("", overflow="fold")
    for each in forecasts:
        table.add_row(
            Text(each.label, style="bold"), f"{each.utilisation:.1%}", human_duration(each.round_s),
            _steps(each), f"{each.gb_a_day:,.1f}" if each.gb_a_day else "-", human_count(each.tokens_a_day),
            "-" if each.days is None else human_duration(each.days * DAY_S),
            "-" if each.cost is None else f"{each.cost:,.0f}", each.limit,
            *([Text(each.note, style="dim")] if noted else []),
        )
    return table


def _steps(forecast: Forecast) -> str:
    made, named = forecast.steps_made, forecast.steps_per_round
    return f"{named:,}" if forecast.stretch <= LONG_ROUND else f"{made:,}, not {named:,}"


def _print_needed(options: PlanOptions, subject: Subject, choices: Sequence[Choice], target: float) -> int:
    layout, step_s = subject.layout, subject.peers.step_s
    needed = [bandwidth_needed(choice, layout, step_s, target) for choice in choices]
    size, its_target, published = published_needed(layout, step_s, target)
    if options.as_json:
        print(json.dumps({
            **_described(subject), "target_utilization": target,
            "gbit_s": {each.label: each.gbit_s for each in needed},
            "notes": {each.label: each.note for each in needed if each.note},
            "published": {
                "source": "arXiv 2501.18512, table 4 (H = 100)", "model": size, "target_utilization": its_target,
                "methods": {row.label: {"gbit_s": row.gbit_s, "published": row.published} for row in published},
            },
        }, indent=2))  # fmt: skip
        return 0
    console = simulator_console()
    what = f"{subject.name}, {step_s:.3g} s a step: Gbit/s between two peers that compute {target:.0%} of their time"
    console.print(f"[bold]{what}[/]", highlight=False, soft_wrap=True)
    console.print(_needed_table(sorted(needed, key=lambda each: each.gbit_s or 0.0)))
    what = f"beside arXiv 2501.18512, table 4 ({size}, {its_target:.0%}, rounds of 100 steps)"
    console.print(f"\n[bold]{what}[/]", highlight=False, soft_wrap=True)
    console.print(_needed_table(published))
    return 0


def _needed_table(rows: Sequence[Needed]) -> Table:
    table = new_table("recipe")
    table.add_column("Gbit/s", justify="right")
    if any(row.published is not None for row in rows):
        table.add_column("published", justify="right")
    else:
        table.add_column("")
    for row in rows:
        last = row.note if row.published is None else f"{row.published:g}"
        shown = "-" if row.gbit_s is None else f"{row.gbit_s:,.2f}" if row.gbit_s >= 0.005 else "<0.01"
        table.add_row(row.label, shown, last)
    return table


def draw_plan(path: Path, forecasts: Sequence[Forecast], title: str) -> None:
    """Write a PNG: utilisation and traffic of each recipe, coloured by what limits it.

    Raises:
        UserError: the file cannot be written.
    """
    figure = Figure(figsize=(12.0, max(3.0, 1.4 + 0.27 * len(forecasts))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _bars(left, forecasts, [100 * each.utilisation for each in forecasts], "{:.0f}%")
    left.set_xlim(0, 112)
    left.set_xlabel("share of the time that is computing (%)")
    left.set_yticks(range(len(forecasts)), [each.label for each in forecasts])
    traffic = [each.gb_a_day for each in forecasts]
    _bars(right, forecasts, traffic, "{:,.1f}")
    right.set_xscale("log")
    right.set_xlim(left=max(0.1, min(traffic, default=1.0) / 3))
    right.set_ylim(len(forecasts) - 0.4, -0.6)
    right.margins(x=0.15)
    right.set_xlabel("GB a day that a peer sends (log)")
    shown = [limit for limit in LIMIT_COLOURS if any(each.limit == limit for each in forecasts)]
    handles = [left.barh([0], [0], color=LIMIT_COLOURS[limit]) for limit in shown]
    figure.legend(handles, shown, title="limited by", loc="outside lower left", ncols=len(shown), frameon=False)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    try:
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise UserError(f"picture {path}: cannot be written: {error.strerror}", "choose another file") from None


def _bars(axes: Axes, forecasts: Sequence[Forecast], values: Sequence[float], shown: str) -> None:
    bars = axes.barh(range(len(values)), values, color=[LIMIT_COLOURS[each.limit] for each in forecasts], height=0.7)
    axes.bar_label(bars, [shown.format(value) for value in values], padding=3, fontsize=8)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
