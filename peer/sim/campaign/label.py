"""`name:key=value,key=value` as a person types it on the command line -> a recipe and its inner settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from peer.errors import UserError, did_you_mean
from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import PARTS, Recipe
from peer.outer.recipe.resolve import resolve
from peer.outer.recipe.validation import checked
from peer.outer.state.flat_layout import FlatLayout, count_blocks
from peer.protocol.manifest import InnerSpec, RecipeSpec
from peer.protocol.problems import explain_validation
from peer.protocol.yaml_text import parse_yaml

INNER = "inner"
EXAMPLE = "write it as diloco:compressor=int8,outer.momentum=0.8,inner.optimizer=muon"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One recipe of a comparison.

    Attributes:
        label: as typed; its name in tables and reports.
        spec: the recipe with what the label sets.
        inner: keys of `InnerSpec` that the label sets.
    """

    label: str
    spec: RecipeSpec
    inner: Mapping[str, Any]

    @property
    def sets_pace(self) -> bool:
        """Whether the label itself says how long a round is."""
        return self.spec.steps_per_round is not None or self.sets_in_schedule("steps", "period")

    def sets_in_schedule(self, *keys: str) -> bool:
        """Whether the label sets any of these numbers of the schedule."""
        schedule = self.spec.schedule
        return isinstance(schedule, dict) and any(key in schedule for key in keys)

    def recipe(self) -> Recipe:
        """The recipe with its parts; raises `UserError` with the label."""
        try:
            return resolve(self.spec)
        except UserError as error:
            raise UserError(f"recipe {self.label!r}: {error.what}", error.hint) from None

    def apply_to(self, inner: InnerSpec) -> InnerSpec:
        """The manifest's inner settings with those of the label in their place."""
        try:
            return InnerSpec.model_validate({**inner.model_dump(), **self.inner})
        except ValidationError as error:
            raise _refused(self.label, explain_validation(error, InnerSpec), "inner.") from None


def parse_label(label: str) -> Choice:
    """One recipe as typed.

    Raises:
        UserError: not `name:key=value,...`, an unknown name, key or part (names the nearest), or a value out of its
            range.
    """
    name, colon, rest = label.partition(":")
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}", f"{did_you_mean(name, RECIPES)}\nsee 'atoll recipes'")
    if colon and not rest.strip():
        raise UserError(f"recipe {label!r}: nothing follows the colon", EXAMPLE)
    parts: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    seen: set[str] = set()
    for item in _split(rest) if rest else ():
        key, equals, text = item.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise UserError(f"recipe {label!r}: {item!r} is not key=value", EXAMPLE)
        if key.strip() in seen:
            raise UserError(f"recipe {label!r}: {key.strip()!r} is set twice", "remove one of them")
        seen.add(key.strip())
        _set(label, parts, inner, key.strip(), _value(label, text))
    try:
        choice = Choice(label=label, spec=RecipeSpec.model_validate({**parts, "name": name}), inner=inner)
    except ValidationError as error:
        raise _refused(label, explain_validation(error, RecipeSpec)) from None
    choice.apply_to(InnerSpec())
    choice.recipe()
    return choice


def parse_labels(labels: Sequence[str], baselines: Sequence[str]) -> list[Choice]:
    """All recipes of a comparison, `all` for every published one; baselines that are not named are put first.

    Raises:
        UserError: as `parse_label`; a label that is there twice.
    """
    named = [name for label in labels for name in (RECIPES if label == "all" else [label])]
    ordered = list(dict.fromkeys(named))
    if len(ordered) < len(named) and "all" not in labels:
        twice = next(label for label in ordered if named.count(label) > 1)
        raise UserError(f"recipe {twice!r} is named twice", "name each once; --seeds repeats a run with other seeds")
    return [parse_label(label) for label in [*(label for label in baselines if label not in ordered), *ordered]]


def at_pace(choice: Choice, limit_steps: int) -> Recipe:
    """The recipe of a choice with rounds of at most `limit_steps`, unless its label sets the length of a round.

    Raises:
        UserError: its schedule cannot be that short, with the label.
    """
    recipe = choice.recipe()
    if choice.sets_pace or recipe.steps_per_round <= limit_steps:
        return recipe
    try:
        return checked(recipe.with_steps_per_round(limit_steps))
    except UserError as error:
        what = f"recipe {choice.label!r} with rounds of {limit_steps} steps: {error.what}"
        raise UserError(what, f"{error.hint}\nor say steps_per_round or schedule yourself".strip()) from None


def with_room(choice: Choice, recipe: Recipe, layout: FlatLayout) -> Recipe:
    """The recipe with at most as many fragments as the model has blocks, unless its label sets how many.

    Raises:
        UserError: the label sets more.
    """
    blocks = count_blocks(layout.names)
    recipe = recipe.fitted(blocks)
    if recipe.num_fragments - (recipe.cut.ends == "apart") <= max(1, blocks):
        return recipe
    if choice.sets_in_schedule("num_fragments"):
        what = f"recipe {choice.label!r}: schedule.num_fragments={recipe.num_fragments}: must be from 1 to {blocks}"
        raise UserError(what, f"the model has {blocks} blocks, and each fragment needs one")
    return recipe.with_fragments(blocks)


def _set(label: str, parts: dict[str, Any], inner: dict[str, Any], key: str, value: Any) -> None:
    head, dot, tail = key.partition(".")
    if head == "name" or (head == INNER and not dot):
        raise UserError(f"recipe {label!r}: {key!r} cannot be set", EXAMPLE)
    if head == INNER:
        inner[tail] = value
    elif not dot:
        before = parts.get(head)
        parts[head] = {**before, "name": value} if isinstance(before, dict) else value
    elif head not in PARTS:
        raise UserError(f"recipe {label!r}: {head!r} in {key!r} is no part", did_you_mean(head, [*PARTS, INNER]))
    else:
        before = parts.get(head, {})
        parts[head] = {**(before if isinstance(before, dict) else {"name": before}), tail: value}


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _value(label: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        raise UserError(f"recipe {label!r}: {text!r} cannot be read as a value", EXAMPLE) from None


def _refused(label: str, problems: str, prefix: str = "") -> UserError:
    first, _, others = problems.partition("\n")
    return UserError(f"recipe {label!r}: {prefix}{first}" if prefix else f"recipe {label!r}: {first}", others)
