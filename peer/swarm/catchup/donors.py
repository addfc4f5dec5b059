"""Candidates to catch up from, according to the records of others, which are claims only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from peer.outer.state.outer_state import OuterState
from peer.protocol.records import PeerRecord
from peer.swarm.state.chain import ChainStore


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


def helpers(peers: dict[str, PeerRecord], donor: str, distrusted: set[str]) -> list[str]:
    """Peers that may have the donor's snapshot too: they claim to be at its position, or on the way to it."""
    there = peers[donor].lineage_id if donor in peers else None
    able = [
        peer_id
        for peer_id, record in peers.items()
        if peer_id != donor and peer_id not in distrusted and record.state != "joining"
    ]
    return sorted(able, key=lambda peer_id: (peers[peer_id].lineage_id != there, -peers[peer_id].round, peer_id))
