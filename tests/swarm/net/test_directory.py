"""How often a peer says who it is, and what it knows of others while the DHT is silent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from peer.protocol.identity import Identity
from peer.protocol.records import PEER_TTL_S, PeerRecord, dump_json, seal
from peer.swarm.net.directory import Directory
from tests.swarm.gathering import until
from tests.swarm.runs import RUN


class Store:
    """A DHT that takes what it is given, and when."""

    def __init__(self):
        self.times = []

    async def store(self, *_, **__):
        self.times.append(asyncio.get_running_loop().time())
        return True


async def test_a_swarm_of_quick_rounds_does_not_announce_each_of_them(network):
    network.retime(announce_pause_s=0.2, refresh_period_s=1000.0)
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


class Silent(Store):
    """A DHT whose nodes sleep for as long as `record` is None."""

    record = None

    async def get(self, *_, **__):
        while self.record is None:
            await asyncio.sleep(0.01)
        owner, blob = self.record
        return SimpleNamespace(value={owner: SimpleNamespace(value=blob)})


async def test_a_dht_that_is_silent_takes_nobody_from_the_directory_before_its_record_expires(network):
    network.retime(dht_timeout_s=0.05)
    now, other = 1000.0, Identity.generate()
    node = network.node()
    node.dht = Silent()
    reader = Directory(node, RUN, clock=lambda: now)
    record = PeerRecord(
        run_id=RUN, nickname="other", state="training", round=0, lineage_id=RUN, lineage_weight=0,
        expires_at=reader.expiry(),
    )  # fmt: skip
    node.dht.record = other.peer_id, seal(other, "peer", dump_json(record))
    await reader.refresh()
    assert (list(reader.peers), reader.fresh) == ([other.peer_id], True)
    node.dht.record = None
    now += PEER_TTL_S - 1.0
    await reader.refresh()
    assert (list(reader.peers), reader.fresh) == ([other.peer_id], False)
    now += 1.0
    assert list(reader.peers) == []
