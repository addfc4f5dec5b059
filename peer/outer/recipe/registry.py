"""Outer optimizers and aggregators by the names that a recipe or a manifest gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from peer.outer.aggregate.base import Aggregator, DirectionAverage, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.penalised import Penalised
from peer.outer.aggregate.robust import CentredClipping, ClippedMean, CoordinateMedian, TrimmedMean
from peer.outer.optim.adaptive import Adagrad, Adam, Yogi
from peer.outer.optim.optimizers import DelayedNesterov, HeavyBall, Nesterov, OuterOptimizer, Sgd, SignSgd
from peer.outer.optim.turned import Turned

OUTER: Final[Mapping[str, type[OuterOptimizer]]] = MappingProxyType(
    {
        "sgd": Sgd,
        "nesterov": Nesterov,
        "heavyball": HeavyBall,
        "adagrad": Adagrad,
        "adam": Adam,
        "yogi": Yogi,
        "sign": SignSgd,
        "delayed-nesterov": DelayedNesterov,
        "turned": Turned,
    }
)
AGGREGATORS: Final[Mapping[str, type[Aggregator]]] = MappingProxyType(
    {
        "mean": Mean,
        "clipped": ClippedMean,
        "trimmed": TrimmedMean,
        "median": CoordinateMedian,
        "centred-clipping": CentredClipping,
        "gated": Gated,
        "direction": DirectionAverage,
        "penalised": Penalised,
    }
)


def parameters(part: type) -> dict[str, Any]:
    """What a recipe may set on an entry of `OUTER` or `AGGREGATORS`: names and defaults.

    The default of a parameter that must be given is `dataclasses.MISSING`. What the round fills in is left out.
    """
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(part)
        if not field.metadata.get("bound", False)
    }
