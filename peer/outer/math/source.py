"""What one peer has to say in a round, before any codec."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError, Payload, Read, encode_difference
from peer.outer.math.ranges import Ranges, length_of, within
from peer.outer.numerics.scratch import scratch_vector


class FeedbackEncoder(Protocol):
    """Error feedback for payloads that are written by ranges: `DeferredResidual` and `Residual`."""

    def encode(self, compressor: Compressor, start: int, stop: int, read: Read) -> bytes:
        """The payload of elements [start, stop) and of what was lost before."""


class Source:
    """anchor - local, the pseudo-gradient (arXiv 2311.08105, algorithm 1, line 12); or a vector as it is.

    Nothing is computed before it is read, and the difference is never there as a whole.

    Args:
        local: fp32 [P] on the CPU: a peer's parameters at the snapshot, or its gradient.
        anchor: fp32 [P]; None where `local` is sent as it is.
        ranges: of the fragment, within [0, P); None for all.
    """

    def __init__(self, local: Tensor, anchor: Tensor | None, ranges: Ranges | None = None) -> None:
        assert anchor is None or local.shape == anchor.shape, f"local {tuple(local.shape)}, another shape than anchor"
        self._local, self._anchor = local, anchor
        self._ranges = ((0, local.numel()),) if ranges is None else ranges
        self.numel = length_of(self._ranges)

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the fragment, as a new fp32 vector."""
        out, position = scratch_vector(stop - start), 0
        for first, last in within(self._ranges, start, stop):
            own = out[position : position + last - first]
            if self._anchor is None:
                own.copy_(self._local[first:last])
            else:
                torch.sub(self._anchor[first:last], self._local[first:last], out=own)
            position += last - first
        return out

    def encode(self, codec: Compressor, start: int, stop: int, feedback: FeedbackEncoder | None = None) -> Payload:
        """The payload of elements [start, stop).

        Raises:
            NonFiniteError: the vectors hold NaN or infinity, or lie beyond fp32's range from each other.
        """

        def read(first: int, last: int) -> Tensor:
            return self.read(start + first, start + last)

        try:
            if feedback is not None:
                return feedback.encode(codec, start, stop, read)
            parts = within(self._ranges, start, stop)
            if self._anchor is None or len(parts) != 1:
                return codec.encode_ranges(stop - start, read)
            own = slice(*parts[0])
            return encode_difference(codec, self._anchor[own], self._local[own])
        except NonFiniteError:
            raise NonFiniteError(f"local parameters [{start}, {stop}) hold NaN or infinity") from None
