"""A peer of `benchmarks.exchange` that stops where hivemind's all-reduce and gloo's stop: at the average.

Everything of `benchmarks.averaging` but the outer step: what members send is encrypted, signed and checked, and they
vote on the update; nobody computes and hashes the state that it leads to, which only Atoll does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from benchmarks.averaging import start
from benchmarks.swarm_peer import run_peer
from peer.outer.state import OuterState, Source


class Unmoved(OuterState):
    """A state that no update moves."""

    def preview_chunk(self, update: Source, first: int, last: int, scratch: Sequence[Tensor]) -> list[bytes]:  # noqa: ARG002
        """Digests of nothing."""
        return [bytes(32) for _ in (self.anchor, *self.buffers)]


if __name__ == "__main__":
    run_peer(partial(start, state_type=Unmoved))
