"""One bootstrap node, from its checks to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from bootstrap.folders import LOCK_NAME, run_folder
from bootstrap.genesis import GenesisBuild
from bootstrap.page.listening import listen, parse_place, url_of
from peer.base_folder import read_organisers
from peer.errors import UserError
from peer.protocol.address import Reach, parse_host_address, parse_peer_address, reach_of
from peer.protocol.manifest import RunManifest
from peer.protocol.records import MAX_RUNS
from peer.swarm.net.keys import check_identity
from peer.swarm.net.socket_folder import open_socket_folder
from peer.swarm.runtime.tasks import hush_foreign_noise
from peer.system.death_signal import children_die_with_us
from peer.system.exit_signals import ending_signals
from peer.system.file_lock import lock_folder
from peer.system.gc_pause import starting
from peer.system.preflight import (
    check_host_ports,
    check_output_dir,
    check_reachable,
    check_shared_memory,
    lock_identity,
)
from peer.telemetry.process_log import log_file

if TYPE_CHECKING:
    from bootstrap.node import Bootstrap
    from bootstrap.page.server import PageServer

log = logging.getLogger("bootstrap")
LOG_NAME = "node.log"
STATUS_PERIOD_S = 10.0
CLOSE_TIMEOUT_S = 3.0
REACHES = {
    Reach.LAN: "peers of this network alone; for others, forward the port and give "
    "--announce-maddrs /ip4/PUBLIC_IP/tcp/PORT",
    Reach.LOOPBACK: "peers on this machine alone; for others, give --host-maddrs /ip4/0.0.0.0/tcp/31337",
}


def run(arguments: argparse.Namespace) -> int:
    """Open the run and serve it until a signal comes; -> exit code.

    Raises:
        UserError: anything that a person can mend.
    """
    manifests = _check_arguments(arguments)
    check_shared_memory()
    open_socket_folder()
    check_output_dir(arguments.state_dir, "state_dir")
    if arguments.archive is not None:
        check_output_dir(arguments.archive, "archive")
    listeners = _listen(arguments.http, len(manifests))
    identity_path = arguments.identity_path or arguments.state_dir / "identity.key"
    children_die_with_us()
    archive = arguments.archive
    with (
        lock_folder(archive, "archive", "archive.lock") if archive is not None else contextlib.nullcontext(),
        lock_identity(identity_path),
        lock_folder(arguments.state_dir, "state_dir", LOCK_NAME),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,  # its children run the hook of the line above
    ):
        logging.getLogger().addHandler(log_file(arguments.state_dir / LOG_NAME))
        check_identity(identity_path)
        check_host_ports(arguments.host_maddrs)
        return runner.run(_serve(arguments, manifests, identity_path, listeners))


def _check_arguments(arguments: argparse.Namespace) -> list[RunManifest]:
    manifests = [read_organisers(path, arguments.base) for path in arguments.manifests]
    names = [manifest.name for manifest in manifests]
    if len(names) > MAX_RUNS:
        raise UserError(f"{len(names)} manifests; one node serves {MAX_RUNS} runs at most", "start another node")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two manifests have the name {twice}", "peers choose a run by its name: change one")
    if len(names) > 1 and arguments.base is not None:
        raise UserError("--from goes with one manifest", "name the folder as `pretrained: ./DIR` in a manifest")
    if arguments.push_to_hub is not None and arguments.archive is None:
        raise UserError("--push-to-hub uploads the state that an archive keeps", "give --archive DIR, too")
    if arguments.push_to_hub is not None and len(names) > 1:
        raise UserError(f"--push-to-hub names one repository, and these are {len(names)} runs", "start a node for each")
    if arguments.push_every < 1:
        raise UserError(f"--push-every {arguments.push_every}: must be at least 1", "so many rounds, such as 100")
    for address in (*arguments.host_maddrs, *arguments.announce_maddrs):
        parse_host_address(address)
    for address in arguments.initial_peers:
        parse_peer_address(address)
    return manifests


def _listen(place: str | None, runs: int) -> list[socket.socket]:
    """A listening socket for the page of each run, at ports that follow each other."""
    if place is None:
        return []
    host, port = parse_place(place)
    return [listen((host, port + number if port else 0)) for number in range(runs)]


async def _serve(
    arguments: argparse.Namespace, manifests: Sequence[RunManifest], identity_path: Path,
    listeners: Sequence[socket.socket],
) -> int:  # fmt: skip
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(hush_foreign_noise)
    if arguments.initial_peers:
        await asyncio.to_thread(check_reachable, [parse_peer_address(address) for address in arguments.initial_peers])
    building = []
    for path, manifest in zip(arguments.manifests, manifests, strict=True):
        folder = run_folder(arguments.state_dir, manifest.name, alone=len(manifests) == 1)
        folder.mkdir(exist_ok=True)
        build = GenesisBuild(manifest, path, folder, base=arguments.base, new_run=arguments.new_run)
        building.append((build, folder))
    for build, _ in building:
        await build.start()
    with starting():  # torch and hivemind take seconds to import; the checks before need neither
        import bootstrap.node  # noqa: F401
    for number in ending_signals():  # until here a signal has ended this process at once
        loop.add_signal_handler(number, stop.set)
    opening = asyncio.ensure_future(_open(arguments, building, identity_path))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await _give_up(opening)
        return 0
    return await _serve_until(stop, opening.result(), arguments.json, listeners)


async def _open(
    arguments: argparse.Namespace, building: Sequence[tuple[GenesisBuild, Path]], identity_path: Path
) -> list[Bootstrap]:
    from bootstrap.archive import ArchivePlace
    from bootstrap.node import start_bootstraps
    from peer.swarm.net.daemon import NodeConfig

    opened = [(await build.finish(), folder) for build, folder in building]
    config = NodeConfig(
        identity_path=identity_path,
        host_maddrs=tuple(arguments.host_maddrs),
        announce_maddrs=tuple(arguments.announce_maddrs),
        initial_peers=tuple(arguments.initial_peers),
        nat_port_map=not arguments.no_nat_port_map,
    )
    place = arguments.archive
    archive = place and ArchivePlace(place, arguments.push_to_hub, arguments.push_every)
    return await start_bootstraps(config, opened, random.Random(), archive)


async def _give_up(opening: asyncio.Task[list[Bootstrap]]) -> None:
    """Cancel the start of the node; what it had started has ended when this returns."""
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError, UserError):
        node = (await opening)[0].node
        await asyncio.wait({asyncio.ensure_future(node.close())}, timeout=CLOSE_TIMEOUT_S)


async def _serve_until(
    stop: asyncio.Event, bootstraps: Sequence[Bootstrap], as_json: bool, listeners: Sequence[socket.socket]
) -> int:
    """Print the address, then the swarms' changes, until the node is stopped or broken; -> exit code."""
    node = bootstraps[0].node
    closed = asyncio.ensure_future(node.closed())
    closed.add_done_callback(lambda _: stop.set())
    pages: list[PageServer] = []
    try:
        for bootstrap, listener in zip(bootstraps, listeners, strict=False):
            from bootstrap.page.open import open_page

            pages.append(open_page(bootstrap, listener, alone=len(bootstraps) == 1))
        urls = {place: url_of(listener) for place, listener in enumerate(listeners)}
        for place, bootstrap in enumerate(bootstraps):
            _print_address(bootstrap, as_json, urls.get(place), alone=len(bootstraps) == 1)
        if not as_json:
            say("Ctrl-C ends this node; members continue to train.")
        await asyncio.gather(*(_report_until(stop, one, as_json, len(bootstraps) == 1) for one in bootstraps))
        if closed.done():
            log.error("this node ends: %s", closed.result())
        return int(closed.done())
    finally:
        closed.cancel()
        ending = [node.close(), *(page.close() for page in pages)]
        await asyncio.wait(map(asyncio.ensure_future, ending), timeout=CLOSE_TIMEOUT_S)


