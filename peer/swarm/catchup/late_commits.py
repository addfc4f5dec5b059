"""Rounds that continued without this peer: others may have committed a round that this one abandoned.

Its contribution is in such a round's update. A peer that did not find out would send the same progress again. With
error feedback, the residual that was rolled back when the round was abandoned is valid after all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

from peer.errors import ProtocolError, in_words
from peer.protocol.chain import extended
from peer.protocol.lineage import Certificate
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.history_client import HistoryClient
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import staggered

log = logging.getLogger(__name__)
ASKED = 3  # two thirds have a certificate if any has: all three lack it by chance in one case of 27 at most


class NoAnswerError(Exception):
    """No peer said whether a round continued."""


class LateCommits:
    """What this peer sent last, until its outcome is known.

    Attributes:
        contributed: the snapshot of this peer that a replayed round contains, since the last `begin`.
    """

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._sent: tuple[str, int] | None = None
        self.contributed: int | None = None

    def sending(self, parent: str, sequence: int) -> None:
        """The exchange of the round after `parent` begins with this snapshot."""
        self._sent = parent, sequence

    def begin(self) -> None:
        """This peer looks for rounds that it has missed."""
        self.contributed = None

    def replaying(self, certificate: Certificate) -> int | None:
        """The snapshot of this peer that is in this round, or in one that has just been replayed before it.

        Every member of the roster has contributed: no shard is reduced without it.
        """
        link = certificate.link
        if self._sent is not None and link.parent == self._sent[0]:
            if any(member.peer_id == self._own_id for member in link.roster):
                self.contributed = self._sent[1]
            self._sent = None
        return self.contributed


async def find_continuation(
    fetcher: HistoryClient, others: Sequence[str], local: Callable[[], LocalState], rng: random.Random,
    patience_s: float, asleep: str | None = None,
) -> tuple[str, Sequence[Certificate]] | None:  # fmt: skip
    """A peer that continued after a round that this one abandoned or slept through: (peer, its chain from genesis).

    Args:
        patience_s: for each of them.
        asleep: one of them that may be suspended, as another one said: it is asked in parallel, with a short timeout.

    Raises:
        NoAnswerError: no peer that was asked has answered.
    """
    awake = [peer_id for peer_id in others if peer_id != asleep] or list(others)
    asked = rng.sample(awake, min(ASKED, len(awake)))
    beside, silent = [peer_id for peer_id in others if peer_id not in awake], 0
    own = local().history.chain

    async def onward(peer_id: str) -> list[Certificate]:
        async with asyncio.timeout(fetcher.timing.hearsay_s if peer_id in beside else patience_s):
            return await fetcher.onward(peer_id, local())

    calls = staggered(lambda: asked + beside, onward, 0.0, fetcher.timing.recheck_s)
    async with contextlib.aclosing(calls) as answers:
        async for peer_id, answer in answers:
            try:
                chain = answer.result()
            except (TimeoutError, ProtocolError, StreamClosedError) as error:
                log.info("%s does not say whether the round continued: %s", peer_id, in_words(error))
                silent += 1
                continue
            if chain:
                return peer_id, extended(own, chain)
    if asked and silent == len(asked + beside):
        raise NoAnswerError
    return None
