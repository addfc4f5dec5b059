"""`atoll-bootstrap`: start a run that others can join with one address."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootstrap.genesis import GenesisBuild
from peer.errors import UserError
from peer.protocol.address import parse_host_address, parse_peer_address
from peer.protocol.manifest import RunManifest, read_manifest
from peer.swarm.net.keys import check_identity
from peer.swarm.net.stale_sockets import sweep_stale_sockets
from peer.system.death_signal import children_die_with_us
from peer.system.gc_pause import starting
from peer.system.preflight import check_host_ports, check_output_dir, check_reachable, lock_identity

if TYPE_CHECKING:
    from bootstrap.node import Bootstrap

log = logging.getLogger("bootstrap")
STATUS_PERIOD_S = 10.0
CLOSE_TIMEOUT_S = 3.0

DESCRIPTION = """\
Start a run: build the initial model of MANIFEST, listen under a persistent identity, publish the signed manifest in
the DHT, and print the command to join it. The bootstrap never trains. If it goes offline, members continue to train;
restart it with the same --identity-path and they reconnect."""

EPILOG = """\
examples:
  atoll-bootstrap configs/runs/quickstart.yaml
  atoll-bootstrap run.yaml --host-maddrs /ip4/0.0.0.0/tcp/31337 --announce-maddrs /ip4/203.0.113.7/tcp/31337"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of `atoll-bootstrap`."""
    parser = argparse.ArgumentParser(
        prog="atoll-bootstrap",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("manifest", type=Path, metavar="MANIFEST", help="YAML file that describes the run")
    add(
        "--host-maddrs",
        nargs="+",
        default=["/ip4/0.0.0.0/tcp/31337"],
        metavar="ADDR",
        help="where to listen (default: /ip4/0.0.0.0/tcp/31337; port 0: any free port)",
    )
    add("--announce-maddrs", nargs="+", default=[], metavar="ADDR", help="addresses at which others reach this node")
    add("--initial-peers", nargs="+", default=[], metavar="ADDR", help="other bootstrap nodes or peers of the same run")
    state_dir = Path("runs/bootstrap")
    add("--state-dir", type=Path, default=state_dir, metavar="DIR", help=f"identity and genesis (default: {state_dir})")
    add("--identity-path", type=Path, metavar="FILE", help="private key (default: identity.key in the state folder)")
    add("--no-nat-port-map", action="store_true", help="do not ask the router to forward the port (UPnP)")
    add("--json", action="store_true", help="print the address and then every status as one JSON object a line")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Console entry: exit code 0 after Ctrl-C or SIGTERM, 2 on a user's error."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_serve(arguments))
    except UserError as error:
        print(error.render("atoll-bootstrap"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(0)


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    children_die_with_us()
    sweep_stale_sockets()
    manifest = _check_arguments(arguments)
    identity_path = arguments.identity_path or arguments.state_dir / "identity.key"
    with lock_identity(identity_path):
        check_identity(identity_path)
        check_host_ports(arguments.host_maddrs)
        opening = asyncio.ensure_future(_start(arguments, manifest, identity_path))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await _give_up(opening)
            return
        bootstrap = opening.result()
        bootstrap.node.spawn(_stop_with_daemon(bootstrap, stop))
        try:
            _print_address(bootstrap, arguments.json)
            await _report_until(stop, bootstrap, arguments.json)
        finally:
            await asyncio.wait({asyncio.ensure_future(bootstrap.node.close())}, timeout=CLOSE_TIMEOUT_S)


def _check_arguments(arguments: argparse.Namespace) -> RunManifest:
    manifest = read_manifest(arguments.manifest)
    for address in (*arguments.host_maddrs, *arguments.announce_maddrs):
        parse_host_address(address)
    for address in arguments.initial_peers:
        parse_peer_address(address)
    check_output_dir(arguments.state_dir, "state_dir")
    return manifest


async def _start(arguments: argparse.Namespace, manifest: RunManifest, identity_path: Path) -> Bootstrap:
    if arguments.initial_peers:
        await asyncio.to_thread(check_reachable, [parse_peer_address(address) for address in arguments.initial_peers])
    building = GenesisBuild(manifest, arguments.manifest, arguments.state_dir)
    await building.start()
    with starting():  # torch and hivemind take seconds to import; the checks before need neither
        from bootstrap.node import start_bootstrap
        from peer.swarm.net.daemon import NodeConfig

    genesis = await building.finish()
    config = NodeConfig(
        identity_path=identity_path,
        host_maddrs=tuple(arguments.host_maddrs),
        announce_maddrs=tuple(arguments.announce_maddrs),
        initial_peers=tuple(arguments.initial_peers),
        nat_port_map=not arguments.no_nat_port_map,
    )
    return await start_bootstrap(config, genesis, arguments.state_dir, random.Random())


async def _give_up(opening: asyncio.Task[Bootstrap]) -> None:
    """Cancel the start of the node; what it had started has ended when this returns."""
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError, UserError):
        bootstrap = await opening
        await asyncio.wait({asyncio.ensure_future(bootstrap.node.close())}, timeout=CLOSE_TIMEOUT_S)


async def _stop_with_daemon(bootstrap: Bootstrap, stop: asyncio.Event) -> None:
    log.error("this node ends: %s", await bootstrap.node.closed())
    stop.set()


def _print_address(bootstrap: Bootstrap, as_json: bool) -> None:
    manifest, addresses = bootstrap.manifest, bootstrap.addresses
    if as_json:
        start = {"run": manifest.name, "run_id": manifest.run_id, "addresses": addresses}
        say(json.dumps({"event": "started", **start}))
        return
    from peer.outer.recipe.resolve import trust_in_words  # imported by now, see _start

    others = [f"  or       atoll join {address}" for address in addresses[1:]]
    lines = [
        f"run      {manifest.name}  ({manifest.run_id[:16]}, genesis {str(manifest.genesis)[:16]})",
        f"trust    {trust_in_words(manifest)}",
        f"join     atoll join {addresses[0]}",
        *others,
        "Ctrl-C ends this node; members continue to train.",
    ]
    say("\n".join(lines))


def say(text: str) -> None:
    """Print. If the reader of standard output has exited, the node continues: the swarm needs it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("standard output is closed; this node continues, and ends on Ctrl-C or SIGTERM")


async def _report_until(stop: asyncio.Event, bootstrap: Bootstrap, as_json: bool) -> None:
    """One status line whenever the swarm changes, at most every ten seconds."""
    shown = ""
    while not stop.is_set():
        peers = bootstrap.directory.peers
        rounds = max((record.round for record in peers.values()), default=0)
        speed = sum(record.tokens_per_s for record in peers.values())
        status = f"{len(peers)} peers, round {rounds}"
        if as_json:
            figures = {"peers": len(peers), "round": rounds, "tokens_per_s": speed}
            say(json.dumps({"event": "status", **figures}))
        elif status != shown:
            say(f"{status}, {speed:.0f} tokens/s")
            shown = status
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), STATUS_PERIOD_S)


if __name__ == "__main__":
    main()
