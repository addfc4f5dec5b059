"""docs/recipes has every recipe as one function of a page, and the simulator's recipe does what the page does."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.outer.compress.randomk import RandomK
from peer.outer.compress.threshold import share
from peer.outer.policy.compute_timeout import choose_timeout
from peer.outer.recipe.published import RECIPES
from peer.outer.state.gathered_update import round_seed
from peer.sim.campaign.simulation import Simulation, fragments_of
from peer.sim.world.network import links_of
from peer.sim.world.scenario import PeerProfile
from tests.sim.tiny import ADAMW, PUBLISHED, commits_of, recipe_of, simulate
from tests.sim.tiny_task import TinyTask, layout

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
STEPS, PEERS, LINES = 60, 4, 60
H = {"H": 10}
JITTER = (PeerProfile(jitter=0.5),) * PEERS
UPLINKS = tuple(PeerProfile(up_bytes_s=rate, down_bytes_s=rate) for rate in (1e5, 2e5, 4e5, 8e5))
SPEEDS = (1.0, 1.31, 0.73, 2.17)


class Looked(TinyTask):
    """Calls `look` once, when a peer asks for the batch after `STEPS`."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look: Callable[[], None] | None = look

    def batches(self, peer: int) -> Iterator[Tensor]:
        """See `Task.batches`."""
        for made, batch in enumerate(super().batches(peer)):
            if made == STEPS and self._look is not None:
                self._look()
                self._look = None
            yield batch


def production(name: str, profiles: Any = None, **overrides: Any) -> tuple[Tensor, list[Tensor]]:
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
    simulate(
        recipe, peers=PEERS, profiles=profiles, steps=STEPS + 1, inner=PUBLISHED, prepare=running.append,
        task=Looked(look),
    )  # fmt: skip
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


def replicas(name: str, count: int = PEERS) -> list[Any]:
    """Of the tiny task, with the optimizer that the recipe was published with."""
    import common  # type: ignore[import-not-found]  # of docs/recipes

    task = TinyTask()

    def gradient_at(x: Tensor, batch: Tensor) -> Tensor:
        out = torch.empty_like(x)
        task.gradient(x, batch, out)
        return out

    def optimizer(x: Tensor) -> Any:
        settings = x, task.layout.shapes, ADAMW.learning_rate
        return common.Muon(*settings, task.layout.hidden) if RECIPES[name].inner == "muon" else common.AdamW(*settings)

    return [common.Replica(task.initial(), gradient_at, task.batches(peer), optimizer) for peer in range(count)]


def groups(name: str, profiles: Sequence[PeerProfile] = (PeerProfile(),) * PEERS) -> Callable[[int], Any]:
    """(round) -> who meets, as the recipe draws it."""
    return lambda round: RECIPES[name].topology.groups(round, range(PEERS), 0, links_of(profiles))


def places(name: str, round: int) -> Tensor:
    """The coordinates of a seeded codec, as the recipe draws them."""
    seeded = RECIPES[name].codec().seeded(round_seed(0, 0, round))
    assert isinstance(seeded, RandomK)
    numel = layout().numel
    return torch.from_numpy(seeded.positions(numel, 0, share(seeded.ratio, numel)))


def micro_batches() -> list[list[list[float]]]:
    """Seconds of the eight micro-batches of each step and peer of `JITTER`."""
    drawn = [random.Random(f"0/{peer}") for peer in range(PEERS)]
    return [[[1 / 8 * one.lognormvariate(-0.125, 0.5) for _ in range(8)] for one in drawn] for _ in range(STEPS)]


def fragments() -> list[Tensor]:
    """The indices of each fragment's elements."""
    ranges = fragments_of(RECIPES["streaming-diloco"], layout())
    return [torch.cat([torch.arange(*one) for one in own]) for own in ranges]


IN_STEP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "gpa": ({"mu_x": 0.9}, {"average": 0.9}),
    "snoo": (H, {"steps_per_round": 10}),
    "des-loc": ({"H": 5}, {"steps_per_round": 5}),
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
    "streaming-diloco": ({"fragments": fragments(), **H}, {"steps_per_round": 10}),
    "eager-diloco": (H, {"steps_per_round": 10}),
    "muloco": (H, {"steps_per_round": 10}),
    "lagoon": (H, {"steps_per_round": 10}),
    "sparseloco": (H, {"steps_per_round": 10}),
    "covenant": ({"H": 5}, {"steps_per_round": 5}),
    "pier": ({"H": 5, "beta": 0.5}, {"steps_per_round": 5, "outer_momentum": 0.5}),
    "restarted-diloco": (H, {"steps_per_round": 10}),
    "edit": ({"penalty": (1.02, 0.1, 0.5), **H}, {
        "steps_per_round": 10, "aggregator": {"threshold": 1.02, "temperature": 0.1, "max_norm": 0.5},
    }),
    "palsgd": ({"p": 0.6, "nu": 5.0, **H}, {"steps_per_round": 10, "local": {"p": 0.6, "eta": 5.0}}),
    "demo": ({}, {}),
    "distro": ({}, {}),
    "noloco": ({"pairs": groups("noloco"), **H}, {"steps_per_round": 10}),
    "selsync": ({"delta": 0.02}, {"schedule": {"delta": 0.02}}),
    "dropcompute": ({"tau": 0.9, "seconds": micro_batches()}, {"straggler": {"tau_s": 0.9}, "profiles": JITTER}),
    "a2cid2": ({"pairs": groups("a2cid2")}, {}),
    "saps": (
        {"pairs": groups("saps", UPLINKS), "mask": lambda t: places("saps", t)}, {"profiles": UPLINKS},
    ),
    "sparta": ({"mask": lambda t: places("sparta", t), **H}, {"steps_per_round": 10}),
    "heloco": (H, {"steps_per_round": 10, "straggler": "wait"}),
    "dct-threshold": ({}, {}),
    "sparse-block": ({"place": lambda t: int(places("sparse-block", t)[0])}, {}),
    "fusionllm-adatopk": ({"uplink": [one.up_bytes_s for one in UPLINKS]}, {"profiles": UPLINKS}),
}
"""Recipes whose peers keep pace: numbers of the page, and the same in a manifest."""


