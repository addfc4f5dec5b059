"""`atoll doctor`: whether this machine will do, before it joins."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from peer.errors import UserError
from peer.protocol.address import PeerAddress, parse_peer_address
from peer.protocol.manifest import RunManifest
from peer.run.rented import detect_announce_maddrs, detect_direct_port
from peer.settings import (
    PeerSettings,
    add_setting_flags,
    load_settings,
    setting_overrides,
)
from peer.system.finding import Finding

DESCRIPTION = """\
Check this machine, and its way to the swarm at MULTIADDR if one is given: Python and packages, device and memory
against the run's model, disk, clock, bandwidth, latency, whether others can reach it, /dev/shm, locks, open files.
Each line is pass, warn (it works, but worse) or fail, with what to do. `atoll join` makes the same checks."""

EPILOG = """\
examples:
  atoll doctor
  atoll doctor /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
  atoll doctor ADDR --device cuda --host-maddrs /ip4/0.0.0.0/tcp/31338
  atoll doctor ADDR --json

Exit code: 0 if a peer can run, 2 if a check failed."""
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
PIPE_COLUMNS = 10_000


def add_doctor_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine will do",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("addresses", nargs="*", metavar="MULTIADDR", help="address of the bootstrap, or of any peer")
    add_setting_flags(parser)
    parser.set_defaults(execute=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    settings = load_settings(setting_overrides(arguments), arguments.config, os.environ)
    addresses = [parse_peer_address(address) for address in arguments.addresses]
    logging.basicConfig(level=logging.CRITICAL)
    found = []
    for finding in all_findings(settings, addresses):
        found.append(finding)
        if not settings.json_lines:
            _show(finding)
    worst = [finding.check for finding in found if finding.level == "fail"]
    if settings.json_lines:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        warned = sum(finding.level == "warn" for finding in found)
        print(f"cannot run: {', '.join(worst)}" if worst else f"this machine will do ({warned} warnings)")
    sys.stdout.flush()
    return 2 if worst else 0


def all_findings(settings: PeerSettings, addresses: Sequence[PeerAddress]) -> Iterator[Finding]:
    """Every check, the cheap ones first; those of a swarm only where its address answers."""
    from peer.run.checks import address_finding, disk_finding, machine_findings

    local = list[Finding]()
    for finding in machine_findings(settings, os.environ):
        local.append(finding)
        yield finding
    from peer.run.device_checks import device_finding, run_findings

    yield device_finding(settings)
    if not addresses:
        yield disk_finding(settings.output_dir, 0, settings.data_cache_gb * 1e9)
        return
    answered = address_finding(addresses)
    yield answered
    if answered.level == "fail" or any(each.level == "fail" for each in local if each.check in ("ports", "provider")):
        return
    try:
        manifest, found = asyncio.run(_examine_swarm(settings, addresses))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    yield from found
    if manifest is not None:
        yield from run_findings(settings, manifest)


async def _examine_swarm(
    settings: PeerSettings, addresses: Sequence[PeerAddress]
) -> tuple[RunManifest | None, list[Finding]]:
    """Under a passing identity: the manifest that the swarm hands out, and what its line is like."""
    from peer.swarm.net.daemon import NodeConfig
    from peer.swarm.net.manifests import ManifestSearch
    from peer.swarm.net.node_start import start_node
    from peer.swarm.net.probe import examine
    from peer.swarm.runtime.tasks import end_on_signals, hush_foreign_noise

    end_on_signals()
    asyncio.get_running_loop().set_exception_handler(hush_foreign_noise)
    with tempfile.TemporaryDirectory(prefix="atoll-doctor-") as folder:
        config = NodeConfig(
            identity_path=Path(folder) / "identity.key", host_maddrs=settings.host_maddrs,
            announce_maddrs=settings.announce_maddrs or detect_announce_maddrs(settings.host_maddrs, os.environ),
            initial_peers=tuple(str(address) for address in addresses), nat_port_map=settings.nat_port_map,
            client_mode=settings.client_mode, direct_port=settings.direct_port if settings.direct else None,
            mapped_port=detect_direct_port(settings.direct_port, os.environ),
        )  # fmt: skip
        try:
            node = await start_node(config)
        except UserError as error:
            check = "clock" if "clock" in error.what else "swarm"
            return None, [Finding(check=check, level="fail", text=error.what, advice=error.hint)]
        try:
            try:
                sealed = await ManifestSearch(node, settings.run_id, settings.run).run()
            except UserError as error:
                run = Finding(check="run", level="fail", text=error.what, advice=error.hint)
                return None, [run, *await examine(node)]
            manifest = sealed.manifest
            text = f"{manifest.name} ({manifest.run_id[:16]}), recipe {manifest.recipe.name}"
            return manifest, [Finding(check="run", level="pass", text=text), *await examine(node)]
        finally:
            await asyncio.wait({asyncio.ensure_future(node.close())}, timeout=node.timing.close_timeout_s)


def _show(finding: Finding) -> None:
    """Level, check and text in columns; a terminal wraps the text within its column, a pipe gets one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=4)
    table.add_column(width=13)
    table.add_column(overflow="fold")
    table.add_row(Text(finding.level, STYLES[finding.level]), Text(finding.check, "bold"), Text(finding.text))
    for advice in finding.advice.splitlines():
        table.add_row("", "", Text(advice, "dim"))
    console.print(table)
