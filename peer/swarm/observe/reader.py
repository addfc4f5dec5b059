"""Reads a run without taking part: peer records and reports from the DHT, into a `SwarmState`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from peer.errors import ProtocolError, in_words
from peer.explain.report import PeerReport, open_report
from peer.explain.swarm_state import SwarmState
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest
from peer.protocol.records import SealedManifest
from peer.protocol.reports import reports_key
from peer.swarm.catchup.record_exchange import control_exchange
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.directory import Directory, read_records
from peer.swarm.net.gate import Gate
from peer.swarm.net.manifests import ManifestSearch
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.runtime.tasks import end_on_signals, hush_foreign_noise
from peer.swarm.state.run_control import RunControl, history_folder

log = logging.getLogger(__name__)
MAX_REPORTS = 512  # opened in one look


class SwarmReader:
    """Keeps a `SwarmState` new.

    Args:
        directory: follows the run; its `known` peers go first.

    Attributes:
        changed: called after each look.
    """

    def __init__(self, node: Node, run_id: str, directory: Directory, state: SwarmState) -> None:
        self._node, self._run_id, self._directory, self.state = node, run_id, directory, state
        self._opened: dict[str, tuple[bytes, PeerReport | None]] = {}
        self._read_at = float("-inf")
        self.changed: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Until it is cancelled: the directory as often as it reads itself, the reports half as often."""
        timing = self._node.timing
        while True:
            if (now := self._node.clock()) >= self._read_at + 2 * timing.refresh_period_s:
                await self._read_reports()
                self._read_at = now
            reports = {owner: report for owner, (_, report) in self._opened.items() if report is not None}
            self.state.take(self._directory.peers, reports)
            self.changed()
            await asyncio.sleep(timing.refresh_period_s)

    async def _read_reports(self) -> None:
        found = await read_records(self._node, reports_key(self._run_id)) or {}
        live = self._directory.peers
        wanted = sorted(found.keys() & live.keys(), key=lambda owner: not self._directory.known(owner))[:MAX_REPORTS]
        self._opened = {owner: self._open(owner, found[owner]) for owner in wanted}

    def _open(self, owner: str, blob: bytes) -> tuple[bytes, PeerReport | None]:
        before = self._opened.get(owner)
        if before is not None and before[0] == blob:
            return before
        try:
            return blob, open_report(blob, owner, self._run_id)[1]
        except ProtocolError as error:
            log.info("ignoring a report: %s", in_words(error))
            return blob, None


async def visit(address: str, identity_path: Path) -> Node:
    """A node that only watches. Raises UserError if nothing answers at the address."""
    return await start_node(NodeConfig(
        identity_path=identity_path, host_maddrs=("/ip4/0.0.0.0/tcp/0",), initial_peers=(address,),
        nat_port_map=False, client_mode=True, direct_port=None,
    ))  # fmt: skip


async def look_up(node: Node, found: SealedManifest, folder: Path) -> tuple[RunControl, Directory]:
    """What the organiser of a run has decided, kept in a folder of the visitor's; and who is in the run."""
    manifest = found.manifest
    control = RunControl.of(history_folder(folder, manifest.run_id), manifest, found.organiser)
    await control_exchange(node, manifest.run_id, control).hear(node.introducers)
    directory = Directory.of(node, manifest, Gate.of(manifest, found.organiser, control))
    await directory.refresh()
    return control, directory


class Visit(NamedTuple):
    """A node that only watches a run."""

    node: Node
    manifest: RunManifest
    control: RunControl
    reader: SwarmReader
    directory: Directory


@asynccontextmanager
async def visit_run(
    address: str, identity_path: Path, run_id: str | None = None, name: str | None = None
) -> AsyncIterator[Visit]:
    """Find the run at an address and read it until the context ends; the node announces no peer.

    Signals that end a process cancel the current task, so that the node is closed.

    Args:
        address: of a bootstrap or of any peer of the run.
        identity_path: a key, created if it is missing.
        run_id, name: of the run, where there are several.

    Raises:
        UserError: nothing answers there, or no manifest is found.
    """
    end_on_signals()
    asyncio.get_running_loop().set_exception_handler(hush_foreign_noise)
    node = await visit(address, identity_path)
    try:
        found = await ManifestSearch(node, run_id, name).run()
        manifest, (control, directory) = found.manifest, await look_up(node, found, identity_path.parent)
        await control_exchange(node, manifest.run_id, control).start()
        directory.follow()
        reader = SwarmReader(node, manifest.run_id, directory, SwarmState(RunPlan.of(manifest).recipe.num_fragments))
        node.spawn(reader.run(), essential=True)
        yield Visit(node, manifest, control, reader, directory)
    finally:
        await asyncio.wait({asyncio.ensure_future(node.close())}, timeout=node.timing.close_timeout_s)
