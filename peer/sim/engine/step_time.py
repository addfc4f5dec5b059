"""How long inner steps take: a peer's speed, its jitter, and a compute timeout where the recipe has one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from peer.outer.policy.compute_timeout import choose_timeout
from peer.outer.policy.straggler import ComputeTimeout
from peer.sim.engine.swarm import SimSwarm
from peer.sim.learner.replica import SimReplica
from peer.sim.world.network import reduce_seconds
from peer.sim.world.scenario import PeerProfile

MICRO_BATCHES = 8
TIMED_STEPS = 50  # from which a compute timeout is chosen


class StepTimes:
    """Draws the times of a swarm's steps."""

    def __init__(self, swarm: SimSwarm, seed: int) -> None:
        self._swarm = swarm
        self._random = [random.Random(f"{seed}/{replica.index}") for replica in swarm.replicas]
        self._timeout: ComputeTimeout | None = None
        if (policy := swarm.recipe.straggler.timeout) is not None:
            timeout = with_tau(policy, swarm.profiles, swarm.pace.step_s, swarm.sync.wire_bytes(0), seed)
            assert timeout.tau_s is not None
            self._timeout = timeout if math.isfinite(timeout.tau_s) else None

    def draw(self, replica: SimReplica) -> tuple[float, float]:
        """Seconds of the next step and the fraction of the batch computed in them."""
        base = self._swarm.step_s(replica.profile.speed)
        lognormal = self._random[replica.index].lognormvariate
        jitter = replica.profile.jitter
        if self._timeout is None:
            return (base * lognormal(-jitter * jitter / 2, jitter) if jitter else base), 1.0
        each = base / MICRO_BATCHES
        times = [each * (lognormal(-jitter * jitter / 2, jitter) if jitter else 1.0) for _ in range(MICRO_BATCHES)]
        count = max(1, self._timeout.count(times))  # the first micro-batch is always finished
        return sum(times[:count]), count / MICRO_BATCHES


def with_tau(
    policy: ComputeTimeout, profiles: Sequence[PeerProfile], step_s: float, payload_bytes: float, seed: int
) -> ComputeTimeout:
    """DropCompute with its own tau, or with the best for micro-batch times as these peers have them.

    Args:
        step_s: seconds of an inner step at speed 1.
        payload_bytes: of one contribution.
    """
    if policy.tau_s is not None:
        return policy
    drawn = np.random.default_rng(seed).standard_normal((TIMED_STEPS, len(profiles), MICRO_BATCHES))
    jitter = np.array([profile.jitter for profile in profiles])[:, None]
    each = step_s / MICRO_BATCHES / np.array([profile.speed for profile in profiles])[:, None]
    communication_s = reduce_seconds(profiles, payload_bytes, payload_bytes) if len(profiles) > 1 else 0.0
    samples = each * np.exp(jitter * drawn - jitter**2 / 2)
    return replace(policy, tau_s=choose_timeout(samples, communication_s))
