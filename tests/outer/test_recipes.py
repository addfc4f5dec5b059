"""Published numbers, and a manifest's own in their place."""

from __future__ import annotations

import pytest

from peer.errors import UserError
from peer.outer.optimizer import Nesterov, Sgd
from peer.outer.recipes import RECIPES, Recipe, resolve
from peer.protocol.manifest import RecipeSpec


def test_published_numbers() -> None:
    table = {name: (r.steps_per_round, r.compressor, r.outer) for name, r in RECIPES.items()}
    assert table == {
        "diloco": (500, "fp32", Nesterov(lr=0.7, momentum=0.9)),
        "opendiloco": (500, "int8", Nesterov(lr=0.7, momentum=0.9)),
        "fedavg": (300, "fp32", Sgd(lr=1.0)),
    }
    assert all(recipe.name == name and "arXiv" in recipe.source for name, recipe in RECIPES.items())


def test_a_bare_name_resolves_to_the_published_recipe() -> None:
    assert all(resolve(RecipeSpec(name=name)) == recipe for name, recipe in RECIPES.items())


def test_every_override_takes_effect() -> None:
    spec = RecipeSpec(name="diloco", steps_per_round=30, outer_learning_rate=0.4, outer_momentum=0.0, compressor="int8")
    resolved = resolve(spec)
    assert resolved.steps_per_round == 30
    assert resolved.compressor == "int8"
    assert resolved.outer == Nesterov(lr=0.4, momentum=0.0)
    assert resolve(RecipeSpec(name="fedavg", outer_learning_rate=0.5)).outer == Sgd(lr=0.5)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown recipe 'dilocco'") as caught:
        resolve(RecipeSpec(name="dilocco"))
    assert caught.value.hint == "did you mean 'diloco'?"


def test_momentum_for_a_recipe_without_it_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"outer_momentum=0\.9: recipe 'fedavg' has no outer momentum") as caught:
        resolve(RecipeSpec(name="fedavg", outer_momentum=0.9))
    assert "Remove outer_momentum" in caught.value.hint


def test_a_recipe_of_impossible_parts_is_refused() -> None:
    with pytest.raises(UserError, match="unknown compressor 'int9'"):
        Recipe(name="x", steps_per_round=1, compressor="int9", outer=Sgd(lr=1.0), source="test")
    with pytest.raises(UserError, match="steps_per_round=0"):
        Recipe(name="x", steps_per_round=0, compressor="fp32", outer=Sgd(lr=1.0), source="test")
