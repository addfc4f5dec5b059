"""How often a peer says who it is."""

from __future__ import annotations

import asyncio

from peer.protocol.records import PeerRecord
from peer.swarm import directory
from peer.swarm.directory import Directory
from tests.swarm.gathering import until
from tests.swarm.runs import RUN


class Store:
    """A DHT that takes what it is given, and when."""

    def __init__(self):
        self.times = []

    async def store(self, *_, **__):
        self.times.append(asyncio.get_running_loop().time())
        return True


async def test_a_swarm_of_quick_rounds_does_not_announce_each_of_them(network, monkeypatch):
    monkeypatch.setattr(directory, "ANNOUNCE_PAUSE_S", 0.2)
    monkeypatch.setattr(directory, "REFRESH_PERIOD_S", 1000.0)
    node = network.node()
    node.dht = Store()
    announcer = Directory(node, RUN)
    announcer.announce(
        lambda: PeerRecord(
            run_id=RUN, nickname="one", state="training", round=0, lineage_id=RUN, lineage_weight=0,
            expires_at=announcer.expiry(),
        )
    )

    def five_rounds_later():
        announcer.announce_soon()
        return len(node.dht.times) >= 5

    await until(five_rounds_later, 30.0)
    gaps = [after - before for before, after in zip(node.dht.times, node.dht.times[1:], strict=False)]
    assert min(gaps) >= 0.2 - 1e-3
