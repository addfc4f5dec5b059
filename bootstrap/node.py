"""The bootstrap node: a DHT root with a persistent identity; publishes the manifest, serves the genesis state."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from peer.errors import ProtocolError, UserError
from peer.protocol.manifest import RunManifest
from peer.protocol.records import seal_manifest
from peer.protocol.wire import SnapshotMeta
from peer.swarm.daemon import NodeConfig
from peer.swarm.directory import Directory, publish_manifest_forever
from peer.swarm.history import History
from peer.swarm.node import Node, start_node
from peer.swarm.serving import HistoryServer
from peer.swarm.snapshots import OneSnapshot, SnapshotFile

log = logging.getLogger(__name__)
GENESIS_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Genesis:
    """The initial state as a file, and the manifest that names its digest."""

    manifest: RunManifest
    snapshot: SnapshotFile


async def build_genesis(manifest: RunManifest, manifest_path: Path, state_dir: Path) -> Genesis:
    """Build the initial state in a child process, which reads the manifest once more.

    Raises:
        UserError: the model cannot be built, or does not fit this machine.
    """
    out = state_dir / "genesis.bin"
    command = [sys.executable, "-m", "peer.genesis", str(manifest_path), "--out", str(out)]
    child = await asyncio.create_subprocess_exec(
        *command, "--parent", str(os.getpid()), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), GENESIS_TIMEOUT_S)
    except (asyncio.CancelledError, asyncio.TimeoutError):
        child.kill()
        raise
    if child.returncode not in (0, 2):
        raise UserError(f"building the initial model of {manifest_path} failed (see the messages above)")
    figures = json.loads(output.splitlines()[-1])
    if child.returncode == 2:
        raise UserError(figures["what"], figures["hint"])
    if manifest.genesis not in (None, figures["digest"]):
        raise UserError(
            f"the manifest names genesis {manifest.genesis}; this machine builds {figures['digest']}",
            "remove 'genesis' from the file to start a new run",
        )
    meta = SnapshotMeta(
        round=0,
        lineage_id=figures["digest"],
        numel=figures["numel"],
        num_buffers=figures["num_buffers"],
        num_chunks=len(figures["chunks"]),
    )
    snapshot = SnapshotFile(out, meta, [bytes.fromhex(digest) for digest in figures["chunks"]])
    return Genesis(manifest.model_copy(update={"genesis": figures["digest"]}), snapshot)


@dataclass
class Bootstrap:
    """A running bootstrap node of one run."""

    node: Node
    genesis: Genesis
    directory: Directory

    @property
    def manifest(self) -> RunManifest:
        return self.genesis.manifest

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full addresses that peers join with."""
        return self.node.maddrs


async def start_bootstrap(config: NodeConfig, genesis: Genesis, state_dir: Path, rng: random.Random) -> Bootstrap:
    """Start the node, publish the manifest, serve the genesis state.

    Raises:
        UserError: see `start_node`; also a manifest that does not fit a DHT record.
    """
    node = await start_node(config)
    manifest = genesis.manifest
    try:
        sealed = seal_manifest(node.identity, manifest)
    except ProtocolError as error:
        raise UserError(str(error), "shorten the manifest's model config") from None
    node.spawn(publish_manifest_forever(node, sealed, node.peer_id, rng))
    assert manifest.genesis is not None
    history = History(state_dir / "history" / manifest.run_id[:16], manifest.genesis)
    await HistoryServer(node, manifest.run_id, history, OneSnapshot(genesis.snapshot)).start()
    directory = Directory(node, manifest.run_id)
    directory.follow()
    return Bootstrap(node, genesis, directory)
