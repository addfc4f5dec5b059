"""Strikes: peers that this one refuses a seat because of its own observations, longer each time. No proof, no ban."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock

log = logging.getLogger(__name__)
STRIKES = 3
MAX_REMEMBERED = 1024


@dataclass
class _Past:
    offences: int = 0
    unanswered: int = 0
    refusals: int = 0
    until: float = 0.0


class StrikeCounter:
    """Counts what this peer observed itself; claims of third parties about a peer are not counted."""

    def __init__(self, timing: Timing, clock: Clock) -> None:
        self._timing, self._clock = timing, clock
        self._pasts: BoundedMap[str, _Past] = BoundedMap(MAX_REMEMBERED)

    def saw(self, peer_id: str, what: str) -> None:
        """Count a violation of the protocol. A crash or a slow line is none."""
        past = self._of(peer_id)
        past.offences += 1
        log.warning("%s broke the protocol (%d of %d): %s", peer_id, past.offences, STRIKES, what)
        if past.offences >= STRIKES:
            past.offences = 0
            self._refuse(peer_id, past)

    def unanswered(self, peer_id: str) -> None:
        """Count an unanswered audit. One may be chance, three in a row are not."""
        past = self._of(peer_id)
        past.unanswered += 1
        if past.unanswered >= STRIKES:
            past.unanswered = 0
            self._refuse(peer_id, past)

    def answered(self, peer_id: str) -> None:
        """Reset the unanswered audits: it answered one correctly."""
        if peer_id in self._pasts:
            self._pasts[peer_id].unanswered = 0

    def refuses(self, peer_id: str) -> bool:
        """Whether the peer is currently refused a place in groups."""
        past = self._pasts.get(peer_id)
        return past is not None and past.until > self._clock()

    def _refuse(self, peer_id: str, past: _Past) -> None:
        seconds = min(self._timing.longest_refusal_s, self._timing.first_refusal_s * 2.0**past.refusals)
        past.refusals += 1
        past.until = self._clock() + seconds
        log.warning("%s gets no seat from this peer for %.0f s", peer_id, seconds)

    def _of(self, peer_id: str) -> _Past:
        return self._pasts.setdefault(peer_id, _Past())
