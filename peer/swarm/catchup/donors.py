"""Candidates to catch up from, according to the records of others, which are claims only."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from peer.outer.state.outer_state import OuterState
from peer.protocol.records import PeerRecord
from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.state.chain import ChainStore

MAX_SILENT = 1024
MAX_DOUBLINGS = 10


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """The position of this peer, and the format of its state.

    Attributes:
        digest: -> that of the state.
    """

    state: OuterState
    history: ChainStore
    valid: bool
    digest: Callable[[], Awaitable[str]]


class DonorQueue:
    """Which claims to look at first, and which donors to leave alone for a while.

    Attributes:
        distrusted: donors that are not asked now.
        preferred: asked before other strangers.
    """

    def __init__(self) -> None:
        self.distrusted: set[str] = set()
        self.preferred: set[str] = set()
        self._lots = random.SystemRandom()
        self._silent: BoundedMap[str, int] = BoundedMap(MAX_SILENT)
        self._nudged: dict[str, None] = {}
        self._nudge = asyncio.Event()

    def nudge(self, donor: str) -> None:
        """Look at this one next."""
        self._nudged[donor] = None
        self._nudge.set()

    def taken(self, donor: str) -> None:
        """It is being looked at."""
        self._nudged.pop(donor, None)

    def order(self, claims: Iterable[str], has_say: Callable[[str], bool]) -> list[str]:
        """The nudged ones and these, best first: strangers come last, by their place and by lot in turn, since a claim
        costs them nothing.
        """
        nudged = (donor for donor in self._nudged if donor not in self.distrusted)
        wanted = list(dict.fromkeys([*nudged, *claims]))
        strangers = [donor for donor in wanted if not has_say(donor)]
        lots = self._lots.sample(strangers, len(strangers))
        turns = (donor for pair in zip(strangers, lots, strict=True) for donor in pair)
        preferred = filter(self.preferred.__contains__, strangers)
        return list(dict.fromkeys([*filter(has_say, wanted), *preferred, *turns]))

    def distrust(self, donor: str, seconds: float) -> None:
        """Leave a donor alone for a while."""
        self.distrusted.add(donor)
        asyncio.get_running_loop().call_later(seconds, self.distrusted.discard, donor)

    def distrust_silent(self, donor: str, seconds: float, longest_s: float) -> None:
        """The same for one that does not answer, twice as long each time."""
        times = self._silent.get(donor, 0)
        self._silent[donor] = times + 1
        self.distrust(donor, min(longest_s, seconds * 2.0 ** min(times, MAX_DOUBLINGS)))

    def answered(self, donor: str) -> None:
        """It answers again."""
        self._silent.pop(donor, None)

    async def wait(self, timeout_s: float) -> None:
        """Return when another one is nudged, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nudge.wait(), timeout_s)

    def begin(self) -> None:
        """Nudges from now on count for the next `wait`."""
        self._nudge.clear()


def helpers(peers: dict[str, PeerRecord], donor: str, distrusted: set[str]) -> list[str]:
    """Peers that may have the donor's snapshot too: they claim to be at its position, or on the way to it."""
    there = peers[donor].lineage_id if donor in peers else None
    able = [
        peer_id
        for peer_id, record in peers.items()
        if peer_id != donor and peer_id not in distrusted and record.state != "joining"
    ]
    return sorted(able, key=lambda peer_id: (peers[peer_id].lineage_id != there, -peers[peer_id].round, peer_id))