def _print_address(bootstrap: Bootstrap, as_json: bool, url: str | None, alone: bool) -> None:
    manifest, addresses = bootstrap.manifest, bootstrap.addresses
    if as_json:
        start = {"run": manifest.name, "run_id": manifest.run_id, "addresses": addresses}
        say(json.dumps({"event": "started", **start, **({"page": url} if url else {})}))
        return
    lines = [
        f"run      {manifest.name}  ({manifest.run_id[:16]}, genesis {str(manifest.genesis)[:16]})",
        f"trust    {bootstrap.plan.in_words()}",
        *join_lines(addresses, bootstrap.node.config.announce_maddrs, None if alone else manifest.name),
        *([f"page     {url}"] if url else []),
    ]
    say("\n".join(lines))


def join_lines(addresses: Sequence[str], announced: Sequence[str], run: str | None = None) -> list[str]:
    """The command with which others join, for each address, and who is reached where that is not everyone.

    Args:
        addresses: at least one, the widest reach first.
        announced: those that the organiser has named.
        run: to be named, where the node has several.
    """
    first, *others = addresses
    named = f" --run {run}" if run is not None else ""
    lines = [f"join     atoll join {first}{named}", *(f"  or       atoll join {other}{named}" for other in others)]
    reach = reach_of(first)
    return lines if announced or reach is Reach.PUBLIC else [*lines, f"reaches  {REACHES[reach]}"]


def say(text: str) -> None:
    """Print. If the reader of standard output has exited, the node continues: the swarm needs it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("standard output is closed; this node continues, and ends on Ctrl-C or SIGTERM")


async def _report_until(stop: asyncio.Event, bootstrap: Bootstrap, as_json: bool, alone: bool) -> None:
    """One status line whenever the swarm changes, at most every ten seconds."""
    shown, rounds, name = "", 0, bootstrap.manifest.name
    while not stop.is_set():
        peers = bootstrap.directory.peers
        rounds = max((record.round for record in peers.values()), default=rounds)
        speed = sum(record.tokens_per_s for record in peers.values())
        status = f"{len(peers)} {'peer' if len(peers) == 1 else 'peers'}, round {rounds}"
        if as_json:
            figures = {"peers": len(peers), "round": rounds, "tokens_per_s": speed}
            say(json.dumps({"event": "status", **({} if alone else {"run": name}), **figures}))
        elif status != shown:
            say(f"{'' if alone else name + ': '}{status}, {speed:.0f} tokens/s")
            shown = status
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), STATUS_PERIOD_S)
