"""Recipes as a manifest spells them."""

from __future__ import annotations

from typing import Any

import pytest

from peer.errors import UserError
from peer.outer.recipe.recipe import Recipe
from peer.outer.recipe.resolve import resolve
from peer.protocol.manifest import RecipeSpec


def recipe(name: str, **overrides: Any) -> Recipe:
    return resolve(RecipeSpec.model_validate({"name": name, **overrides}))


def refused(name: str, **overrides: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        recipe(name, **overrides)
    return caught.value
