"""Streaming DiLoCo's table of bandwidths (Douillard et al. 2025, arXiv 2501.18512, table 4), its methods as recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model of the table."""

    name: str
    layers: int
    step_s: float

    @property
    def parameters(self) -> float:
        """As its name says."""
        return float(self.name[:-1]) * 1e9

    @property
    def manifest(self) -> str:
        """Of the model."""
        return f"configs/sim/bandwidth-{self.name.lower()}.yaml"


SIZES = (
    Size(name="1B", layers=24, step_s=0.1), Size(name="10B", layers=48, step_s=0.8),
    Size(name="100B", layers=108, step_s=4.9),
)  # fmt: skip
_STREAMING = "streaming-diloco:schedule.period=100,schedule.num_fragments={fragments}"
METHODS: Final[Mapping[str, str]] = MappingProxyType({
    "data-parallel": "ddp:compressor=bf16",
    "DiLoCo": "diloco:steps_per_round=100,compressor=bf16",
    "streaming": f"{_STREAMING},schedule.overlap_steps=0,compressor=bf16",
    "+ overlap": f"{_STREAMING},schedule.overlap_steps=1,compressor=bf16",
    "+ FP4": f"{_STREAMING},schedule.overlap_steps=1,compressor=fp4",
})  # fmt: skip
PAPER: Final[Mapping[str, tuple[tuple[float, ...], ...]]] = MappingProxyType({
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0), (1.4, 6.2, 13.3, 23.3, 86.8), (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0), (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5), (1.7, 7.5, 16.0, 33.9, 104.8), (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5), (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5), (3.0, 11.0, 23.3, 49.4, 184.2), (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2), (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
})  # fmt: skip
"""Gbit/s for each method and target: the first of the paper's grid of bandwidths, rounded to one decimal."""
