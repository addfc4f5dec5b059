"""Error feedback: what a codec left out of one round is added to the next (arXiv 1901.09847)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.compress.base import Codec, NonFiniteError, check_vector
from peer.outer.compress.threshold import Threshold
from peer.outer.compress.undoable import Undoable
from peer.outer.numerics.tiles import TILE_ELEMENTS


@dataclass(frozen=True)
class ErrorFeedback:
    """e <- decay e + gain x; send C(e); e <- e - decoded. Decay 1 and gain 1 is the classic form.

    SparseLoCo uses decay .95, DeMo .999 with the inner learning rate as gain (arXiv 2508.15706, 2411.19870).

    Raises:
        UserError: decay outside [0, 1], or a gain that is not a positive number.
    """

    decay: float
    gain: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise UserError(f"decay={self.decay:g}: must be in [0, 1]", "1 keeps all that was not sent")
        if not (self.gain > 0.0 and math.isfinite(self.gain)):
            raise UserError(f"gain={self.gain:g}: must be positive and finite", "1 is the classic form")

    @property
    def on_return(self) -> ErrorFeedback:
        """The same for the reducer's leg, where the mean is what it is: gain 1."""
        return replace(self, gain=1.0)


class Sent(NamedTuple):
    """A payload, and what every receiver decodes it to: fp32 [n] on the CPU."""

    payload: bytes
    decoded: Tensor


class Tuning(NamedTuple):
    """The threshold in use, and the payloads encoded so far."""

    threshold: float | None
    encodes: int


class Encoder(Undoable[Tuning, Tuning]):
    """The sending side of a codec, with the state that belongs to the sender alone.

    Every `encode` opens a transaction of its own, and commits what is still open; see `Undoable`. The price is one copy
    of the residual, taken with the first `encode`.

    Args:
        codec: bound to the shapes of the vector already, where it uses them.
        feedback: None to send plain C(x).
        numel: elements n of the vector.
        device: where the residual lives; that of the vectors to encode.
        revertible: False saves the copy, where no round is ever abandoned; after a NonFiniteError the residual is 0.

    Attributes:
        residual: e, fp32 [n], updated in place; None without feedback. Write to it to restore a checkpoint.
        threshold: the one in use by a threshold codec, else None.
        encodes: payloads encoded and not reverted.
    """

    def __init__(
        self, codec: Codec, feedback: ErrorFeedback | None, numel: int, device: torch.device | str = "cpu", *,
        revertible: bool = True,
    ) -> None:
        super().__init__()
        self.codec = codec
        self.feedback = feedback
        self.numel = numel
        self.residual = None if feedback is None else torch.zeros(numel, device=device)
        self.threshold: float | None = None
        self.encodes = 0
        self._revertible = revertible
        self._saved: Tensor | None = None

    def encode(self, x: Tensor, seed: int) -> bytes:
        """The payload for `x` fp32 [n] in the round of this seed; `x` stays as it is.

        Raises:
            NonFiniteError: `x` holds NaN or infinity, or the residual has left fp32's range; nothing has changed.
        """
        return self._encode(x, seed, decoded=False)[0]

    def encode_decoded(self, x: Tensor, seed: int, codec: Codec | None = None) -> Sent:
        """`encode`, and also the decoded vector, which error feedback needs anyway.

        Args:
            codec: of this payload alone, in place of the encoder's own.

        Raises:
            NonFiniteError: see `encode`.
        """
        payload, decoded = self._encode(x, seed, decoded=True, codec=codec)
        assert decoded is not None
        return Sent(payload, decoded)

    def _undo(self, opened: Sequence[Tuning]) -> Sequence[Tuning]:
        now = [Tuning(self.threshold, self.encodes)]
        self.threshold, self.encodes = opened[0]
        if self.residual is not None and self._saved is not None:
            for start in range(0, self.numel, TILE_ELEMENTS):  # in place: the one copy holds what is replaced
                here, there = (vector[start : start + TILE_ELEMENTS] for vector in (self.residual, self._saved))
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)
        return now

    def _redo(self, undone: Sequence[Tuning]) -> None:
        self._undo(undone)

    def _encode(self, x: Tensor, seed: int, decoded: bool, codec: Codec | None = None) -> tuple[bytes, Tensor | None]:
        check_vector(x)
        assert x.numel() == self.numel, f"{x.numel()} values; the encoder is for {self.numel}"
        self._save()
        codec = (codec or self.codec).seeded(seed)
        try:
            vector = x if self.residual is None else self._accumulate(x, self.residual)
            payload = self._tuned(codec, vector).encode(vector)
        except NonFiniteError:
            self._cancel()
            if self.residual is not None and not self._revertible:
                self.residual.zero_()
            raise
        if self.residual is None and not decoded:
            return payload, None
        received = codec.decode(payload, self.numel)
        if self.residual is not None:
            self.residual.sub_(received.to(self.residual.device))
        return payload, received

    def _save(self) -> None:
        self.commit()
        if self.residual is not None and self._revertible:
            if self._saved is None:
                self._saved = torch.empty_like(self.residual)
            self._saved.copy_(self.residual)
        self._open(Tuning(self.threshold, self.encodes))

    def _accumulate(self, x: Tensor, residual: Tensor) -> Tensor:
        assert self.feedback is not None
        return residual.mul_(self.feedback.decay).add_(x, alpha=self.feedback.gain)

    def _tuned(self, codec: Codec, vector: Tensor) -> Codec:
        """The codec with the current threshold of this sender."""
        self.encodes += 1
        if not isinstance(codec, Threshold):
            return codec
        due = (self.encodes - 1) % codec.every == 0
        tuned = codec.tuned(vector, None if due else self.threshold)
        self.threshold = tuned.at
        return tuned
