"""What follows from a run's manifest, resolved once in each process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from peer.errors import UserError
from peer.outer.aggregate.base import Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.compress.base import Shapes
from peer.outer.compress.layout import numel_of
from peer.outer.compress.registry import compressor
from peer.outer.optim.inner_lr import shared_rate
from peer.outer.recipe.recipe import Recipe, word_of
from peer.outer.recipe.resolve import swarm_recipe, unguarded
from peer.outer.recipe.validation import checked
from peer.outer.state.fragments import Fragments
from peer.outer.state.gathered_update import GatherFormat
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat
from peer.outer.state.wire_format import WireFormat
from peer.outer.topology.topologies import Groups
from peer.protocol.lineage import RosterLimits
from peer.protocol.manifest import RunManifest
from peer.protocol.ranges import ClaimRule
from peer.protocol.weights import WeightRule


class Layout(Protocol):
    """The parameters of a model, in the order of the flat vector.

    Attributes:
        fragments: elements of each; none: it is whole.
        hidden: places of the matrices inside transformer blocks.
    """

    @property
    def shapes(self) -> Shapes: ...

    @property
    def fragments(self) -> Sequence[int]: ...

    @property
    def hidden(self) -> Sequence[int]: ...


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run of real peers, as its manifest says; made by `of`.

    Attributes:
        nominal_tokens: of a regular contribution.
    """

    manifest: RunManifest
    recipe: Recipe
    nominal_tokens: int

    @classmethod
    def of(cls, manifest: RunManifest) -> RunPlan:
        """In an open run, gates and clipping take the place of plain means.

        A manifest that names an aggregator is obeyed, whatever its mode.

        Raises:
            UserError: as `swarm_recipe` and `Recipe.lasting`; two numbers of how long a round waits; a run that ends by
                tokens where no anchor counts them; an open run of gossip rounds that no gate can guard, and groups
                larger than `rounds.max_group`.
        """
        recipe, wait_s = swarm_recipe(manifest.recipe), manifest.rounds.straggler_wait_s
        if (deadline_s := recipe.straggler.deadline_s) is not None and deadline_s != wait_s:
            raise UserError(
                f"recipe.straggler.deadline_s={deadline_s:g} and rounds.straggler_wait_s={wait_s:g}: one must go",
                "leave either out: a round waits as long as the other says",
            )
        limit, topology = manifest.rounds.max_group, recipe.topology
        if isinstance(topology, Groups) and topology.size > limit:
            raise UserError(
                f"recipe.topology: groups of {topology.size} are larger than rounds.max_group={limit}",
                f"set topology: {{name: groups, size: {limit}}} or less: they still mix in a few rounds",
            )
        chosen = manifest.recipe.aggregator is not None
        if manifest.rounds.tokens_total is not None and (recipe.gossips or recipe.payload == "gradient"):
            raise UserError(
                f"rounds.tokens_total: with recipe {manifest.recipe.name!r} no peer knows the swarm's tokens",
                "set rounds.total instead",
            )
        guarded = manifest.trust.mode == "private" or chosen or not isinstance(recipe.aggregator, Mean)
        if not guarded and recipe.gossips and (problem := unguarded(recipe)) is not None:
            raise UserError(
                f"recipe {manifest.recipe.name!r} in an open run: {problem[0]}",
                f"{problem[1]}; or set trust: {{mode: private}} for peers that know each other, "
                "or aggregator: mean to take the risk",
            )
        recipe = recipe if guarded else checked(replace(recipe, aggregator=Gated()))
        recipe = recipe.with_inner(manifest.inner).lasting(manifest.rounds.total)
        nominal_tokens = recipe.regular_steps(manifest.rounds.total) * manifest.tokens_per_step
        return cls(manifest=manifest, recipe=recipe, nominal_tokens=nominal_tokens)

    @property
    def weight_rule(self) -> WeightRule:
        """What the contributions of a roster weigh."""
        return replace(WeightRule.of(self.manifest.trust, self.nominal_tokens), alike=self.recipe.alike)

    @property
    def claim_rule(self) -> ClaimRule:
        """What members may claim to have trained on."""
        return ClaimRule.of(self.manifest.data.shared, self.nominal_tokens)

    @property
    def roster_limits(self) -> RosterLimits:
        """What the links of a chain are checked against."""
        rounds, fragment_of = self.manifest.rounds, self.recipe.fragment_of
        return RosterLimits(rounds.min_group, rounds.max_group, self.weight_rule, fragment_of, self.claim_rule)

    @property
    def rate(self) -> Callable[[int], float] | None:
        """The rate of every step that all peers make together; None where they make steps of their own."""
        inner, total = self.manifest.inner, self.manifest.rounds.total
        return shared_rate(inner, total) if self.recipe.payload == "gradient" else None

    def outer_state(self, vectors: Sequence[Tensor], layout: Layout) -> OuterState:
        """The outer state of round 0 in these vectors: the anchor, then the buffers.

        Args:
            layout: of the model's parameters.
        """
        anchor, *buffers = vectors
        optimizer = self.recipe.optimizer.shaped(layout.shapes, layout.hidden)
        fragments = self.fragments(layout.shapes, layout.fragments)
        return OuterState(anchor, buffers, optimizer, fragments, 0, self.manifest.genesis or "", self.rate)

    def fragments(self, shapes: Shapes, sizes: Sequence[int] = ()) -> Fragments:
        """How contributions and updates are written, of a model with these parameters.

        Args:
            sizes: elements of each fragment, in the order of the flat vector; none: it is whole.
        """
        return fragments_of(self.recipe, shapes, sizes, self.manifest.seed)

    def in_words(self) -> str:
        """One line: the mode of the run and what becomes of its members' contributions."""
        trust, recipe = self.manifest.trust, self.recipe
        name = word_of("aggregator", recipe.aggregator)
        gossip = f"; gossip in {word_of('topology', recipe.topology)}, no shared anchor" if recipe.gossips else ""
        if trust.mode == "private":
            return f"private: aggregator {name}; every member is trusted{gossip}"
        victim = "its group" if recipe.gossips else "it"
        warning = "" if recipe.aggregator.robust else f" (one malicious peer can ruin {victim})"
        weights = f"weights up to {trust.largest_weight} x the median"
        if recipe.payload == "parameters" or recipe.alike:
            weights = "all members weigh alike"
        elif trust.probation_rounds and not recipe.gossips:
            weights += f", newcomers of less than {trust.probation_rounds} rounds {trust.newcomers_share:.0%} together"
        return f"open: aggregator {name}{warning}, {weights}{gossip}"


