"""Rounds go first: what a donor does for joiners waits while its own round is exchanged."""

from __future__ import annotations

import asyncio
import contextlib

PATIENCE_S = 1.0  # for a chunk: in a swarm whose rounds never pause, joiners still get 4 MB a second from each donor


class Courtesy:
    """Who serves history asks for a `turn` before each chunk; rounds say when they begin and end."""

    def __init__(self) -> None:
        self._quiet = asyncio.Event()
        self._quiet.set()

    def round_begins(self) -> None:
        self._quiet.clear()

    def round_ends(self) -> None:
        self._quiet.set()

    async def turn(self) -> None:
        """Return when no round is exchanged, or after PATIENCE_S."""
        if not self._quiet.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), PATIENCE_S)
