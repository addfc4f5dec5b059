"""Error feedback for payloads that are written by ranges: the sender of a dense codec, or the reducer of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError, Read
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.compress.undoable import Undoable
from peer.outer.numerics.kernels import add_scaled
from peer.outer.numerics.scratch import copy_of, scratch_vector
from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_ranges


class _Opened(NamedTuple):
    """One range of a round that is under way."""

    compressor: Compressor
    start: int
    stop: int
    payload: bytes
    read: Read


class SavedResidual(NamedTuple):
    """Values of the residual from `start` on, fp32."""

    start: int
    values: Tensor


class DeferredResidual(Undoable[_Opened, SavedResidual]):
    """`Residual`, of what can be read again when the round is over: it then takes no memory of the vector's size.

    `encode` may be called in several threads, and changes nothing; what a range leaves is computed by `commit`, or by
    `revert`. Whatever was encoded must stay as it is until one of them has been called.

    Args:
        numel: elements P of the whole vector.

    Attributes:
        vector: e, fp32 [P]; untouched pages cost no memory.
    """

    def __init__(self, feedback: ErrorFeedback, numel: int) -> None:
        super().__init__()
        self.feedback = feedback
        self.vector = torch.zeros(numel)

    def encode(self, compressor: Compressor, start: int, stop: int, read: Read) -> bytes:
        """The payload of [start, stop): that of decay e + gain x.

        Args:
            start, stop: the range within the whole vector.
            read: as in `Compressor.encode_ranges`, of the n = stop - start elements: new tensors, to be overwritten.

        Raises:
            NonFiniteError: x holds NaN or infinity; the round is taken back.
        """
        with self._lock:
            self._undone = ()
        try:
            payload = compressor.encode_ranges(stop - start, lambda first, last: self._fed(start, first, last, read))
        except NonFiniteError:
            with self._lock:
                self._opened.clear()
            raise
        self._open(_Opened(compressor, start, stop, payload, read))
        return payload

    def _close(self, opened: Sequence[_Opened]) -> None:
        for one in opened:
            self._leave(one, self.vector[one.start : one.stop])

    def _undo(self, opened: Sequence[_Opened]) -> Sequence[SavedResidual]:
        left = [SavedResidual(one.start, torch.empty(one.stop - one.start)) for one in opened]
        for one, (_, values) in zip(opened, left, strict=True):
            self._leave(one, values)
        return left

    def _redo(self, undone: Sequence[SavedResidual]) -> None:
        for start, values in undone:
            self.vector[start : start + values.numel()] = values

    def _fed(self, offset: int, first: int, last: int, read: Read) -> Tensor:
        x, own = read(first, last), self.vector[offset + first : offset + last]
        if self.feedback.gain != 1.0:
            return (own * self.feedback.decay).add_(x, alpha=self.feedback.gain)
        add_scaled(x, own, self.feedback.decay)
        return x

    def _leave(self, one: _Opened, out: Tensor) -> None:
        """Write what the range leaves: fp32 [stop - start], which may be where the residual lies."""
        n = one.stop - one.start
        for first, last in tile_ranges(0, n, one.compressor.block, TILE_ELEMENTS):
            decoded = scratch_vector(last - first)
            one.compressor.decode_range(one.payload, n, first, last, decoded, checked=True)
            torch.sub(self._fed(one.start, first, last, one.read), decoded, out=out[first:last])


class Residual(Undoable[SavedResidual, SavedResidual]):
    """Error feedback for payloads that are written by ranges, which need not be read again.

    `encode` may be called for several ranges of one round; `commit` and `revert` close them all, as in `Encoder`. What
    is never touched costs no memory. With feedback on both legs the mean's own loss is fed back as well (Tang et al.
    2019, arXiv 1905.05957).

    Args:
        numel: elements P of the whole vector.
        vector: what has been lost so far, fp32 [P], updated in place; nothing by default.

    Attributes:
        vector: e, fp32 [P].
    """

    def __init__(self, feedback: ErrorFeedback, numel: int, vector: Tensor | None = None) -> None:
        super().__init__()
        self.feedback = feedback
        self.vector = torch.zeros(numel) if vector is None else vector

    @property
    def opened(self) -> Sequence[SavedResidual]:
        """Where each range of the open round begins, and what it was before: vectors that stay as they are."""
        return self._opened

    def clear(self) -> None:
        """Reset to zero."""
        with self._lock:
            self.vector = torch.zeros(self.vector.numel())  # untouched pages cost no memory
            self._opened, self._undone = [], ()

    def encode(self, compressor: Compressor, start: int, stop: int, read: Read) -> bytes:
        """The payload of [start, stop): e <- decay e + gain x, then e <- e - decoded.

        Args:
            start, stop: the range within the whole vector.
            read: as in `Compressor.encode_ranges`, of the n = stop - start elements.

        Raises:
            NonFiniteError: x holds NaN or infinity; every range of the round is as it was before.
        """
        with self._lock:
            return self._encode(compressor, start, stop, read)

    def _encode(self, compressor: Compressor, start: int, stop: int, read: Read) -> bytes:
        own, n = self.vector[start:stop], stop - start
        self._open(SavedResidual(start, copy_of(own)))

        def feed(first: int, last: int) -> Tensor:
            view = own[first:last]
            return view.mul_(self.feedback.decay).add_(read(first, last), alpha=self.feedback.gain)

        try:
            payload = compressor.encode_ranges(n, feed)
        except NonFiniteError:
            self._cancel()
            raise
        step = max(1, TILE_ELEMENTS // compressor.block) * compressor.block
        for first in range(0, n, step):
            last = min(first + step, n)
            out = scratch_vector(last - first)
            own[first:last].sub_(compressor.decode_range(payload, n, first, last, out, checked=True))
        return payload

    def _undo(self, opened: Sequence[SavedResidual]) -> Sequence[SavedResidual]:
        replaced = []
        for start, values in reversed(opened):
            view = self.vector[start : start + values.numel()]
            replaced.append(SavedResidual(start, view.clone()))
            view.copy_(values)
        return replaced

    def _redo(self, undone: Sequence[SavedResidual]) -> None:
        self._undo(undone)
