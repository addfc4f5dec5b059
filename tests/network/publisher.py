"""Nodes of a real DHT that no Atoll bootstrap would be: `python -m tests.network.publisher FOLDER MANIFEST`.

Prints one JSON object: the address of a node without any manifest (`empty`), of one that publishes the manifest under
a protocol version of the future (`newer`), and of one whose model no machine holds (`giant`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from peer.protocol.manifest import RunManifest, parse_manifest
from peer.protocol.records import seal_manifest
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.manifests import publish_manifests
from peer.swarm.net.node_start import start_node
from peer.system.death_signal import children_die_with_us, die_with_parent

GIANT = {"hidden_size": 65536, "intermediate_size": 196608, "num_hidden_layers": 24}  # 1.34e12 parameters
FUTURE_PROTOCOL = 999


def changed(manifest: RunManifest) -> dict[str, RunManifest | None]:
    """What each node publishes."""
    model = manifest.model.model_copy(update={"config": {**manifest.model.config, **GIANT}})
    genesis = {"genesis": "0" * 64}
    return {
        "empty": None,
        "newer": manifest.model_copy(update={"protocol": FUTURE_PROTOCOL, **genesis}),
        "giant": manifest.model_copy(update={"model": model, **genesis}),
    }


async def publish(folder: Path, manifest: RunManifest) -> None:
    addresses = {}
    nodes = []
    for name, published in changed(manifest).items():
        config = NodeConfig(identity_path=folder / f"{name}.key", host_maddrs=("/ip4/127.0.0.1/tcp/0",))
        node = await start_node(config)
        nodes.append(node)
        if published is not None:
            sealed = seal_manifest(node.identity, published, 1)
            await publish_manifests(node, {node.peer_id: sealed}, random.Random(0))
        addresses[name] = node.maddrs[0]
    print(json.dumps(addresses), flush=True)
    await asyncio.wait([asyncio.ensure_future(node.closed()) for node in nodes])


if __name__ == "__main__":
    die_with_parent(os.getppid())
    children_die_with_us()
    asyncio.run(publish(Path(sys.argv[1]), parse_manifest(Path(sys.argv[2]).read_bytes(), sys.argv[2])))
