from __future__ import annotations

import pytest

from peer.outer import state
from peer.swarm import snapshots
from tests.swarm.network import MemoryNetwork


@pytest.fixture
async def network():
    """Production nodes that reach each other over socket pairs inside this process."""
    network = MemoryNetwork()
    yield network
    await network.close()


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 1024 elements: a state of a few kilobytes has many."""
    for module in (state, snapshots):
        monkeypatch.setattr(module, "CHUNK", 1024)
