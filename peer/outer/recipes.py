"""A recipe: a choice of parts and numbers, by name or as a manifest composes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from peer.errors import UserError, did_you_mean
from peer.outer.aggregate import Aggregator, Mean
from peer.outer.allocate import AdaptiveTopK, EvenSplit, TimeBalanced, WorkAllocator
from peer.outer.compress.base import Codec
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.registry import COMPRESSORS, codec
from peer.outer.local import Plain, Proximal, Replay
from peer.outer.merging import Accelerated, Carry, Eager, Elastic, MergeRule, Mix
from peer.outer.optimizer import Averaged, OuterOptimizer, Sgd
from peer.outer.refusals import contradictions
from peer.outer.registry import AGGREGATORS, OUTER
from peer.outer.schedules import Every, GradientChange, Strided, Timer
from peer.outer.straggler import Backup, ComputeTimeout, Quorum, StragglerPolicy, WaitAll
from peer.outer.topology import AllPeers, BandwidthMatching, Groups, Neighbours, RandomPairs, Topology
from peer.protocol.manifest import InnerSpec, RecipeSpec

Schedule = Every | Strided | GradientChange | Timer
LocalPart = Plain | Proximal | Replay

PARTS: Final[Mapping[str, Mapping[str, type]]] = MappingProxyType(
    {
        "schedule": {"every": Every, "strided": Strided, "gradient-change": GradientChange, "timer": Timer},
        "local": {"plain": Plain, "proximal": Proximal, "replay": Replay},
        "merge": {"mix": Mix, "carry": Carry, "elastic": Elastic, "eager": Eager, "accelerated": Accelerated},
        "topology": {
            "all": AllPeers, "pairs": RandomPairs, "groups": Groups, "neighbours": Neighbours,
            "bandwidth": BandwidthMatching,
        },
        "aggregator": AGGREGATORS,
        "outer": OUTER,
        "straggler": {"wait": WaitAll, "quorum": Quorum, "backup": Backup, "compute-timeout": ComputeTimeout},
        "allocator": {"even": EvenSplit, "time-balanced": TimeBalanced, "adaptive-topk": AdaptiveTopK},
        "feedback": {"error-feedback": ErrorFeedback},
    }
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the swarm does between and at rounds.

    Attributes:
        name: the name in the manifest.
        source: where the algorithm and its numbers come from.
        summary: its equation in one line.
        payload: `delta`: anchor minus local after many steps; `gradient`: of every step; `parameters`: gossip.
        exchange: `reduce`: each part is averaged by one member and encoded once; `gather`: all get every payload.
        schedule: when.
        compressor: the codec's expression, see `peer.outer.compress.registry.codec`.
        feedback: what the codec loses is added to the next contribution.
        local: what is added to the inner loop.
        merge: how a trainer takes up the result.
        topology: who averages with whom.
        aggregator: contributions -> one vector.
        outer: aggregate -> anchor.
        straggler: who is waited for.
        allocator: who does how much.
        inner: the inner optimizer it was published with; `none` when the outer one makes every step.
        average: decay per round of the average of anchors that the run yields; 0 yields the last anchor.
    """

    name: str
    source: str
    summary: str
    schedule: Schedule
    payload: Literal["delta", "gradient", "parameters"] = "delta"
    exchange: Literal["reduce", "gather"] = "reduce"
    compressor: str = "fp32"
    feedback: ErrorFeedback | None = None
    local: LocalPart = Plain()
    merge: MergeRule = Mix(alpha=0.0)
    topology: Topology = AllPeers()
    aggregator: Aggregator = Mean()
    outer: OuterOptimizer = Sgd(lr=1.0)
    straggler: StragglerPolicy = WaitAll()
    allocator: WorkAllocator = EvenSplit()
    inner: Literal["adamw", "muon", "sgd", "none"] = "adamw"
    average: float = 0.0

    def __post_init__(self) -> None:
        codec(self.compressor)
        _ = self.optimizer
        for problem, hint in contradictions(self):
            raise UserError(f"recipe {self.name!r}: {problem}", hint)

    @property
    def optimizer(self) -> OuterOptimizer:
        """The outer optimizer with the average of anchors around it, where there is one."""
        return Averaged(base=self.outer, decay=self.average) if self.average else self.outer

    def inner_settings(self, inner: InnerSpec) -> InnerSpec:
        """A manifest's inner settings, with the recipe's own optimizer where the manifest names none."""
        if inner.optimizer is not None:
            return inner
        return inner.model_copy(update={"optimizer": "sgd" if self.inner == "none" else self.inner})

    def codec(self) -> Codec:
        """The codec of contributions, not yet bound to a model's shapes."""
        return codec(self.compressor)

    @property
    def dense(self) -> bool:
        """Whether the codec keeps every element, so that payloads can be cut, reduced and encoded again."""
        return self.compressor in COMPRESSORS

    @property
    def steps_per_round(self) -> int:
        """H: inner steps in which everything is synchronised once."""
        if isinstance(self.schedule, Every):
            return self.schedule.steps
        return self.schedule.period if isinstance(self.schedule, Strided) else 1

    @property
    def overlap_steps(self) -> int:
        """Steps between sending and applying."""
        return self.schedule.overlap_steps if isinstance(self.schedule, Every | Strided) else 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients are only accumulated, and the outer optimizer makes every step (DeMo)."""
        return self.inner == "none"

    @property
    def gradients_per_step(self) -> int:
        """Forward and backward passes of one inner step: FedGLOMO makes two on each of two trajectories."""
        return 4 if isinstance(self.local, Replay) else 1

    @property
    def shared_anchor(self) -> bool:
        """Whether all peers hold the same anchor; in gossip each has its own."""
        gossip = self.payload == "parameters" or not isinstance(self.topology, AllPeers)
        return not gossip and not isinstance(self.merge, Eager)

    @property
    def rounds(self) -> Every:
        """The schedule of a recipe that the swarm runs, see `swarm_recipe`."""
        assert isinstance(self.schedule, Every), f"{self.name} has no rounds of one fragment"
        return self.schedule

    def with_steps_per_round(self, steps: int) -> Recipe:
        """The same recipe with another H."""
        return replace(self, schedule=_paced(self.schedule, steps, self.name))


def resolve(spec: RecipeSpec) -> Recipe:
    """The recipe that a manifest names, with the manifest's own parts and numbers in place of the published ones.

    Raises:
        UserError: an unknown recipe, part or number (names the nearest), a value out of its range, or a combination
            that makes no sense, with the reason.
    """
    from peer.outer.published import RECIPES

    if spec.name not in RECIPES:
        raise UserError(f"unknown recipe {spec.name!r}", did_you_mean(spec.name, RECIPES))
    recipe = RECIPES[spec.name]
    changes: dict[str, Any] = {
        kind: _part(kind, value, recipe, RECIPES)
        for kind in PARTS
        if (value := getattr(spec, kind)) is not None
    }
    changes |= {key: value for key in ("payload", "exchange", "average") if (value := getattr(spec, key)) is not None}
    if spec.compressor is not None:
        changes |= _borrowed_compressor(spec, changes, RECIPES)
    if spec.steps_per_round is not None:
        changes["schedule"] = _paced(changes.get("schedule", recipe.schedule), spec.steps_per_round, spec.name)
    changes["outer"] = _with_outer_numbers(changes.get("outer", recipe.outer), spec, recipe.source)
    return replace(recipe, **changes)  # all at once: what the parts contradict is judged in the end


def swarm_recipe(spec: RecipeSpec) -> Recipe:
    """The recipe of a manifest for a run of real peers.

    Raises:
        UserError: as `resolve`; and a recipe with a part that only the simulator has, naming it.
    """
    from peer.outer.published import RECIPES

    recipe = resolve(spec)
    for part, needed in _missing_on_a_swarm(recipe):
        value = getattr(recipe, part)
        able = [name for name, other in RECIPES.items() if not _missing_on_a_swarm(other)]
        raise UserError(
            f"recipe {spec.name!r} has {part} {value if isinstance(value, str) else _word(part, value)!r}, which peers "
            f"over a network do not speak yet; they need {needed}",
            f"try it with 'atoll simulate', or choose a recipe that runs on a swarm: {', '.join(able)}",
        )
    return recipe


def _missing_on_a_swarm(recipe: Recipe) -> list[tuple[str, str]]:
    """(part, what it must be) for each part that `peer.swarm` and `peer.link` cannot do."""
    able = {
        ("payload", "delta"): recipe.payload == "delta",
        ("exchange", "reduce"): recipe.exchange == "reduce",
        ("schedule", "every, with overlap_steps 0"): isinstance(recipe.schedule, Every) and recipe.overlap_steps == 0,
        ("merge", "carry"): isinstance(recipe.merge, Carry) or recipe.merge == Mix(alpha=0.0),
        ("topology", "all"): isinstance(recipe.topology, AllPeers),
        ("straggler", "wait, as rounds.straggler_wait_s says"): recipe.straggler == WaitAll(),
        ("allocator", "even"): isinstance(recipe.allocator, EvenSplit),
        ("local", "plain"): isinstance(recipe.local, Plain),
    }
    return [key for key, can in able.items() if not can]


def _borrowed_compressor(
    spec: RecipeSpec, changes: Mapping[str, Any], recipes: Mapping[str, Recipe]
) -> dict[str, Any]:
    """A codec's own expression, or a recipe's name for its whole way to compress: codec, feedback and exchange."""
    assert spec.compressor is not None
    lender = recipes.get(spec.compressor)
    if lender is None:
        return {"compressor": spec.compressor}
    lent = {"compressor": lender.compressor, "feedback": lender.feedback, "exchange": lender.exchange}
    return lent | {key: changes[key] for key in ("feedback", "exchange") if key in changes}


def _part(kind: str, value: Any, recipe: Recipe, recipes: Mapping[str, Recipe]) -> Any:
    """One part from a manifest: a word, a recipe to borrow from, or a mapping of numbers."""
    if isinstance(value, str):
        if kind == "feedback" and value == "none":
            return None
        if value in recipes:
            return getattr(recipes[value], kind)
        return _build(kind, value, {})
    numbers = dict(value)
    name = numbers.pop("name", None)
    if name is not None and name not in recipes:
        return _build(kind, str(name), numbers)
    present = getattr(recipes[name] if name is not None else recipe, kind)
    if present is None:
        return _build(kind, next(iter(PARTS[kind])), numbers)
    _check_numbers(kind, type(present), numbers)
    return replace(present, **numbers)


def _build(kind: str, name: str, numbers: Mapping[str, Any]) -> Any:
    words = PARTS[kind]
    if name not in words:
        raise UserError(f"recipe.{kind}: unknown {kind} {name!r}", did_you_mean(name, words))
    _check_numbers(kind, words[name], numbers)
    missing = [
        f.name
        for f in dataclasses.fields(words[name])
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in numbers
    ]
    if missing:
        raise UserError(
            f"recipe.{kind}: {name!r} needs {', '.join(missing)}",
            f"write it as a mapping: {kind}: {{name: {name}, {missing[0]}: ...}}",
        )
    return words[name](**numbers)


def _check_numbers(kind: str, part: type, numbers: Mapping[str, Any]) -> None:
    """Unknown keys, and values of another type than the part's own, as pydantic cannot know them."""
    fields = {f.name: str(f.type) for f in dataclasses.fields(part) if not f.metadata.get("bound", False)}
    for key, value in numbers.items():
        if key not in fields:
            raise UserError(f"unknown key 'recipe.{kind}.{key}'", did_you_mean(key, fields))
        if not _fits(value, fields[key]):
            raise UserError(f"recipe.{kind}.{key}={value!r}: must be {fields[key]}")


