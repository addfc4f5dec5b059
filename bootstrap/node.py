"""The bootstrap node: a DHT root with a persistent identity; publishes the manifest, serves the genesis state."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bootstrap.archive import Archive, ArchivePlace, open_archive
from bootstrap.control import ControlSigner
from bootstrap.follower import ChainFollower
from bootstrap.genesis import Genesis
from bootstrap.hub_uploads import HubUploads
from bootstrap.invitations import InvitationRegistry
from bootstrap.manifest_serial import manifest_serial
from peer.errors import ProtocolError, UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest
from peer.protocol.records import SealedManifest, open_manifest, seal_manifest
from peer.run.run_file import keep_manifest
from peer.swarm.catchup.chain_scout import ChainRules, ChainScout
from peer.swarm.catchup.checkpoint_exchange import CheckpointExchange
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.catchup.history_server import HistoryServer
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.catchup.record_exchange import control_exchange
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.directory import Directory
from peer.swarm.net.gate import Gate
from peer.swarm.net.identity_work import solved
from peer.swarm.net.manifests import publish_manifests
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.run_control import RunControl, history_folder
from peer.swarm.state.snapshot_cache import OneSnapshot
from peer.swarm.state.store import StateStore
from peer.tokenizer_files import TokenizerFiles

log = logging.getLogger(__name__)


@dataclass
class Bootstrap:
    """A running bootstrap node of one run."""

    node: Node
    genesis: Genesis
    directory: Directory
    plan: RunPlan
    history: ChainStore
    control: RunControl

    @property
    def manifest(self) -> RunManifest:
        return self.genesis.manifest

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full addresses that peers join with."""
        return self.node.maddrs


async def start_bootstraps(
    config: NodeConfig, opened: Sequence[tuple[Genesis, Path]], rng: random.Random,
    archive: ArchivePlace | None = None,
) -> list[Bootstrap]:
    """Start the node, publish the manifests, serve the genesis states.

    Args:
        opened: each run, and the folder of its own.
        archive: where this node keeps the runs' states, as a donor; None: it keeps none.

    Raises:
        UserError: see `start_node`; also a manifest that does not fit a DHT record.
    """
    node = await start_node(config)
    manifests = []
    for genesis, folder in opened:
        manifest = genesis.manifest
        try:
            serial = manifest_serial(folder, (manifest.run_id, manifest.name), node.peer_id)
            blob = seal_manifest(node.identity, manifest, serial)
        except ProtocolError as error:
            raise UserError(f"run {manifest.name}: {error}", "shorten the manifest's model config") from None
        manifests.append(open_manifest(blob))
    await publish_manifests(node, {sealed.owner: sealed.blob for sealed in manifests}, rng)
    runs = [
        await _open_run(node, genesis, folder, sealed, archive)
        for (genesis, folder), sealed in zip(opened, manifests, strict=True)
    ]
    if not any(run.plan.recipe.gossips for run in runs):  # no chain says who takes part in those
        node.strange = lambda peer_id: not any(run.directory.known(peer_id) for run in runs)
    return runs


async def _open_run(
    node: Node, genesis: Genesis, folder: Path, published: SealedManifest, archive: ArchivePlace | None
) -> Bootstrap:
    manifest = genesis.manifest
    assert manifest.genesis is not None
    history = ChainStore(history_folder(folder, manifest.run_id), manifest.genesis)
    keep_manifest(history.folder, manifest)
    control = await _steer(node, folder, manifest)
    directory = Directory.of(node, manifest, Gate.of(manifest, node.peer_id, control))
    if directory.gate is not None:
        node.gates = (*node.gates, directory.gate)
        await InvitationRegistry(history.folder, manifest.run_id, node.identity).serve(node, control)
    files = TokenizerFiles(folder, manifest.tokenizer.files)
    directory.known = lambda peer_id: history.seen[peer_id] > 0 or peer_id == node.peer_id
    directory.follow()
    plan = RunPlan.of(manifest)
    store = open_archive(archive.folder / manifest.run_id[:16], genesis, plan, node) if archive is not None else None
    kept = store.history if store is not None else None
    rules = None if plan.recipe.gossips else await _follow(node, directory, published, plan, history, control, kept)
    if archive is not None and store is not None:
        await _keep(store, node, directory, rules, files)
        if archive.push_to is not None:
            node.spawn(HubUploads(
                store, control, folder, archive.push_to, archive.push_every, node.maddrs[0]
            ).run())  # fmt: skip
    else:
        await HistoryServer(node, manifest.run_id, history, OneSnapshot(genesis.snapshot), files=files).start()
    return Bootstrap(node, genesis, directory, plan, history, control)


async def _steer(node: Node, state_dir: Path, manifest: RunManifest) -> RunControl:
    """Publish what the organiser has signed in the state folder, and signs there from now on."""
    signer = ControlSigner(state_dir, manifest, node.identity)
    await control_exchange(node, manifest.run_id, signer.control).start()
    node.spawn(signer.watch(), essential=True)
    return signer.control


async def _follow(
    node: Node, directory: Directory, published: SealedManifest, plan: RunPlan, history: ChainStore,
    control: RunControl, archive: ChainStore | None,
) -> ChainRules:  # fmt: skip
    """Follow the run's chain from where this node left it, and sign checkpoints where the manifest lets it."""
    history.load_all()
    manifest = published.manifest
    run_id = manifest.run_id
    checkpoints = NewestCheckpoint.of(history.folder, manifest, node.peer_id)
    await CheckpointExchange(node, run_id, checkpoints).start()
    rules = ChainRules.of(
        plan, checkpoints, control, node.peer_id, published.opened_at,
        node.timing.least_round_s(plan.recipe.fewest_steps, manifest.rounds.straggler_wait_s),
    )  # fmt: skip
    scout = ChainScout(DonorRequests(node, run_id), run_id, rules, history)
    follower = ChainFollower(node, directory, history, scout, checkpoints, archive)
    node.spawn(follower.run(), essential=True)
    return rules


async def _keep(
    store: StateStore, node: Node, directory: Directory, rules: ChainRules | None, files: TokenizerFiles
) -> None:
    """Keep a run's state, and serve it as a donor."""
    assert rules is not None  # no archive opens for gossip
    run_id, priority = directory.work.run_id, store.snapshot_cache.priority
    archive = Archive(node, directory, run_id, store, rules)
    await HistoryServer(node, run_id, store.history, store.snapshot_cache, priority, files=files).start()
    archive.announce(await solved(directory.work, node.peer_id, node.config.identity_path, log.info))
    node.spawn(archive.run(), essential=True)
