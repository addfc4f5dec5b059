from __future__ import annotations

import pytest

from tests.swarm.network import MemoryNetwork


@pytest.fixture
async def network():
    """Production nodes that reach each other over socket pairs inside this process."""
    network = MemoryNetwork()
    yield network
    await network.close()
