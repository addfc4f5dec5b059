"""How a persistent group begins its next round: each member waits for the joins of all others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from peer.outer.round import RoundAborted
from peer.swarm.round.giving_up import GaveUpError, Lack
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.runtime.futures import done_at, has_come
from peer.swarm.runtime.tasks import unless
from peer.system.clock import Clock

ALMOST = 0.9  # of the window to join, or all but this: after it a member that has not come is late
Join = asyncio.Future[Any]
Newcomer = Callable[[], Coroutine[Any, Any, None]]
"""Returns when a peer waits for which the group re-forms."""


async def never() -> None:
    """Default: never completes."""
    await asyncio.Event().wait()


class Joining:
    """The joins of one round; from now on its buffers note when each comes.

    Args:
        late_s: of the window, at its end, in which one that has not joined is late.
    """

    def __init__(self, buffers: RoundBuffers, late_s: float, clock: Clock) -> None:
        self._buffers, self._late_s, self._clock = buffers, late_s, clock
        self._joins = {peer_id: inbox.join for peer_id, inbox in buffers.inboxes.items()}
        buffers.times.joined = done_at(self._joins, clock)
        buffers.times.sealed = done_at({peer_id: inbox.sent for peer_id, inbox in buffers.inboxes.items()}, clock)

    async def all_come(self, patience_s: float, newcomer: Newcomer) -> tuple[RoundAborted, Lack | None] | None:
        """Wait for them.

        Returns:
            why this peer gives the round up, and what it lacks; None once all have joined.
        """
        joining = self._window(patience_s)
        if (joined := await unless(self._before_most(newcomer), joining)) is None:
            return RoundAborted("match", "others want to take part"), self._waiting()
        done, late = joined
        broken = next((future.exception() for future in done if future.exception() is not None), None)
        if isinstance(broken, RoundAborted):
            abort = RoundAborted("match", broken.reason, broken.culprit)
            ended_by = broken.remote if isinstance(broken, GaveUpError) else broken.culprit
            almost_s = max(ALMOST * patience_s, patience_s - self._late_s)
            return abort, self._late(self._clock() - almost_s) or self._waiting(ended_by)
        if late and (names := sorted(self._missing())):  # else the last one came as the window ended
            abort = RoundAborted("match", f"{', '.join(names)} did not come within {patience_s:.0f} s", names[0])
            return abort, self._late(self._clock()) or self._waiting()
        return None

    async def _window(self, patience_s: float) -> tuple[set[Join], set[Join]]:
        """Until all have joined, one cannot, or the window is over: for the first member it begins with the second, so
        that all see it end together, and find the same members missing.
        """
        began, joins, done = self._clock(), set[Join](self._joins.values()), set[Join]()
        while done < joins and all(map(has_come, done)):
            opened = self._buffers.times.opened
            end = patience_s + (max(began, opened) if math.isfinite(opened) else began)
            if (left_s := end - self._clock()) <= 0.0:
                break
            await asyncio.wait(joins - done, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            done = {join for join in joins if join.done()}
        return done, joins - done

    async def _before_most(self, newcomer: Newcomer) -> None:
        """Return for a newcomer while most joins are still to come. Later the others may have begun: a member that
        leaves them then fails a round.
        """
        await newcomer()
        if 2 * sum(map(has_come, self._joins.values())) >= len(self._joins):
            await never()

    def _missing(self) -> frozenset[str]:
        return frozenset(peer_id for peer_id, join in self._joins.items() if not has_come(join))

    def _late(self, before: float) -> Lack | None:
        """The members that have not joined, if the round was open by then, or most others have signed what they sent:
        then those members have joined elsewhere.
        """
        begun = 2 * sum(has_come(inbox.sent) for inbox in self._buffers.inboxes.values()) > len(self._joins)
        late = self._missing()
        return Lack("join", late) if late and (begun or self._buffers.times.opened <= before) else None

    def _waiting(self, ended_by: str | None = None) -> Lack | None:
        """The members that have not joined, whether or not they are late.

        Args:
            ended_by: the member that ended the round for this peer, if one did.
        """
        missing = self._missing()
        return Lack("waiting", missing, frozenset({ended_by} if ended_by else ())) if missing else None
