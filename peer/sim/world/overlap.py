"""How much of an exchange hides behind the steps before and after it, if layers travel one by one.

The model is that of Streaming DiLoCo's simulation (arXiv 2501.18512, section 3.1 and figure 3). A step of L layers is
3 L pieces of equal length: the forward passes of layers 1 to L, then, from L down to 1, two pieces for each layer's
backward pass. What a layer has to say can leave as soon as its backward pass is over, and is needed when the next
forward pass comes to it. A peer's link carries one layer after another, the highest first.

It is the best that any implementation reaches: clipping by the norm of all gradients delays every layer's update until
the backward pass is over, so that nothing hides behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peer.outer.math.ranges import Ranges
from peer.outer.state.flat_layout import FlatLayout, strided_fragments

BACKWARD = 2 / 3  # of a step: the gradients of activations and of parameters cost as much as the forward pass each
FORWARD = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer has of a fragment.

    Attributes:
        share: of the fragment's values.
        ready: steps between the end of its backward pass and the end of the step.
        needed: steps between the begin of the next step and its forward pass there.
    """

    share: float
    ready: float = 0.0
    needed: float = 0.0


WHOLE = (Layer(share=1.0),)
"""A fragment that is sent after the step, as a whole, and needed before the next."""


def layers_of(layout: FlatLayout, fragments: Sequence[Ranges]) -> list[tuple[Layer, ...]]:
    """The layers of each fragment, the highest first.

    Layers are the model's blocks as in `strided_fragments`; parameters before the first count to it, those after
    the last to that. A model without blocks is one layer, and hides nothing.
    """
    blocks = strided_fragments(layout.names, layout.shapes, blocks_per_fragment=1)
    return [_layers(blocks, ranges) for ranges in fragments]


def pipelined(
    layers: Sequence[Layer],
    transfer_s: float,
    latency_s: float,
    *,
    step_before_s: float,
    step_after_s: float,
    link_free_s: float = -math.inf,
) -> tuple[float, float]:
    """When a fragment's exchange is over, in seconds after the end of the step before it.

    Args:
        layers: the highest first.
        transfer_s: what the link takes for the whole fragment.
        latency_s: until a layer that has left the link has come back as the mean of all.
        step_before_s: length of the step that it may begin in; 0 if its members or values are known at the end alone.
        step_after_s: length of the step that may begin before it is over; 0 if all is needed at once.
        link_free_s: when the link is done with earlier exchanges.

    Returns:
        (seconds by which the next step is delayed, at least 0; when the link is free again).
    """
    free_s, delay_s = link_free_s, 0.0
    for layer in layers:
        free_s = max(free_s, -layer.ready * step_before_s) + layer.share * transfer_s
        delay_s = max(delay_s, free_s + latency_s - layer.needed * step_after_s)
    return delay_s, free_s


def _layers(blocks: Sequence[Ranges], fragment: Ranges) -> tuple[Layer, ...]:
    own = [_common(block, fragment) for block in blocks]
    total, count = max(1, sum(own)), len(blocks)
    return tuple(
        Layer(share=own[index] / total, ready=BACKWARD * index / count, needed=FORWARD * index / count)
        for index in reversed(range(count))
        if own[index]
    )


def _common(first: Ranges, second: Ranges) -> int:
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
