"""What the peer directory costs each peer, by the size of the swarm, beside hivemind's searches."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, run_benchmark
from peer.protocol.records import PeerRecord
from peer.swarm.net import node_start
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.dht import BoundedDHT, DHTProtocol
from peer.swarm.net.dht_validator import key_id
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node

NAME = "directory"
ABOUT = "The peer directory on real nodes of one machine: what each receives, and when a newcomer is seen"
PEERS = (4, 8, 16, 32)
RUN_ID = "ab" * 32
WARM_UP_S = 8.0
SEEN_WITHIN_S = 60.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
Row = dict[str, float]


class SearchingDHT(BoundedDHT):
    """Reads and writes as hivemind does: each is a search, and each node on its way tells all that it has."""

    async def get(self, key: str, **_: Any) -> Any:
        await DHTNode.get(self, key, latest=True)
        return self.held(DHTID.from_bytes(key_id(key)))

    async def store(self, key: str, value: bytes, expiration_time: float, subkey: Any = None, **_: Any) -> bool:
        return bool(await DHTNode.store(self, key, value, expiration_time, subkey=subkey))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Real nodes on the loopback, all of one process, announce themselves and read the directory every two\n"
        "seconds, as peers do. Counted are the bytes of all answers; then a newcomer starts, until all see it.\n"
        "The same with hivemind's own way, in which every read and every write is a search among twenty nodes.",
    )
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, metavar="N", help="sizes of the swarm")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="of each (default: 12)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Each size, both ways."""
    for peers in arguments.peers:
        check_count("--peers", peers, 2)
    rows: dict[str, Row] = {}
    for peers in arguments.peers:
        for way, kind in (("", BoundedDHT), (" by searches", SearchingDHT)):
            rows[f"{peers} peers{way}"] = row = asyncio.run(swarm(peers, kind, arguments.seconds))
            say(f"{peers} peers{way}: {row['kb_s']:.1f} kB/s, a newcomer seen by all after {row['seen_s']:.1f} s")
    found = figures(arguments.peers, rows)
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=found, samples=rows)


def figures(sizes: Sequence[int], rows: dict[str, Row]) -> tuple[Figure, ...]:
    """By size, and the ratio to the searches."""
    found: list[Figure] = []
    for peers in sizes:
        name = f"{peers} peers"
        own, searches = rows[name], rows[f"{name} by searches"]
        found += [
            Figure(name=f"{name}: received by each", value=own["kb_s"], unit="kB/s"),
            Figure(name=f"{name}: of that with a search for each read and write", value=own["kb_s"] / searches["kb_s"],
                   unit="x", limit=0.5 if peers >= 8 else None),
            Figure(name=f"{name}: until all see a newcomer", value=own["seen_s"], unit="s", limit=10.0),
        ]  # fmt: skip
    return tuple(found)


async def swarm(peers: int, kind: type[BoundedDHT], seconds: float) -> Row:
    """That many nodes and a bootstrap. -> what each has received a second, and when all saw a newcomer."""
    received: Counter[str] = Counter()
    take = DHTProtocol._take

    async def counted(self: DHTProtocol, key: DHTID, result: Any, *, plain: bool) -> None:
        received["bytes"] += len(result.value)
        await take(self, key, result, plain=plain)

    with (
        tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder,
        patch.object(DHTProtocol, "_take", counted), patch.object(node_start, "BoundedDHT", kind),
    ):  # fmt: skip
        bootstrap = await started(Path(folder) / "bootstrap.key")
        nodes, directories = [bootstrap], [follow(bootstrap)]
        try:
            for number in range(peers):
                nodes.append(await started(Path(folder) / f"{number}.key", bootstrap))
                directories.append(follow(nodes[-1], announces=True))
            await asyncio.sleep(WARM_UP_S)
            received.clear()
            began = time.monotonic()
            await asyncio.sleep(seconds)
            kb_s = received["bytes"] / 1e3 / (time.monotonic() - began) / len(nodes)
            newcomer = await started(Path(folder) / "newcomer.key", bootstrap)
            nodes.append(newcomer)
            began = time.monotonic()
            follow(newcomer, announces=True)
            async with asyncio.timeout(SEEN_WITHIN_S):
                while not all(newcomer.peer_id in each.peers for each in directories):
                    await asyncio.sleep(0.05)
            return {"kb_s": kb_s, "seen_s": time.monotonic() - began}
        finally:
            await asyncio.gather(*(node.close() for node in nodes))


async def started(key: Path, bootstrap: Node | None = None) -> Node:
    """A node that knows the bootstrap, if there is one."""
    initial = (bootstrap.maddrs[0],) if bootstrap is not None else ()
    return await node_start.start_node(NodeConfig(identity_path=key, host_maddrs=(LOOPBACK,), initial_peers=initial))


def follow(node: Node, *, announces: bool = False) -> Directory:
    """Read the directory from now on; as a peer that trains, announce it there."""
    directory = Directory(node, RUN_ID)
    if announces:
        directory.announce(lambda: PeerRecord(
            run_id=RUN_ID, nickname="a-peer-of-a-run", state="training", round=1000, lineage_id=RUN_ID,
            lineage_weight=10**9, step=10**5, tokens=10**9, tokens_per_s=12345.6, loss=3.1416, group_size=8,
            addresses=("/ip4/203.0.113.7/tcp/31337",), bytes_sent=10**10, bytes_received=10**10, seconds_waiting=99.9,
            work=10**6, expires_at=directory.expiry(),
        ))  # fmt: skip
    directory.follow()
    return directory


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
