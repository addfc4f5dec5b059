"""The inner learning rate as a function of the swarm's progress, not of one peer's."""

from __future__ import annotations

import math
from collections.abc import Callable

from peer.protocol.manifest import InnerSpec

LOCAL_WARMUP_STEPS = 10
SETTLED_STEPS = 10**9  # since a peer joined that has no fresh moments, and needs no warm-up of its own


def learning_rate(
    inner: InnerSpec, global_step: float, total_steps: float | None, steps_since_join: int
) -> float:
    """Linear warm-up, then the run's schedule down to `min_learning_rate_ratio`, times a joiner's own warm-up.

    Args:
        inner: peak rate, warm-up length (global steps), shape, final ratio.
        global_step: steps of the run so far, >= 0; fractional between rounds.
        total_steps: where the schedule ends; None keeps the peak for ever.
        steps_since_join: steps this peer made since its moments were fresh (Adam's first steps are its noisiest).
    """
    warmup = min(1.0, (global_step + 1.0) / inner.warmup_steps) if inner.warmup_steps else 1.0
    local_warmup = min(1.0, (steps_since_join + 1) / LOCAL_WARMUP_STEPS)
    return inner.learning_rate * warmup * local_warmup * _decay(inner, global_step, total_steps)


def _decay(inner: InnerSpec, global_step: float, total_steps: float | None) -> float:
    if total_steps is None or global_step <= inner.warmup_steps or inner.schedule == "constant":
        return 1.0
    # A run no longer than its warm-up ends at the final ratio at once.
    progress = min(1.0, (global_step - inner.warmup_steps) / max(total_steps - inner.warmup_steps, 1))
    return inner.min_learning_rate_ratio + (1.0 - inner.min_learning_rate_ratio) * _SHAPES[inner.schedule](
        progress, inner.decay_fraction
    )


def _warmup_stable_decay(progress: float, decay_fraction: float) -> float:
    """The peak, and 1 - sqrt over the last part (Hagele et al. 2024, arXiv 2405.18392, equation 2)."""
    return 1.0 - math.sqrt(max(0.0, 1.0 - (1.0 - progress) / decay_fraction))


_SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda progress, _: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress, _: 1.0 - progress,
    "wsd": _warmup_stable_decay,
}


def expected_steps(step_tokens: int, tokens_total: int, tokens: int, steps: int) -> float:
    """Nominal steps of a run that ends by its tokens, at its present speed.

    Args:
        step_tokens: of one step of one peer; says how long a run is that has committed nothing yet.
        tokens_total: where it ends.
        tokens, steps: committed by the swarm so far, and the nominal steps in which it did.
    """
    return tokens_total / step_tokens if tokens == 0 or steps == 0 else steps * tokens_total / tokens


def shared_rate(inner: InnerSpec, rounds_total: int | None) -> Callable[[int], float]:
    """(rounds applied) -> the rate of the step that follows, where all peers make every step together.

    It scales the gradients that they send and the outer step, in which fp32 rounds it: another machine's cosine, which
    may differ by its last bit, comes to the same.
    """
    return lambda round: learning_rate(inner, round, rounds_total, SETTLED_STEPS)
