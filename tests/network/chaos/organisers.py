"""Organisers that ask too much: `python -m tests.network.chaos.organisers PID FOLDER`, manifests as JSON on its input.

Each manifest, by name, is published by a node of its own, whatever it says: no schema of ours has seen it. Prints one
JSON object: the address of each.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer.protocol.records import SERIAL_BYTES, seal
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.manifests import publish_manifests
from peer.swarm.net.node_start import start_node
from peer.swarm.runtime.timing import STANDARD
from peer.system.death_signal import children_die_with_us, die_with_parent


async def publish(folder: Path, manifests: dict[str, Any]) -> None:
    """All of them, until this process ends."""
    addresses, nodes = {}, []
    for number, (name, manifest) in enumerate(manifests.items()):
        node = await start_node(
            NodeConfig(
                identity_path=folder / f"organiser{number}.key", host_maddrs=("/ip4/127.0.0.1/tcp/0",),
                timing=replace(STANDARD, daemon_start_s=60.0),
            )
        )
        serial = int(1000 * time.time()).to_bytes(SERIAL_BYTES, "big")
        blob = seal(node.identity, "manifest", serial + zlib.compress(json.dumps(manifest).encode(), 9))
        await publish_manifests(node, {node.peer_id: blob}, random.Random(number))
        nodes.append(node)
        addresses[name] = node.maddrs[0]
    print(json.dumps(addresses), flush=True)
    await asyncio.wait([asyncio.ensure_future(node.closed()) for node in nodes])


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    children_die_with_us()
    asyncio.run(publish(Path(sys.argv[2]), json.loads(sys.stdin.readline())))