def _fits(value: Any, annotation: str) -> bool:
    if value is None:
        return "None" in annotation
    if isinstance(value, bool):
        return "bool" in annotation
    if isinstance(value, int):
        return "int" in annotation or "float" in annotation
    if isinstance(value, float):
        return "float" in annotation
    return ("tuple" in annotation) if isinstance(value, tuple) else ("str" in annotation or "Literal" in annotation)


def _paced(schedule: Schedule, steps: int, name: str) -> Schedule:
    """The schedule with another H."""
    if isinstance(schedule, Strided):
        return replace(
            schedule, period=steps, num_fragments=min(schedule.num_fragments, steps),
            overlap_steps=min(schedule.overlap_steps, steps),
        )
    if isinstance(schedule, Every):
        overlap = steps if schedule.overlap_steps == schedule.steps else min(schedule.overlap_steps, steps)
        limit = None if schedule.max_steps is None else max(schedule.max_steps, steps)
        return replace(schedule, steps=steps, overlap_steps=overlap, max_steps=limit)
    raise UserError(
        f"recipe.steps_per_round={steps}: recipe {name!r} decides at every step",
        "leave steps_per_round out, or choose a recipe with rounds, such as 'diloco'",
    )


def _with_outer_numbers(outer: OuterOptimizer, spec: RecipeSpec, source: str) -> OuterOptimizer:
    """The two numbers that everybody changes have keys of their own."""
    changes: dict[str, float] = {}
    fields = {f.name for f in dataclasses.fields(outer)}  # type: ignore[arg-type]
    if spec.outer_learning_rate is not None:
        changes["lr"] = spec.outer_learning_rate
    if spec.outer_momentum is not None:
        if "momentum" not in fields:
            raise UserError(
                f"recipe.outer_momentum={spec.outer_momentum}: recipe {spec.name!r} has no outer momentum",
                f"its outer optimizer is {type(outer).__name__} ({source}).\n"
                "Remove outer_momentum, or set outer: {name: nesterov, lr: ..., momentum: ...}.",
            )
        changes["momentum"] = spec.outer_momentum
    return replace(outer, **changes) if changes else outer  # type: ignore[type-var]


def _word(kind: str, part: object) -> str:
    return next((name for name, type_ in PARTS[kind].items() if type(part) is type_), "none")


def describe(recipe: Recipe) -> dict[str, Any]:
    """Every part of a recipe as JSON types: its word and its numbers."""
    parts: dict[str, Any] = {
        key: getattr(recipe, key)
        for key in ("name", "source", "summary", "payload", "exchange", "compressor", "inner", "average")
    }
    for kind in PARTS:
        part = getattr(recipe, kind)
        numbers = {} if part is None else {
            f.name: _plain(getattr(part, f.name))
            for f in dataclasses.fields(part)
            if not f.metadata.get("bound", False)
        }
        parts[kind] = None if part is None else {"name": _word(kind, part), **numbers}
    return parts


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        numbers = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"name": type(value).__name__, **numbers}
    if isinstance(value, float) and value == float("inf"):
        return None
    return list(value) if isinstance(value, tuple) else value
