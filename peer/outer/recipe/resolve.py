"""From what a manifest says to a recipe: a published one, with the manifest's own parts and numbers in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peer.errors import UserError, did_you_mean
from peer.outer.optim.optimizers import OuterOptimizer
from peer.outer.policy.schedules import Strided
from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import PARTS, Recipe, paced
from peer.outer.recipe.validation import LEAST_TO_JUDGE, checked
from peer.outer.topology.topologies import BandwidthMatching, Groups, Neighbours, RandomPairs
from peer.protocol.manifest import RecipeSpec


def resolve(spec: RecipeSpec) -> Recipe:
    """The recipe that a manifest names, with the manifest's own parts and numbers in place of the published ones.

    Raises:
        UserError: an unknown recipe, part or number (names the nearest), a value out of its range, or a combination
            that makes no sense, with the reason.
    """
    if spec.name not in RECIPES:
        raise UserError(f"unknown recipe {spec.name!r}", did_you_mean(spec.name, RECIPES))
    recipe = RECIPES[spec.name]
    changes: dict[str, Any] = {
        kind: _part(kind, value, recipe)
        for kind in PARTS
        if (value := getattr(spec, kind)) is not None
    }
    numbers = ("payload", "exchange", "average", "interpolation")
    changes |= {key: value for key in numbers if (value := getattr(spec, key)) is not None}
    if spec.compressor is not None:
        changes |= _borrowed_compressor(spec, changes)
    if spec.steps_per_round is not None:
        changes["schedule"] = paced(changes.get("schedule", recipe.schedule), spec.steps_per_round, spec.name)
    changes["outer"] = _with_outer_numbers(changes.get("outer", recipe.outer), spec, recipe.source)
    return checked(replace(recipe, **changes))  # all at once: what the parts contradict is judged in the end


def swarm_recipe(spec: RecipeSpec) -> Recipe:
    """The recipe of a manifest for a run of real peers.

    Raises:
        UserError: as `resolve`; and gossip whose aggregator could not guard it.
    """
    recipe = resolve(spec)
    if recipe.gossips and recipe.aggregator.robust and (problem := unguarded(recipe)) is not None:
        raise UserError(f"recipe {spec.name!r}: {problem[0]}", f"{problem[1]}, or aggregator: mean")
    return recipe


def unguarded(recipe: Recipe) -> tuple[str, str] | None:
    """(why no robust aggregator can guard the gossip rounds of real peers, the remedy); None if one can."""
    topology = recipe.topology
    few = isinstance(topology, Groups) and topology.size < LEAST_TO_JUDGE
    if few or isinstance(topology, RandomPairs | Neighbours | BandwidthMatching):
        return (
            "of two contributions no aggregator can tell which is malicious: a pair cannot tolerate a malicious member",
            "choose recipe fedavg with payload: parameters and topology: {name: groups, size: 4}, in which gates "
            "can judge",
        )
    if recipe.payload == "delta":
        return (
            "members also send their anchors, whose mean no aggregator guards: one malicious anchor moves all",
            "set payload: parameters, outer: {name: sgd, lr: 1.0} and merge: {name: mix, alpha: 0.0}",
        )
    return None


def _borrowed_compressor(spec: RecipeSpec, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A codec's own expression, or a recipe's name for its whole way to compress: codec, feedback and exchange."""
    assert spec.compressor is not None
    lender = RECIPES.get(spec.compressor)
    if lender is None:
        return {"compressor": spec.compressor}
    lent = {"compressor": lender.compressor, "feedback": lender.feedback, "exchange": lender.exchange}
    return lent | {key: changes[key] for key in ("feedback", "exchange") if key in changes}


def _part(kind: str, value: Any, recipe: Recipe) -> Any:
    """One part from a manifest: a word, a recipe to borrow from, or a mapping of numbers."""
    if isinstance(value, str):
        if kind in ("feedback", "outer_schedule", "moments") and value == "none":
            return None
        if value in RECIPES:
            return getattr(RECIPES[value], kind)
        return _build(kind, value, {})
    numbers = dict(value)
    name = numbers.pop("name", None)
    if name is not None and name not in RECIPES:
        return _build(kind, str(name), numbers)
    present = getattr(RECIPES[name] if name is not None else recipe, kind)
    if present is None:
        return _build(kind, next(iter(PARTS[kind])), numbers)
    _check_numbers(kind, type(present), numbers)
    if isinstance(present, Strided):  # where one of the two numbers is given, it counts alone
        if "num_fragments" in numbers:
            numbers.setdefault("blocks_per_fragment", None)
        elif numbers.get("blocks_per_fragment") is not None:
            numbers["num_fragments"] = 1
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
    if "tuple" in annotation:
        return isinstance(value, tuple) and ("..." in annotation or len(value) == annotation.count(",") + 1)
    if isinstance(value, bool):
        return "bool" in annotation
    if isinstance(value, int):
        return "int" in annotation or "float" in annotation
    if isinstance(value, float):
        return "float" in annotation
    return isinstance(value, str) and ("str" in annotation or "Literal" in annotation)


def _with_outer_numbers(outer: OuterOptimizer, spec: RecipeSpec, source: str) -> OuterOptimizer:
    """The two most common numbers have keys of their own."""
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
