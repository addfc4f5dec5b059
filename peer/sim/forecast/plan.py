"""The plan of a run before anything is rented: each recipe's utilisation, time, traffic, cost, and what to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from peer.errors import UserError
from peer.outer.policy.regular import Regular
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RoundSpec
from peer.sim.campaign.label import Choice, parse_label, with_room
from peer.sim.forecast.peers import PlannedPeers
from peer.sim.forecast.published_bandwidth import METHODS, PAPER, SIZES, TARGETS
from peer.sim.forecast.steady import limit_of, needed_gbit_s, steady

DAY_S = 86_400.0
GOOD_UTILISATION = 0.9
LONG_ROUND = 1.25  # times the recipe's steps, which a round may last
# Recipes that lose little against data parallelism (docs/recipes.md, docs/results), the best first.
PREFERRED = ("lagoon", "sparseloco", "muloco", "streaming-diloco", "opendiloco", "diloco")
LAYERS = ((1e6, 4), (1e8, 12), (1e9, 24), (1e10, 48), (1e11, 108))  # (parameters, layers) of published models
WIDTH_UNIT = 64


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned: a model, how much a step learns from, who computes it.

    Attributes:
        wait_s: how long a round waits for late members.
    """

    name: str
    layout: FlatLayout
    tokens_per_step: int
    peers: PlannedPeers
    wait_s: float = RoundSpec().straggler_wait_s


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One recipe on the planned peers.

    Attributes:
        steps_made: of the fastest peer in a round: more than `steps_per_round` where a round takes longer than these,
            since trainers do not wait for it.
        utilisation: share of the time that is computing.
        round_s: seconds in which everything is synchronised once.
        gb_a_day: that one peer sends, the mean; it receives as much.
        days, cost: until the goal; None without a goal, or without prices.
        limit: what keeps the peers from computing, or their rounds from their length.
        note: what the figures leave out.
    """

    label: str
    steps_per_round: int
    steps_made: int
    utilisation: float
    round_s: float
    gb_a_day: float
    tokens_a_day: float
    days: float | None
    cost: float | None
    limit: str
    note: str

    @property
    def stretch(self) -> float:
        """Steps of a round over those that the recipe says."""
        return self.steps_made / self.steps_per_round


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Gbit/s between two peers for a utilisation; `published`: of the nearest model and target in the paper's table."""

    label: str
    gbit_s: float | None
    published: float | None = None
    note: str = ""


