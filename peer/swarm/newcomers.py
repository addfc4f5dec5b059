"""For whose sake a standing group forms anew, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable

FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 120.0


class Newcomers:
    """Peers outside the group that could be in it. One that does not come is tried ever more rarely.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[str, tuple[float, float]] = {}
        self._honoured: dict[str, float] = {}

    def among(self, peer_ids: Iterable[str]) -> list[str]:
        """Those of `peer_ids` that are to be tried now, in order."""
        now = self._clock()
        return sorted(peer_id for peer_id in peer_ids if self._waits.get(peer_id, (0.0, 0.0))[0] <= now)

    def missed(self, peer_ids: Iterable[str]) -> None:
        """A group formed without these."""
        now = self._clock()
        self._waits = {peer: wait for peer, wait in self._waits.items() if wait[0] + LONGEST_WAIT_S > now}
        for peer_id in peer_ids:
            until, wait_s = self._waits.get(peer_id, (now, FIRST_WAIT_S / 2))
            if until <= now:
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
                self._waits[peer_id] = (now + wait_s, wait_s)

    def invited(self, peer_id: str) -> bool:
        """Whether the group forms anew for who invites one of its members: once in each wait, even before its end."""
        now = self._clock()
        until, wait_s = self._waits.get(peer_id, (now, 0.0))
        if until <= now:
            return True
        if now - self._honoured.get(peer_id, -LONGEST_WAIT_S) < wait_s:
            return False
        self._honoured = {peer: at for peer, at in self._honoured.items() if at + LONGEST_WAIT_S > now}
        self._honoured[peer_id] = now
        self._waits[peer_id] = (now, wait_s)
        return True

    def came(self, peer_ids: Iterable[str]) -> None:
        """A group formed with these."""
        for peer_id in peer_ids:
            self._waits.pop(peer_id, None)
