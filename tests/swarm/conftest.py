from __future__ import annotations

from dataclasses import replace

import pytest

from peer.outer.numerics import offload
from peer.outer.state import outer_state
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state import snapshot_file
from peer.swarm.state.snapshot_cache import SnapshotCache
from tests.swarm.network import MemoryNetwork
from tests.swarm.runs import Run
from tests.swarm.shelves import NUMEL

QUICK = replace(STANDARD, min_exchange_s=3.0)  # the tests' exchanges are small, and some are meant to fail


@pytest.fixture
async def network():
    """Production nodes that reach each other over socket pairs inside this process."""
    network = MemoryNetwork(QUICK)
    yield network
    await network.close()


@pytest.fixture
def run(tmp_path):
    """A donor's run of a few columns and one round."""
    return Run(tmp_path / "donor", numel=NUMEL).commit(1)


@pytest.fixture
def snapshot_cache(run):
    """The snapshots of that run."""
    return SnapshotCache(run)


@pytest.fixture(params=["in place", "in threads"])
def arithmetic(request, monkeypatch):
    """What there is to compute is done where it is for small states, or where it is for large ones."""
    if request.param == "in threads":
        monkeypatch.setattr(offload, "SMALL", 0)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 1024 elements: a state of a few kilobytes has many."""
    for module in (outer_state, snapshot_file):
        monkeypatch.setattr(module, "CHUNK", 1024)


@pytest.fixture
def brisk(network):
    """Matchmaking whose waiting times are short."""
    network.retime(solo_patience_s=0.2, leader_recheck_s=0.02, probe_timeout_s=1.0, awake_period_s=0.1)
