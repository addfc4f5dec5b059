"""The digest of the state after an update that still arrives: chunk by chunk, as soon as a chunk of it is whole.

Whoever waits for the last slice of a round has then hashed nearly all of the state that the round leads to.
"""

from __future__ import annotations

from collections.abc import Sequence

from peer.outer.compress.base import Payload
from peer.outer.gather import Gathering
from peer.outer.state import CHUNK, OuterState, chunks
from peer.outer.update import Unchecked


class Preview:
    """`OuterState.preview`, of payloads that are filled from their beginnings.

    Nothing is checked here: what is malformed leads to a digest of no meaning, or to any error of a codec. The caller
    drops it then, as the update itself cannot be made.

    Args:
        state: stays as it is meanwhile.
        bounds: [start, stop) of each part of the update.
    """

    def __init__(self, state: OuterState, bounds: Sequence[tuple[int, int]]) -> None:
        self._state, self._bounds = state, tuple(bounds)
        self._reached = [start for start, _ in bounds]
        self._chunks = list(chunks(state.numel, CHUNK))
        self._missing = [stop - start for start, stop in self._chunks]
        self._ready: list[int] = []
        self._digests: dict[int, list[bytes]] = {}
        self._scratch = state.scratch()

    @property
    def ready(self) -> bool:
        """Some chunk is whole, and not yet hashed."""
        return bool(self._ready)

    @property
    def complete(self) -> bool:
        """All chunks are hashed."""
        return len(self._digests) == len(self._chunks)

    def reach(self, part: int, stop: int) -> None:
        """The payload of that part is there up to this element of the vector."""
        start, self._reached[part] = self._reached[part], stop
        for index in range(start // CHUNK, -(-stop // CHUNK)):
            first, last = self._chunks[index]
            self._missing[index] -= min(stop, last) - max(start, first)
            if not self._missing[index]:
                self._ready.append(index)

    def step(self, parts: Sequence[Payload]) -> None:
        """Hash one chunk that is ready; raises NonFiniteError where it would leave fp32's range.

        Args:
            parts: the payloads, in order, filled as far as has been reached.
        """
        index, state = self._ready.pop(), self._state
        codec = state.compressor
        assert not isinstance(codec, Gathering), "gathered payloads are not filled from their beginnings"
        arriving = Unchecked(parts, self._bounds, codec)
        self._digests[index] = state.preview_chunk(arriving, *self._chunks[index], self._scratch)

    def digest(self) -> str:
        """Once it is `complete`: what `OuterState.preview` yields for the whole update."""
        return self._state.joined_digest([self._digests[index] for index in range(len(self._chunks))])
