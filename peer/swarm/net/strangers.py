"""The streams of peers that no round has seen. Identities are free: where all places are taken, silence makes room, and
then the peer that holds the most.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from peer.swarm.net.stream import FrameStream


class StrangerStreams:
    """Places for them.

    Args:
        total, per_peer: places in all, and of one peer.
    """

    def __init__(self, total: int, per_peer: int) -> None:
        self._total, self._per_peer = total, per_peer
        self._streams: list[FrameStream] = []

    @contextlib.contextmanager
    def of(self, stream: FrameStream) -> Iterator[bool]:
        """-> whether there is a place for this stream; if so, it is taken inside."""
        own = sum(each.remote == stream.remote for each in self._streams)
        if own >= self._per_peer or (len(self._streams) >= self._total and not self._make_room()):
            yield False
            return
        self._streams.append(stream)
        try:
            yield True
        finally:
            self._leave(stream)

    def _make_room(self) -> bool:
        """End the oldest stream on which nothing was said so far, else the oldest one of the peer that has the most."""
        (most, held), *_ = Counter(each.remote for each in self._streams).most_common(1)
        silent = (each for each in self._streams if not each.heard)
        crowded = (each for each in self._streams if each.remote == most and held > 1)
        leaves = next(silent, None) or next(crowded, None)
        if leaves is not None:
            leaves.close()
            self._leave(leaves)
        return leaves is not None

    def _leave(self, stream: FrameStream) -> None:
        self._streams = [each for each in self._streams if each is not stream]
