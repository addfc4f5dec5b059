"""The inner learning rate as a function of the swarm's progress, not of one peer's."""

from __future__ import annotations

import math
from collections.abc import Callable

from peer.protocol.manifest import InnerSpec

LOCAL_WARMUP_STEPS = 10
SETTLED_STEPS = 10**9  # since a peer joined that has no fresh moments, and needs no warm-up of its own


def learning_rate(
    inner: InnerSpec, global_step: float, total_steps: int | None, steps_since_join: int
) -> float:
    """Linear warm-up, then cosine to `min_learning_rate_ratio` at `total_steps`, times a joiner's own warm-up.

    Args:
        inner: peak rate, warm-up length (global steps), final ratio.
        global_step: steps of the run so far, >= 0; fractional between rounds.
        total_steps: where the cosine ends; None keeps the peak for ever.
        steps_since_join: steps this peer made since its moments were fresh (Adam's first steps are its noisiest).
    """
    warmup = min(1.0, (global_step + 1.0) / inner.warmup_steps) if inner.warmup_steps else 1.0
    local_warmup = min(1.0, (steps_since_join + 1) / LOCAL_WARMUP_STEPS)
    return inner.learning_rate * warmup * local_warmup * _decay(inner, global_step, total_steps)


def _decay(inner: InnerSpec, global_step: float, total_steps: int | None) -> float:
    if total_steps is None or global_step <= inner.warmup_steps:
        return 1.0
    # A run no longer than its warm-up ends at the final ratio at once.
    progress = min(1.0, (global_step - inner.warmup_steps) / max(total_steps - inner.warmup_steps, 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return inner.min_learning_rate_ratio + (1.0 - inner.min_learning_rate_ratio) * cosine


def shared_rate(inner: InnerSpec, total_rounds: int | None) -> Callable[[int], float]:
    """(rounds applied) -> the rate of the step that follows, where all peers make every step together.

    It scales the gradients that they send and the outer step, in which fp32 rounds it: another machine's cosine, which
    may differ by its last bit, comes to the same.
    """
    return lambda round: learning_rate(inner, round, total_rounds, SETTLED_STEPS)
