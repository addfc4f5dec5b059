"""Forward and backward passes as CUDA graphs: the models of simulations are small, and wait for launches."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from peer.train.batch import Batch

log = logging.getLogger(__name__)
WARM_UPS = 3

Passes = Callable[[Tensor, Batch, Tensor], Tensor]
"""(parameters, batch, out) -> the mean loss; `out` becomes the gradient. All on the device."""


class RecordedPasses:
    """Records `passes` for each shape of a batch, and replays them; a model that cannot be recorded runs as it is.

    Args:
        passes: what it does depends on shapes alone while every token is learned from, in one document.
        numel: P.
    """

    def __init__(self, passes: Passes, numel: int) -> None:
        self._passes, self._numel = passes, numel
        self._recordings: dict[tuple[int, ...], _Recording] = {}
        self._fails = False

    def __call__(self, parameters: Tensor, batch: Batch, out: Tensor) -> Tensor:
        shape = tuple(batch.labels_bt.shape)
        plain = batch.tokens == batch.labels_bt.numel() and batch.positions_bt is None
        if self._fails or not plain:
            return self._passes(parameters, batch, out)
        if shape not in self._recordings:
            try:
                self._recordings[shape] = _Recording(self._passes, self._numel, batch)
            except RuntimeError as error:  # an operation that asks the device in between
                log.debug("this model cannot be recorded: its simulation is slower", exc_info=error)
                self._fails = True
                return self._passes(parameters, batch, out)
        return self._recordings[shape].replay(parameters, batch, out)


class _Recording:
    """Of one shape: a CUDA graph reads and writes the same memory each time."""

    def __init__(self, passes: Passes, numel: int, batch: Batch) -> None:
        device = batch.inputs_bt.device
        self._parameters, self._out = (torch.zeros(numel, device=device) for _ in range(2))
        inputs_bt, labels_bt = batch.inputs_bt.clone(), batch.labels_bt.clone()
        self._batch = Batch(inputs_bt, labels_bt).counting(batch.tokens)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # what is made at the first call must not be in the recording
            for _ in range(WARM_UPS):
                passes(self._parameters, self._batch, self._out)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = passes(self._parameters, self._batch, self._out)

    def replay(self, parameters: Tensor, batch: Batch, out: Tensor) -> Tensor:
        self._parameters.copy_(parameters)
        self._batch.inputs_bt.copy_(batch.inputs_bt)
        self._batch.labels_bt.copy_(batch.labels_bt)
        self._graph.replay()
        out.copy_(self._out)
        return self._loss
