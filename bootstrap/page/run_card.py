"""What of a run does not change: manifest, recipe, addresses, the command to join."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.recipe import describe
from peer.swarm.state.run_control import RunControl


@dataclass(frozen=True)
class RunCard:
    """One run.

    Attributes:
        organiser: peer id of the node that shows it.
        addresses: that peers join with, the widest reach first.
        control: what the organiser has decided; this does change.
        alone: the node has no other run, so that it needs no name.
    """

    plan: RunPlan
    organiser: str
    addresses: tuple[str, ...]
    control: RunControl
    alone: bool = True

    @property
    def document(self) -> dict[str, Any]:
        """As JSON."""
        manifest = self.plan.manifest
        named = "" if self.alone else f" --run {manifest.name}"
        return {
            "name": manifest.name, "run_id": manifest.run_id, "genesis": manifest.genesis, "organiser": self.organiser,
            "addresses": list(self.addresses), "join": [f"atoll join {address}{named}" for address in self.addresses],
            "trust": self.plan.in_words(), "recipe": describe(self.plan.recipe),
            "manifest": manifest.model_dump(mode="json", exclude_none=True),
        }  # fmt: skip
