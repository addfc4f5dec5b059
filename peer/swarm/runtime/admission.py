"""Bounds on what is under way at once for other peers, in all and for each of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator


class Admission:
    """A number of places, of which one peer holds only some.

    Args:
        total: places in all.
        per_peer: places of one peer.
    """

    def __init__(self, total: int, per_peer: int) -> None:
        self._total, self._per_peer = total, per_peer
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, peer_id: str) -> Iterator[bool]:
        """-> whether there is a place for this peer; if so, it is taken inside."""
        if not self.take(peer_id):
            yield False
            return
        try:
            yield True
        finally:
            self.release(peer_id)

    def take(self, peer_id: str) -> bool:
        """Take a place where there is one; to be released."""
        if self._taken.total() >= self._total or self._taken[peer_id] >= self._per_peer:
            return False
        self._taken[peer_id] += 1
        return True

    def release(self, peer_id: str) -> None:
        """Give a place back that this peer has taken."""
        assert self._taken[peer_id], f"{peer_id} holds no place"
        self._taken[peer_id] -= 1
        if not self._taken[peer_id]:
            del self._taken[peer_id]  # as many entries as places, however many peers come and go

    def held(self, peer_id: str | None = None) -> int:
        """Places that are taken: by this peer, or by all."""
        return self._taken.total() if peer_id is None else self._taken[peer_id]

    def usage(self, peer_id: str) -> str:
        """Why this peer was refused, for an error's message."""
        own = f"{self.held(peer_id)} of {self._per_peer} by {peer_id}"
        return f"{self.held()} of {self._total} places are taken, {own}"
