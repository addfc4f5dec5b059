"""A model's parameters as one flat vector, and copies of it between a device and RAM while the device computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from peer.outer.state.carry import carry_progress_
from peer.outer.state.flat_layout import FlatLayout

PIECE = 2**24  # fp32 values in the pinned buffer: 64 MiB


class ModelReplica:
    """The `LocalParameters` of `peer.link.local_anchor`: those of a model on any device."""

    def __init__(self, layout: FlatLayout, model: nn.Module) -> None:
        self._layout, self._model = layout, model

    def read(self, out: Tensor, start: int = 0) -> None:
        self._layout.copy_to_flat(self._model, out, start)

    def write(self, flat: Tensor, start: int = 0) -> None:
        self._layout.copy_from_flat(flat, self._model, start)


class DeviceCopies:
    """The `BackgroundCopies` of `peer.link.transfer`.

    The parameters of one moment are copied on the device, where that takes milliseconds. A thread then brings them to
    RAM piece by piece, through a pinned buffer on a stream of its own, while steps continue; the way back is the
    same. It takes 4 bytes a parameter on the device meanwhile, 8 for a merge.
    """

    def __init__(self, replica: ModelReplica, device: torch.device) -> None:
        self._replica, self._device, self._start = replica, device, 0
        self._on_card = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_card else None  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(PIECE, pin_memory=self._on_card)
        self._thread = ThreadPoolExecutor(1, "device-copies")
        self._brought: list[Tensor] = []

    def begin_read(self, out: Tensor, start: int) -> Future[None]:
        """See `BackgroundCopies`; `out` is whole when the future is done."""
        flat = torch.empty(len(out), device=self._device)
        self._replica.read(flat, start)
        return self._thread.submit(self._to_ram, flat, out, self._moment())

    def begin_carry(self, before: Tensor, after: Tensor, start: int) -> Future[None]:
        """See `BackgroundCopies`."""
        self._brought = [torch.empty(len(before), device=self._device) for _ in range(2)]
        self._start = start
        return self._thread.submit(self._to_device, [before, after], self._brought, self._moment())

    def carry(self) -> None:
        """See `BackgroundCopies`: the same operations as on the CPU, in the same order, so to the same bits."""
        before, after = self._brought
        self._brought = []
        local = torch.empty_like(before)
        self._replica.read(local, self._start)
        carry_progress_(local, before, after)
        self._replica.write(local, self._start)

    def _to_ram(self, flat: Tensor, out: Tensor, moment: torch.cuda.Event | None) -> None:
        with self._side_stream(moment):
            for begin in range(0, flat.numel(), len(self._pinned)):
                piece = flat[begin : begin + len(self._pinned)]
                staged = self._pinned[: len(piece)]
                staged.copy_(piece, non_blocking=True)
                self._wait()
                out[begin : begin + len(piece)].copy_(staged)

    def _to_device(self, sources: list[Tensor], targets: list[Tensor], moment: torch.cuda.Event | None) -> None:
        with self._side_stream(moment):
            for source, target in zip(sources, targets, strict=True):
                for begin in range(0, source.numel(), len(self._pinned)):
                    piece = source[begin : begin + len(self._pinned)]
                    staged = self._pinned[: len(piece)].copy_(piece)
                    target[begin : begin + len(piece)].copy_(staged, non_blocking=True)
                    self._wait()

    def _moment(self) -> torch.cuda.Event | None:
        """All that was asked of the device so far."""
        if not self._on_card:
            return None
        moment = torch.cuda.Event()  # type: ignore[no-untyped-call]
        moment.record(torch.cuda.current_stream(self._device))
        return moment

    def _side_stream(self, moment: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if self._stream is None or moment is None:
            return nullcontext()
        self._stream.wait_event(moment)
        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        """Until the pinned buffer is free. As all copies have ended then, no tensor outlives its use on this stream."""
        if self._stream is not None:
            self._stream.synchronize()
