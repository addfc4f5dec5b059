"""`atoll runs`: the runs that a rendezvous knows, to choose one from."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.protocol.address import parse_peer_address
from peer.system.exit_signals import exiting_on_signals

if TYPE_CHECKING:
    from peer.protocol.records import PeerRecord, SealedManifest
    from peer.swarm.net.node import Node

INTERRUPTED = 130
DESCRIPTION = """\
List the runs that the node at MULTIADDR knows: those that it hands out, and those in the DHT. Figures are what peers
sign of themselves."""
COLUMNS = ("run", "model", "recipe", "peers", "tokens/s", "loss", "round", "rounds", "state", "entry")


def add_runs_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser("runs", help="list the runs at an address", description=DESCRIPTION)
    parser.add_argument("address", metavar="MULTIADDR", help="of a bootstrap, a peer, or any node of a hivemind DHT")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    parser.set_defaults(execute=_runs)


def _runs(arguments: argparse.Namespace) -> int:
    address = parse_peer_address(arguments.address)
    with exiting_on_signals(INTERRUPTED):
        from rich.console import Console
        from rich.table import Table

        from peer.swarm.net.socket_folder import open_socket_folder
        from peer.system.preflight import check_reachable

    open_socket_folder()
    check_reachable([address])
    logging.basicConfig(level=logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="atoll-runs-") as folder:
        rows = asyncio.run(look(str(address), Path(folder)))
    if arguments.json:
        print("\n".join(json.dumps(row) for row in rows))
        return 0
    table = Table(*COLUMNS, box=None)
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in COLUMNS))
    Console().print(table if rows else "no run is known there")
    if rows:
        print(f"atoll join {address} --run NAME")
    return 0


async def look(address: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each run. Args: folder: for what a visitor keeps."""
    from peer.swarm.net.manifests import ManifestSearch
    from peer.swarm.observe.reader import visit
    from peer.swarm.runtime.tasks import end_on_signals, hush_foreign_noise

    end_on_signals()
    asyncio.get_running_loop().set_exception_handler(hush_foreign_noise)
    node = await visit(address, folder / "identity.key")
    try:
        search = ManifestSearch(node, None)
        found = await search.look()
        return [await _row(node, sealed, folder) for sealed in sorted(found, key=lambda one: one.owner)]
    finally:
        await asyncio.wait({asyncio.ensure_future(node.close())}, timeout=node.timing.close_timeout_s)


async def _row(node: Node, sealed: SealedManifest, folder: Path) -> dict[str, Any]:
    from peer.swarm.observe.reader import look_up

    manifest, (control, directory) = sealed.manifest, await look_up(node, sealed, folder)
    records = list(directory.peers.values())
    peers = [record for record in records if record.state != "finished"]  # an archive is, too
    model = manifest.model.pretrained or manifest.model.architecture or "a script's"
    return {
        "run": manifest.name, "model": model, "recipe": manifest.recipe.name, "peers": len(peers),
        "tokens/s": round(sum(record.tokens_per_s for record in peers), 1), "loss": _mean_loss(peers),
        "round": max((record.round for record in records), default=0), "rounds": control.rounds_total,
        "state": control.state,
        "entry": "invited" if manifest.trust.invited else manifest.trust.mode,
        "run_id": manifest.run_id, "organiser": sealed.organiser,
    }  # fmt: skip


def _mean_loss(peers: Sequence[PeerRecord]) -> float | None:
    losses = [record.loss for record in peers if record.loss is not None]
    return round(sum(losses) / len(losses), 4) if losses else None


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