@pytest.mark.parametrize("name", IN_STEP)
def test_a_page_and_the_recipe_are_the_same(name: str, page: Callable[[str], Callable[..., Any]]) -> None:
    numbers, overrides = IN_STEP[name]
    result, ends = production(name, **overrides)
    peers = replicas(name)
    torch.testing.assert_close(page(name)(peers, STEPS, **numbers), result, rtol=0.0, atol=1e-6)
    for peer, end in zip(peers, ends, strict=True):
        torch.testing.assert_close(peer.x, end, rtol=0.0, atol=1e-6)


def test_asynchronous_anchors_are_the_same(page: Callable[[str], Callable[..., Any]]) -> None:
    profiles = tuple(PeerProfile(speed=speed) for speed in SPEEDS)
    _, commits = commits_of(
        recipe_of("async-diloco").with_steps_per_round(6), profiles=profiles, steps=STEPS, inner=PUBLISHED
    )
    anchors = page("async-diloco")(replicas("async-diloco"), 15, SPEEDS, H=6)
    for commit, anchor in zip(commits[1:], anchors, strict=False):
        torch.testing.assert_close(anchor, commit.anchors[0], rtol=0.0, atol=1e-6)
    assert len(commits) > 15
    assert {len(commit.members) for commit in commits[:15]} == {2}


def test_the_fastest_members_and_their_means_are_the_same(page: Callable[[str], Callable[..., Any]]) -> None:
    profiles = tuple(PeerProfile(speed=speed) for speed in SPEEDS)
    _, commits = commits_of("dybw", profiles=profiles, steps=STEPS, inner=PUBLISHED)
    peers = replicas("dybw")
    members = page("dybw")(peers, STEPS, SPEEDS)
    assert members == [commit.members for commit in commits[:STEPS]]
    assert len(set(members)) > 3
    end = commits[STEPS]
    for index in members[-1]:  # of the others some have stepped on by then
        if index not in end.members:
            torch.testing.assert_close(peers[index].x, end.locals[index], rtol=0.0, atol=1e-6)


def test_work_is_divided_and_averaged_the_same(page: Callable[[str], Callable[..., Any]]) -> None:
    profiles = tuple(
        PeerProfile(speed=speed, up_bytes_s=one.up_bytes_s, down_bytes_s=one.down_bytes_s)
        for speed, one in zip(SPEEDS, UPLINKS, strict=True)
    )
    _, commits = commits_of(
        recipe_of("paba").with_steps_per_round(10), profiles=profiles, steps=STEPS, inner=PUBLISHED
    )
    rates = [one.up_bytes_s for one in UPLINKS]
    anchors = page("paba")(replicas("paba"), 5, SPEEDS, rates, 4 * layout().numel, H=10)
    for commit, anchor in zip(commits[1:6], anchors, strict=True):
        torch.testing.assert_close(anchor, commit.anchors[0], rtol=0.0, atol=1e-6)


def test_the_timeout_is_the_one_that_the_recipe_chooses(page: Callable[[str], Callable[..., Any]]) -> None:
    seconds = micro_batches()
    tau = choose_timeout(np.array(seconds), 0.05)
    assert 0.0 < tau < np.inf
    ends = []
    for numbers in ({"tau": tau}, {"measured": seconds, "Tc": 0.05}):
        peers = replicas("dropcompute")
        page("dropcompute")(peers, 10, seconds, **numbers)
        ends.append(peers[0].x)
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_is_short_and_has_the_numbers_of_the_recipe(
    name: str, page: Callable[[str], Callable[..., Any]]
) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno < LINES
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert imported <= {"torch", "math", "random", "statistics", "heapq", "itertools", "common"}
    defaults = {key: value.default for key, value in inspect.signature(page(name)).parameters.items()}
    rounds = next((defaults[key] for key in ("H", "tau", "T") if isinstance(defaults.get(key), int)), None)
    if rounds is not None:
        assert rounds == RECIPES[name].steps_per_round
    assert f"(recipes/{name}.py)" in (FOLDER.parent / "recipes.md").read_text()
