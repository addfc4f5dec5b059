"""A model's parameters as one flat vector."""

from __future__ import annotations

from torch import Tensor, nn

from peer.outer.state.flat_layout import FlatLayout


class ModelReplica:
    """The `LocalParameters` of `peer.link.local_anchor`: those of a model on any device."""

    def __init__(self, layout: FlatLayout, model: nn.Module) -> None:
        self._layout, self._model = layout, model

    def read(self, out: Tensor, start: int = 0) -> None:
        self._layout.copy_to_flat(self._model, out, start)

    def write(self, flat: Tensor, start: int = 0) -> None:
        self._layout.copy_from_flat(flat, self._model, start)
