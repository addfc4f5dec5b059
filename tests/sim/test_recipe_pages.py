"""docs/recipes has every recipe as one function of a page, and the simulator's recipe does what the page does."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.outer.recipe.published import RECIPES
from peer.sim.campaign.simulation import Simulation
from tests.sim.tiny import ADAMW, PUBLISHED, recipe_of, simulate
from tests.sim.tiny_task import TinyTask

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
STEPS, PEERS, LINES = 60, 4, 60
H = {"H": 10}


class Looked(TinyTask):
    """Calls `look` when the first peer asks for the batch after so many."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def batches(self, peer: int) -> Iterator[Tensor]:
        """See `Task.batches`."""
        for made, batch in enumerate(super().batches(peer)):
            if (peer, made) == (0, STEPS):
                self._look()
            yield batch


def production(name: str, **overrides: Any) -> tuple[Tensor, list[Tensor]]:
    """What the recipe yields, and the parameters of all peers, after `STEPS` steps of each in the simulator."""
    running: list[Simulation] = []
    seen: list[Tensor] = []

    def look() -> None:
        learners = [replica.learner for replica in running[0].replicas if replica.learner is not None]
        seen.extend([running[0].consensus().clone(), *(learner.parameters.clone() for learner in learners)])

    steps = overrides.pop("steps_per_round", None)
    recipe = recipe_of(name, **overrides)
    if steps is not None:
        recipe = recipe.with_steps_per_round(steps)
    simulate(recipe, peers=PEERS, steps=STEPS + 1, inner=PUBLISHED, prepare=running.append, task=Looked(look))
    return seen[0], seen[1:]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[..., Any]]:
    """(recipe) -> the function of its page."""
    monkeypatch.syspath_prepend(FOLDER)

    def load(name: str) -> Callable[..., Any]:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name.replace("-", "_"))
        return function

    return load


def replicas(count: int = PEERS) -> list[Any]:
    """Of the tiny task, with the optimizer that the recipe was published with."""
    import common  # type: ignore[import-not-found]  # of docs/recipes

    task = TinyTask()

    def gradient_at(x: Tensor, batch: Tensor) -> Tensor:
        out = torch.empty_like(x)
        task.gradient(x, batch, out)
        return out

    def optimizer(x: Tensor) -> Any:
        return common.AdamW(x, task.layout.shapes, ADAMW.learning_rate)

    return [common.Replica(task.initial(), gradient_at, task.batches(peer), optimizer) for peer in range(count)]


IN_STEP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "fedavg": (H, {"steps_per_round": 10}),
    "fedadagrad": (H, {"steps_per_round": 10}),
    "fedadam": (H, {"steps_per_round": 10}),
    "fedyogi": (H, {"steps_per_round": 10}),
    "fedprox": (H, {"steps_per_round": 10}),
    "easgd": ({"tau": 10}, {"steps_per_round": 10}),
    "papa": ({}, {}),
    "fedglomo": (H, {"steps_per_round": 10}),
    "diloco": (H, {"steps_per_round": 10}),
    "opendiloco": (H, {"steps_per_round": 10}),
    "intellect1": (H, {"steps_per_round": 10}),
}
"""Recipes whose peers keep pace: numbers of the page, and the same in a manifest."""


@pytest.mark.parametrize("name", IN_STEP)
def test_a_page_and_the_recipe_are_the_same(name: str, page: Callable[[str], Callable[..., Any]]) -> None:
    numbers, overrides = IN_STEP[name]
    result, ends = production(name, **overrides)
    peers = replicas()
    torch.testing.assert_close(page(name)(peers, STEPS, **numbers), result, rtol=0.0, atol=1e-6)
    for peer, end in zip(peers, ends, strict=True):
        torch.testing.assert_close(peer.x, end, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", IN_STEP)
def test_a_page_is_short_and_has_the_numbers_of_the_recipe(
    name: str, page: Callable[[str], Callable[..., Any]]
) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno < LINES
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert imported <= {"torch", "math", "heapq", "itertools", "common"}
    defaults = {key: value.default for key, value in inspect.signature(page(name)).parameters.items()}
    rounds = next((defaults[key] for key in ("H", "tau", "T") if isinstance(defaults.get(key), int)), None)
    if rounds is not None:
        assert rounds == RECIPES[name].steps_per_round
