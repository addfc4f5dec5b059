"""What a recipe costs once a run is under way: two simulations of time alone, and the difference between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.sim.campaign.simulation import Simulation, SimulationSetup
from peer.sim.world.scenario import PeerProfile

BUSY = 0.98  # of the time: nothing but computing limits such a run
ALONE = 0.9  # of what more bandwidth both ways gives: one way alone is in the way
GBIT_S = (1e-4, 1e4)  # where a bandwidth is looked for
PRECISION = 1.01
TOLERANCE = 1e-9  # of a utilisation that is reached exactly

Profiles = Sequence[PeerProfile]
_RELIEFS: dict[str, Callable[[PeerProfile], PeerProfile]] = {
    "uplink": lambda profile: replace(profile, up_bytes_s=math.inf),
    "downlink": lambda profile: replace(profile, down_bytes_s=math.inf),
    "bandwidth": lambda profile: replace(profile, up_bytes_s=math.inf, down_bytes_s=math.inf),
    "latency": lambda profile: replace(profile, latency_s=0.0),
    "slowest peer": lambda profile: replace(profile, speed=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A run under way.

    Attributes:
        utilisation: share of the peers' time that is computing.
        steps_s: steps of all peers in a second.
        fastest_steps_s: of the peer that makes the most.
        sent_bytes_s: by one peer, the mean.
        sent_bytes_a_group: by one peer, for each group of any fragment that committed.
    """

    utilisation: float
    steps_s: float
    fastest_steps_s: float
    sent_bytes_s: float
    sent_bytes_a_group: float


def steady(
    recipe: Recipe, layout: FlatLayout, profiles: Profiles, step_s: float, window: tuple[int, int] | None = None,
    *, layerwise: bool = True,
) -> Steady:
    """Utilisation, speed and traffic between two steps: start and end are in both runs and cancel.

    Args:
        window: (first, last) step of each peer; None: two rounds after the first, once the recipe has warmed up.
        layerwise: layers are sent one by one during steps, which the peers of `atoll join` do not.
    """
    first, last = window or _window(recipe, profiles)
    early, late = (_run(recipe, layout, profiles, step_s, steps, layerwise) for steps in (first, last))
    if late[1] <= early[1]:  # both ended with the same long exchange
        return steady(recipe, layout, profiles, step_s, (last, 4 * last), layerwise=layerwise)
    busy_s, present_s, seconds, steps, fastest, sent, groups = (b - a for a, b in zip(early, late, strict=True))
    return Steady(
        utilisation=busy_s / present_s, steps_s=steps / seconds, fastest_steps_s=fastest / seconds,
        sent_bytes_s=sent / seconds, sent_bytes_a_group=sent / groups if groups else 0.0,
    )  # fmt: skip


def limit_of(recipe: Recipe, layout: FlatLayout, profiles: Profiles, step_s: float, found: Steady) -> str:
    """What keeps the peers of `atoll join` from computing: that of which the removal helps most; `computing` where they
    do little else.
    """
    if found.utilisation >= BUSY:
        return "computing"

    def helps(name: str) -> float:
        relieved = [_RELIEFS[name](profile) for profile in profiles]
        if relieved == list(profiles):
            return 0.0
        return steady(recipe, layout, relieved, step_s, layerwise=False).utilisation - found.utilisation

    gains = {name: helps(name) for name in ("bandwidth", "latency", "slowest peer")}
    best = max(gains, key=gains.__getitem__)
    if best != "bandwidth":
        return best
    return next((name for name in ("uplink", "downlink") if helps(name) >= ALONE * gains[best]), best)


def needed_gbit_s(recipe: Recipe, layout: FlatLayout, step_s: float, target: float) -> float | None:
    """Gbit/s between two peers, without latency, at which a recipe reaches a utilisation; None: none does."""
    def reaches(gbit_s: float) -> bool:
        link = PeerProfile(up_bytes_s=gbit_s * 1e9 / 8, down_bytes_s=gbit_s * 1e9 / 8)
        return steady(recipe, layout, (link, link), step_s).utilisation >= target - TOLERANCE

    low, high = GBIT_S
    if not reaches(high):
        return None
    if reaches(low):
        return low
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _window(recipe: Recipe, profiles: Profiles) -> tuple[int, int]:
    warm = recipe.schedule.warm_start_steps
    period = max(4, recipe.steps_per_round)
    first, last = (1, 3)
    if recipe.straggler.asynchronous:  # whose rounds follow no steps of their own
        first, last = (10, 50)
    elif len({profile.speed for profile in profiles}) > 1:  # which end a window at different places of a round
        first, last = (2, 12)
    return warm + first * period, warm + last * period


def _run(
    recipe: Recipe, layout: FlatLayout, profiles: Profiles, step_s: float, steps: int, layerwise: bool
) -> tuple[float, ...]:
    setup = SimulationSetup(
        recipe=recipe, inner=InnerSpec(), profiles=tuple(profiles), tokens=len(profiles) * steps, step_s=step_s,
        layerwise=layerwise,
    )  # fmt: skip
    simulation = Simulation(setup, None, layout, tokens_per_step=1)
    result = simulation.run()
    busy_s = sum(replica.busy_s for replica in simulation.replicas)
    present_s = sum(replica.present_s for replica in simulation.replicas)
    fastest = max(replica.steps for replica in simulation.replicas)
    counts = (float(result.tally.steps), float(fastest), result.bytes_sent_per_peer, float(result.tally.committed))
    return busy_s, present_s, present_s / len(profiles), *counts