def layout_of(parameters: float) -> FlatLayout:
    """A decoder of about so many parameters, all of them in its layers, for simulations of time alone.

    Raises:
        UserError: fewer than a million or more than 10^13.
    """
    if not 1e6 <= parameters <= 1e13:
        raise UserError(f"--params={parameters:g}: must be from 1e6 to 1e13")
    layers = _layers(parameters)
    own = round(parameters / layers)
    width = max(WIDTH_UNIT, int(math.sqrt(own / 12) // WIDTH_UNIT * WIDTH_UNIT))
    matrices = ((width, width),) * 4 + ((4 * width, width),) * 2
    shapes: tuple[tuple[int, ...], ...] = (*matrices, (max(1, own - 12 * width**2),))
    named = [(f"layers.{layer}.{index}", shape) for layer in range(layers) for index, shape in enumerate(shapes)]
    offsets = list(accumulate((math.prod(shape) for _, shape in named), initial=0))
    return FlatLayout(
        names=tuple(name for name, _ in named), shapes=tuple(shape for _, shape in named),
        offsets=tuple(offsets[:-1]), numel=offsets[-1],
    )  # fmt: skip


def forecast(label: str, recipe: Recipe, subject: Subject, goal_tokens: float | None = None) -> Forecast:
    """What one recipe costs these peers; its model is that of the simulator."""
    peers, layout = subject.peers, subject.layout
    joined = as_joined(recipe, subject.wait_s)
    found = steady(joined, layout, peers.profiles, peers.step_s, layerwise=False)
    waits = recipe.payload == "gradient" or recipe.votes is not None
    step_s = peers.step_s * recipe.gradients_per_step
    steps_s = found.steps_s if waits else sum(profile.speed for profile in peers.profiles) / step_s
    round_s = recipe.steps_per_round / found.fastest_steps_s
    whole = recipe.num_fragments * found.sent_bytes_a_group / round_s  # an overlapped round outlasts the window's end
    sent_bytes_s = found.sent_bytes_s if waits or recipe.gossips else whole
    tokens_a_day = steps_s * subject.tokens_per_step * DAY_S
    days = None if goal_tokens is None else goal_tokens / tokens_a_day
    return Forecast(
        label=label, steps_per_round=recipe.steps_per_round,
        steps_made=recipe.steps_per_round if waits else round(round_s / step_s),
        utilisation=found.utilisation if waits else 1.0, round_s=round_s,
        gb_a_day=sent_bytes_s * DAY_S / 1e9, tokens_a_day=tokens_a_day, days=days,
        cost=None if days is None or peers.price is None else 24 * days * peers.price,
        limit=limit_of(joined, layout, peers.profiles, peers.step_s, found),
        note=_note(recipe),
    )  # fmt: skip


def as_joined(recipe: Recipe, wait_s: float) -> Recipe:
    """The recipe as `atoll join` runs it: where rounds have many steps, trainers continue until the next round begins;
    that is sent once the result of the one before has come, however much later that is merged.

    Args:
        wait_s: how long a round waits for members that are late; then they send what they have.
    """
    recipe = replace(recipe, straggler=recipe.straggler.within(wait_s))
    if recipe.payload == "gradient" or not isinstance(schedule := recipe.schedule, Regular):
        return recipe
    if recipe.gossips or recipe.straggler.asynchronous:
        return replace(recipe, schedule=schedule.overlapping(min(recipe.overlap_steps, schedule.shortest)))
    return replace(recipe, schedule=schedule.overlapping(schedule.shortest), merge=recipe.late_merge)


def bandwidth_needed(choice: Choice, layout: FlatLayout, step_s: float, target: float) -> Needed:
    """What one recipe needs for a utilisation."""
    recipe = with_room(choice, choice.recipe(), layout)
    return Needed(label=choice.label, gbit_s=needed_gbit_s(recipe, layout, step_s, target), note=_note(recipe))


def published_needed(layout: FlatLayout, step_s: float, target: float) -> tuple[str, float, list[Needed]]:
    """-> (model of the paper's table, its target, its methods with ours beside them), both the nearest ones."""
    size = min(SIZES, key=lambda one: abs(math.log(one.parameters / layout.numel)))
    place = min(range(len(TARGETS)), key=lambda k: abs(TARGETS[k] - target))
    rows = []
    for method, published in zip(METHODS, PAPER[size.name], strict=True):
        choice = parse_label(METHODS[method].format(fragments=max(1, _layers(layout.numel) // 3)))
        ours = bandwidth_needed(choice, layout, step_s, target)
        rows.append(Needed(label=method, gbit_s=ours.gbit_s, published=published[place]))
    return size.name, TARGETS[place], rows


def advice(forecasts: Sequence[Forecast]) -> str:
    """Which recipe to take, and why, in a few sentences."""
    able = [each for each in forecasts if not each.note] or list(forecasts)
    least = min(each.stretch for each in able)
    prompt = [each for each in able if each.stretch <= max(LONG_ROUND, least)]
    busiest = max(each.utilisation for each in prompt)
    good = [each for each in prompt if each.utilisation >= min(GOOD_UTILISATION, busiest)]
    rank = {name: place for place, name in enumerate(PREFERRED)}
    chosen = min(good, key=lambda each: (rank.get(each.label.partition(":")[0], len(rank)), -each.utilisation))
    head = "Take" if chosen.utilisation >= 0.5 else "No recipe keeps these peers busy; the best of them is"
    said = [f"{head} {chosen.label}: the peers compute {chosen.utilisation:.0%} of their time"]
    if chosen.days is not None:
        long = f"{chosen.days:.1f} days" if chosen.days >= 1 else f"{24 * chosen.days:.1f} hours"
        said[0] += f", which takes {long}"
        said[0] += f" and costs {chosen.cost:,.0f}" if chosen.cost is not None else ""
    said[0] += "."
    if chosen.stretch > LONG_ROUND:
        said.append(f"No recipe is in time here: its round lasts {chosen.steps_made:,} steps in place of "
                    f"{chosen.steps_per_round:,}, and the model learns less from each.")  # fmt: skip
    if chosen.limit != "computing":
        said.append(f"What limits it is the {chosen.limit}: {_REMEDIES[chosen.limit]}.")
    plain = next((each for each in forecasts if each.label == "ddp"), None)
    if plain is not None and plain is not chosen:
        factor = chosen.tokens_a_day / plain.tokens_a_day
        times = f"{max(factor, 1.0 / factor):,.1f}"
        how = "as fast" if times == "1.0" else f"{times} times {'slower' if factor > 1.0 else 'faster'}"
        said.append(f"Data parallelism (ddp) would be {how}.")
    return " ".join(said)


_REMEDIES = {
    "uplink": "give the peers faster uplinks, or make rounds longer (--steps-per-round)",
    "downlink": "give the peers faster downlinks, or make rounds longer (--steps-per-round)",
    "bandwidth": "faster lines in both directions, or longer rounds (--steps-per-round)",
    "latency": "choose peers nearer to each other, or make rounds longer (--steps-per-round)",
    "slowest peer": "leave the slowest peers out, or take paba, which gives them less to do",
}


def _layers(parameters: float) -> int:
    """Between the known sizes along a line in logarithms."""
    for (small, few), (large, many) in pairwise(LAYERS):
        if parameters <= large * 1.01:
            place = max(0.0, math.log(parameters / small) / math.log(large / small))
            return int(few * math.exp(math.log(many / few) * min(1.0, place)) + 0.5)
    return LAYERS[-1][1]


def _note(recipe: Recipe) -> str:
    if recipe.votes is not None:
        return "its rounds depend on the gradients: no round is counted here"
    if recipe.straggler.weight(staleness=1) < 1.0:
        return "peers do not wait for each other: late contributions count less"
    return ""
