"""Takes the genesis state of a run from the first peer that has it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from peer.errors import ProtocolError, in_words
from peer.protocol.lineage import Certificate
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.history_client import HistoryClient
from peer.swarm.net.stream import StreamClosedError

log = logging.getLogger(__name__)


async def fetch_genesis(
    client: HistoryClient, donors: Iterable[str], local: LocalState,
    adopt: Callable[[Path, list[Certificate]], Awaitable[None]],
) -> bool:  # fmt: skip
    """Take the initial state from the first donor that has it; False if none has."""
    for donor in donors:
        try:
            await client.genesis(donor, local, adopt)
        except (ProtocolError, StreamClosedError) as error:
            log.warning("no genesis state from %s: %s", donor, in_words(error))
        else:
            log.info("took the genesis state from %s: this machine builds another one", donor)
            return True
    return False
