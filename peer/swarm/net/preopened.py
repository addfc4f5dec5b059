"""A stream that is opened before its request is known: opening one to a distant peer takes five round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.system.clock import Clock

OpenStream = Callable[[str], Awaitable[FrameStream]]


class PreopenedStream:
    """Opens a stream to one peer at once, for the first caller of `open`.

    Args:
        kept_s: how old a stream may become before the other end may have given it up.
    """

    def __init__(self, open_stream: OpenStream, remote: str, kept_s: float, clock: Clock) -> None:
        self._open, self._remote, self._kept_s, self._clock = open_stream, remote, kept_s, clock
        self._opening: asyncio.Task[tuple[FrameStream, float]] | None = asyncio.ensure_future(self._begin())

    async def _begin(self) -> tuple[FrameStream, float]:
        return await self._open(self._remote), self._clock()

    async def open(self, remote: str) -> FrameStream:
        """That stream, unless it is taken, or so old that the other end may have closed it; else a new one.

        Raises:
            StreamClosedError: the peer cannot be reached.
        """
        if remote != self._remote or self._opening is None:
            return await self._open(remote)
        opening, self._opening = self._opening, None
        try:
            stream, opened_at = await opening
        except asyncio.CancelledError:
            await _close(opening)
            raise
        except StreamClosedError:  # that was a while ago
            return await self._open(remote)
        if self._clock() - opened_at <= self._kept_s:
            return stream
        stream.close()
        return await self._open(remote)

    async def close(self) -> None:
        """Close the stream if it was not taken."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await _close(opening)


async def _close(opening: asyncio.Task[tuple[FrameStream, float]]) -> None:
    await cancel_and_wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
