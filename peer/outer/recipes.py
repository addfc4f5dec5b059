"""Published algorithms as data: a recipe is a choice of parts and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from peer.errors import UserError, did_you_mean
from peer.outer.compress.registry import compressor
from peer.outer.optimizer import Nesterov, Sgd
from peer.outer.schedule import EverySteps
from peer.protocol.manifest import RecipeSpec


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the swarm does between and at rounds.

    Attributes:
        name: the name in the manifest.
        steps_per_round: inner steps between snapshots (H).
        compressor: name of the codec, for contributions and updates alike.
        outer: the outer optimizer; it holds no state and is shared freely.
        source: where the algorithm and its numbers come from.
    """

    name: str
    steps_per_round: int
    compressor: str
    outer: Nesterov | Sgd
    source: str

    def __post_init__(self) -> None:
        EverySteps(steps_per_round=self.steps_per_round)
        compressor(self.compressor)


_ALL: Final = (
    # m <- .9 m + D, anchor <- anchor - .7 (D + .9 m), D = mean over peers of (anchor - local); AdamW state is kept.
    Recipe(
        name="diloco",
        steps_per_round=500,
        compressor="fp32",
        outer=Nesterov(lr=0.7, momentum=0.9),
        source="Douillard et al. 2023, arXiv 2311.08105, algorithm 1 and section 3.1",
    ),
    # The same equations; D and its mean travel as 8-bit integers (the paper's own all-reduce was fp16).
    Recipe(
        name="opendiloco",
        steps_per_round=500,
        compressor="int8",
        outer=Nesterov(lr=0.7, momentum=0.9),
        source="Jaghouar et al. 2024, arXiv 2407.07852",
    ),
    # anchor <- sum_i (n_i / n) local_i = anchor - D with D weighted by n_i, here tokens for the paper's examples.
    # H: 5 epochs of 600 examples in batches of 10, as in the paper's MNIST experiments.
    Recipe(
        name="fedavg",
        steps_per_round=300,
        compressor="fp32",
        outer=Sgd(lr=1.0),
        source="McMahan et al. 2017, arXiv 1602.05629, algorithm 1",
    ),
)
RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType({recipe.name: recipe for recipe in _ALL})


def resolve(spec: RecipeSpec) -> Recipe:
    """The recipe that a manifest names, with the manifest's own numbers in place of the published ones.

    Raises:
        UserError: an unknown recipe (names the nearest), or a momentum for an outer optimizer that has none.
    """
    if spec.name not in RECIPES:
        raise UserError(f"unknown recipe {spec.name!r}", did_you_mean(spec.name, RECIPES))
    published = RECIPES[spec.name]
    return replace(
        published,
        steps_per_round=published.steps_per_round if spec.steps_per_round is None else spec.steps_per_round,
        compressor=published.compressor if spec.compressor is None else spec.compressor,
        outer=_outer(published, spec),
    )


def _outer(published: Recipe, spec: RecipeSpec) -> Nesterov | Sgd:
    lr = published.outer.lr if spec.outer_learning_rate is None else spec.outer_learning_rate
    if isinstance(published.outer, Sgd):
        if spec.outer_momentum is not None:
            raise UserError(
                f"recipe.outer_momentum={spec.outer_momentum}: recipe {spec.name!r} has no outer momentum",
                f"{spec.name} takes plain steps along the mean ({published.source}).\n"
                "Remove outer_momentum, or use recipe 'diloco'.",
            )
        return replace(published.outer, lr=lr)
    momentum = published.outer.momentum if spec.outer_momentum is None else spec.outer_momentum
    return replace(published.outer, lr=lr, momentum=momentum)
