"""Decides when an established group re-forms to admit waiting peers, with back-off."""

from __future__ import annotations

from collections.abc import Iterable

from peer.swarm.runtime.expiring import ExpiringMap, ExpiringSet
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock

FULL = 0.5
"""Of the straggler window: how long a full group stays while others wait."""


class RegroupPolicy:
    """Peers outside the group that could be in it. A peer that does not join is tried ever more rarely.

    Args:
        window_s: how long a round waits for its members.
    """

    def __init__(self, timing: Timing, clock: Clock, window_s: float) -> None:
        self._clock, self._formed = clock, clock()
        self._full_s = min(timing.longest_regroup_wait_s, FULL * window_s)
        self._first_s, self._longest_s = timing.first_regroup_wait_s, timing.longest_regroup_wait_s
        self._waits: ExpiringMap[str, tuple[float, float]] = ExpiringMap(clock)  # until when, and for how long
        self._honoured: ExpiringMap[tuple[str, str], float] = ExpiringMap(clock, self._longest_s)
        self._interrupted: ExpiringSet[str] = ExpiringSet(clock, timing.interrupt_pause_s)
        self._fickle: ExpiringSet[str] = ExpiringSet(clock)
        self._excused: ExpiringSet[str] = ExpiringSet(clock, timing.excuse_period_s)
        self._excuses: set[str] = set()

    def among(self, peer_ids: Iterable[str]) -> list[str]:
        """Those of `peer_ids` that are to be tried now, in order."""
        now = self._clock()
        return sorted(peer_id for peer_id in peer_ids if self._waits.get(peer_id, (0.0, 0.0))[0] <= now)

    def overdue(self) -> bool:
        """Whether the group has been the same for so long that it re-forms even for peers that do not fit. It must not
        take as long as these wait at its leader: they would leave, lead a round that loses, and blame the leader.
        """
        return self._clock() >= self._formed + self._full_s

    def missed(self, peer_ids: Iterable[str]) -> None:
        """A group formed without these; a peer that had just announced itself is excused."""
        self._formed = self._clock()
        self._leave_out(peer_ids)

    def _leave_out(self, peer_ids: Iterable[str]) -> None:
        now, left_out = self._clock(), set(peer_ids)
        left_out, self._excuses = left_out - self._excuses, self._excuses - left_out
        for peer_id in left_out:
            until, wait_s = self._waits.get(peer_id, (now, self._first_s / 2))
            if until <= now:
                wait_s = min(self._longest_s, 2 * wait_s)
                self._wait(peer_id, now + wait_s, wait_s)

    def announced(self, peer_id: str) -> bool:
        """This peer announced that it is catching up. -> whether the group re-forms for it: once in each wait, even
        before its end. A group that forms meanwhile without it is not counted, within limits: it was still catching up.
        """
        self._excuses &= self._excused.keys()
        if peer_id not in self._excused:
            self._excused.add(peer_id)
            self._excuses.add(peer_id)
        return self._shown(peer_id, "announcement")

    def invited(self, peer_id: str) -> bool:
        """This peer has invited a member. -> as `announced`; it may have announced itself, and been missed again."""
        return self._shown(peer_id, "invitation")

    def _shown(self, peer_id: str, how: str) -> bool:
        now = self._clock()
        until, wait_s = self._waits.get(peer_id, (now, 0.0))
        if until <= now:
            return True
        if now - self._honoured.get((peer_id, how), -self._longest_s) < wait_s:
            return False
        self._honoured[peer_id, how] = now
        self._wait(peer_id, now, wait_s)
        return True

    def sits(self, peer_id: str) -> bool:
        """This peer waits in the lobby. -> whether the group re-forms for it: unless it left the lobby recently."""
        if peer_id in self._fickle:
            return False
        if peer_id in self._waits:
            self._wait(peer_id, self._clock(), self._waits[peer_id][1])
        return True

    def left(self, peer_id: str) -> None:
        """This peer left the lobby before a group formed: treat it as one that does not join, though it waits."""
        now = self._clock()
        self._excuses.discard(peer_id)
        if self._waits.get(peer_id, (now, 0.0))[0] <= now:
            self._leave_out((peer_id,))  # no group has formed
        self._fickle.add(peer_id, self._waits[peer_id][0] - now)

    def interrupts(self, peer_id: str) -> bool:
        """Whether a round that waits for its members is abandoned for this peer, which waits in the lobby. That
        discards what members have sent, so no peer causes it twice within `interrupt_pause_s`.
        """
        if peer_id in self._interrupted:
            return False
        self._interrupted.add(peer_id)
        return True

    def came(self, peer_ids: Iterable[str]) -> None:
        """A group formed with these."""
        for peer_id in peer_ids:
            self._waits.pop(peer_id, None)
            self._fickle.pop(peer_id, None)
            self._excuses.discard(peer_id)

    def _wait(self, peer_id: str, until: float, wait_s: float) -> None:
        """Try it again at `until`; how long it waited is known for as long as the longest wait."""
        self._waits.put(peer_id, (until, wait_s), until - self._clock() + self._longest_s)
