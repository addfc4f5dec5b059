"""A stranger with hivemind's own DHT floods that of a run: `python -m tests.network.chaos.floods PID ADDRESS RUN SEED`.

Reads the name of a flood a line (`NAME: COUNT` where it may be told how many), and prints one JSON object for each:
how many records it offered, and how many were held by any node that it knows.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from peer.protocol.identity import Identity
from peer.protocol.records import (
    MANIFEST_KEY,
    MAX_PEER_RECORD_BYTES,
    MAX_RECORD_BYTES,
    PEER_TTL_S,
    PeerRecord,
    dump_json,
    peers_key,
    seal,
)
from peer.swarm.net.keys import load_or_create_identity
from peer.system.death_signal import children_die_with_us, die_with_parent

Record = tuple[DHTID, Any, bytes, float]
KEYS = 1300
RANDOM_KEYS = 30_000
FORGED_IDS = 5_000
BATCH = 60


class Flooder:
    """Hands records to every node in its routing table."""

    def __init__(self, dht: DHTNode, identity: Identity, run_id: str, rng: random.Random) -> None:
        self._dht, self._identity, self._run_id, self._rng = dht, identity, run_id, rng

    @property
    def _nodes(self) -> list[Any]:
        return list(self._dht.protocol.routing_table.uid_to_peer_id.values())

    async def hand_in(self, records: Iterator[Record]) -> dict[str, int]:
        offered, held, batch = 0, 0, list[Record]()
        for record in records:
            batch.append(record)
            if len(batch) == BATCH:
                offered, held = offered + BATCH, held + await self._batch(batch)
                batch = []
        return {"offered": offered + len(batch), "held": held + await self._batch(batch)}

    async def _batch(self, batch: list[Record]) -> int:
        if not batch:
            return 0
        keys, subkeys, values, ends = (list(column) for column in zip(*batch, strict=True))
        protocol = self._dht.protocol
        answers = await asyncio.gather(*(protocol.call_store(n, keys, values, ends, subkeys) for n in self._nodes))
        return sum(any(found) for found in zip(*(a for a in answers if a), strict=False))

    def _peer_record(self, signer: Identity, size: int, run_id: str) -> tuple[bytes, float]:
        expires_at = time.time() + PEER_TTL_S
        record = PeerRecord(run_id=run_id, nickname="x", state="training", round=1, lineage_id=run_id,
                            lineage_weight=1, expires_at=expires_at)  # fmt: skip
        payload = dump_json(record)
        return seal(signer, "peer", payload + b" " * (size - 1 - len(signer.peer_id) - 64 - len(payload))), expires_at

    def directory(self, size: int, count: int = KEYS) -> Iterator[Record]:
        """Records of made-up peers in the run's directory."""
        for _ in range(count):
            signer = Identity.generate()
            blob, expires_at = self._peer_record(signer, size, self._run_id)
            yield DHTID.generate(peers_key(self._run_id)), signer.peer_id, MSGPackSerializer.dumps(blob), expires_at

    def random_keys(self, count: int = RANDOM_KEYS) -> Iterator[Record]:
        """Anything, under keys of the stranger's own choice."""
        signer = Identity.generate()
        value = MSGPackSerializer.dumps(seal(signer, "peer", bytes(3000)))
        for _ in range(count):
            yield DHTID.generate(self._rng.randbytes(20)), signer.peer_id, value, time.time() + 110.0

    def runs(self) -> Iterator[Record]:
        """Well-formed records of the stranger itself, for as many runs as it likes."""
        for _ in range(KEYS):
            run_id = self._rng.randbytes(32).hex()
            blob, expires_at = self._peer_record(self._identity, MAX_PEER_RECORD_BYTES, run_id)
            yield DHTID.generate(peers_key(run_id)), self._identity.peer_id, MSGPackSerializer.dumps(blob), expires_at

    def manifests(self) -> Iterator[Record]:
        """Manifests of made-up organisers."""
        for _ in range(KEYS):
            signer = Identity.generate()
            value = MSGPackSerializer.dumps(seal(signer, "manifest", self._rng.randbytes(MAX_RECORD_BYTES - 120)))
            yield DHTID.generate(MANIFEST_KEY), signer.peer_id, value, time.time() + 110.0

    async def dictionaries(self) -> dict[str, int]:
        """A whole directory in one record, as hivemind's nodes hand it to each other."""
        whole = DictionaryDHTValue()
        for _, owner, value, expires_at in self.directory(MAX_PEER_RECORD_BYTES, 300):
            whole.store(owner, value, expires_at)
        key, end = DHTID.generate(peers_key(self._run_id)), time.time() + PEER_TTL_S
        answers = [await self._dht.protocol.call_store(node, [key], [whole], end) for node in self._nodes]
        return {"offered": 300, "held": 300 * any(answer and answer[0] for answer in answers)}

    async def forged_ids(self, count: int = FORGED_IDS) -> dict[str, int]:
        """One host that says it is thousands of nodes; held: those that others then name."""
        protocol, nodes = self._dht.protocol, self._nodes
        forged = [DHTID.generate() for _ in range(count)]
        pings = [dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id.to_bytes())) for node_id in forged]
        for node in nodes:
            stub = protocol.get_stub(node)
            for start in range(0, count, BATCH):
                await asyncio.gather(*(stub.rpc_ping(ping, timeout=10.0) for ping in pings[start : start + BATCH]))
        named: set[DHTID] = set()
        for node in nodes:
            found = await protocol.call_find(node, self._rng.sample(forged, 4))
            for _, nearest in (found or {}).values():
                named.update(nearest)
        return {"offered": count, "held": len(named & set(forged))}

    async def replays(self) -> dict[str, int]:
        """The honest peers' own records, once they are old, with a later expiry; held: those that replace newer."""
        key = DHTID.generate(peers_key(self._run_id))
        found = await self._dht.get(peers_key(self._run_id), latest=True)
        await asyncio.sleep(PEER_TTL_S / 2)
        end = time.time() + 110.0
        old = {} if found is None else found.value
        return await self.hand_in((key, o, MSGPackSerializer.dumps(v.value), end) for o, v in old.items())

    @property
    def floods(self) -> dict[str, Callable[..., Awaitable[dict[str, int]]]]:
        """By name; some may be told how many."""
        return {
            "directory": lambda count=KEYS: self.hand_in(self.directory(MAX_RECORD_BYTES, count)),
            "small records": lambda count=KEYS: self.hand_in(self.directory(MAX_PEER_RECORD_BYTES, count)),
            "random keys": lambda count=RANDOM_KEYS: self.hand_in(self.random_keys(count)),
            "runs": lambda: self.hand_in(self.runs()),
            "manifests": lambda: self.hand_in(self.manifests()),
            "dictionaries": self.dictionaries,
            "forged ids": self.forged_ids,
            "replays": self.replays,
        }

    async def asked(self, line: str) -> dict[str, int]:
        """The flood of a line: its name, and how many records or ids if there is a colon and a number."""
        name, _, count = line.partition(": ")
        return await self.floods[name](*map(int, count.split()))


async def flood(address: str, run_id: str, seed: int) -> None:
    key = Path(tempfile.mkdtemp()) / "identity.key"
    identity = load_or_create_identity(key)
    p2p = await P2P.create(
        initial_peers=[address], host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=str(key),
        check_if_identity_free=False,
    )  # fmt: skip
    dht = await DHTNode.create(
        p2p=p2p, initial_peers=[address], cache_locally=False, cache_nearest=0,
        node_id=DHTID.generate(source=str(p2p.peer_id).encode()),
    )  # fmt: skip
    assert type(dht.protocol) is DHTProtocol  # hivemind's own, without bounds
    flooder = Flooder(dht, identity, run_id, random.Random(seed))
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        begun = time.monotonic()
        print(json.dumps({**await flooder.asked(line), "seconds": time.monotonic() - begun}), flush=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    children_die_with_us()
    asyncio.run(flood(sys.argv[2], sys.argv[3], int(sys.argv[4])))
