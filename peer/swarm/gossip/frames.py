"""What one peer contributes to a round: each frame is encoded once, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torch import Tensor

from peer.swarm.gossip.mixing import Mixing


class Frames:
    """The frames of one contribution, to whichever round it goes."""

    def __init__(self, mixing: Mixing, snapshot: Tensor) -> None:
        self._mixing, self._snapshot = mixing, snapshot
        self._encoded: dict[tuple[int, int], asyncio.Future[bytes]] = {}

    async def frame(self, round: int, index: int) -> bytes:
        """Raises RoundAborted if the parameters are not finite."""
        drawn = self._mixing.wire.drawn  # then a frame is of one round; else all rounds have the same
        key = (round if drawn else 0, index)
        if key not in self._encoded:
            work = asyncio.to_thread(self._mixing.encode, index, self._snapshot, round)
            self._encoded[key] = asyncio.ensure_future(work)
        return await asyncio.shield(self._encoded[key])  # a caller may be cancelled; the encoded frame stays

    async def ended(self, settle: Callable[[], None]) -> None:
        """The round is over, one way or the other; no thread works for it any more."""
        await asyncio.gather(*self._encoded.values(), return_exceptions=True)
        self._encoded.clear()
        await asyncio.to_thread(settle)
