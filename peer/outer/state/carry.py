"""A new anchor meets a trainer that has moved on since its snapshot."""

from __future__ import annotations

from torch import Tensor

from peer.outer.state.outer_state import CHUNK, chunks


def carry_progress_(local: Tensor, base: Tensor, anchor: Tensor) -> None:
    """local <- anchor + (local - base), in place: the new anchor plus the progress that no round has carried yet.

    Args:
        local: fp32 [P], the trainer's parameters now; overwritten.
        base: fp32 [P], its parameters at the snapshot that the round was made from.
        anchor: fp32 [P], the anchor after the round.

    Where local equals base the result is the anchor, bit for bit. Temporaries are one chunk.
    """
    assert local.shape == base.shape == anchor.shape, f"{local.shape}, {base.shape}, {anchor.shape} differ"
    for start, stop in chunks(local.numel(), CHUNK):
        # Subtracting the negated progress rounds alike, and keeps an anchor of -0.0: (-0.0) + 0.0 would lose the sign.
        behind = base[start:stop] - local[start:stop]
        local[start:stop].copy_(anchor[start:stop]).sub_(behind)