def fragments_of(recipe: Recipe, shapes: Shapes, sizes: Sequence[int], seed: int) -> Fragments:
    """See `RunPlan.fragments`."""
    ends = iter(list(accumulate(sizes)) or [numel_of(shapes)])
    end, at = next(ends), 0
    cut: list[list[tuple[int, ...]]] = [[]]
    for shape in shapes:
        if at == end:
            end = next(ends)
            cut.append([])
        cut[-1].append(tuple(shape))
        at += math.prod(shape)
    wires = [wire_format(recipe, own, seed, index) for index, own in enumerate(cut)]
    exact = None if recipe.moments is None else ReduceFormat(numel_of(shapes), compressor("fp32"))
    return Fragments(wires, recipe.turns, exact)


def wire_format(recipe: Recipe, shapes: Shapes, seed: int, fragment: int = 0) -> WireFormat:
    """What a run's contributions and updates look like.

    Args:
        shapes: of the fragment's parameters, in the order of the flat vector.
        seed: the run's.
    """
    numel = numel_of(shapes)
    if recipe.exchange == "reduce":
        return ReduceFormat(numel, compressor(recipe.compressor))
    codec = recipe.allocator.usual(recipe.codec().bind(shapes))
    return GatherFormat(numel, codec, recipe.aggregator.shaped(shapes), seed, fragment)
