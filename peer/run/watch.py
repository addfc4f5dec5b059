"""`atoll watch`: a run in a terminal, from anywhere, without training."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.errors import UserError
from peer.protocol.address import PeerAddress, parse_peer_address
from peer.system.exit_signals import exiting_on_signals

if TYPE_CHECKING:
    from peer.run.watch_view import WatchView

INTERRUPTED = 130
DESCRIPTION = """\
Watch the run at MULTIADDR (its bootstrap, or any of its peers) without training: loss, place and pace of the run, its
peers, and its rounds in the words of `atoll rounds`. What is shown is what peers sign and publish themselves. Ctrl-C
ends it. Where the output is no terminal, one line is printed whenever the run moves on."""

EPILOG = """\
examples:
  atoll watch /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
  atoll watch ADDR --once --json | python -m json.tool
  atoll watch ADDR --json >> run.jsonl"""


def add_watch_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser(
        "watch", help="watch a run without training", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("address", metavar="MULTIADDR", help="address of the bootstrap, or of any peer")
    add("--run", metavar="NAME", help="watch the run of this name, where the address has several")
    add("--run-id", metavar="ID", help="watch only this run; unset: the only one there")
    add("--once", action="store_true", help="show the run once, as soon as its peers are known, and exit")
    add("--json", action="store_true", help="print JSON, one object a line: the newest figures, all peers, new events")
    parser.set_defaults(execute=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    address = parse_peer_address(arguments.address)
    with exiting_on_signals(INTERRUPTED):
        from rich.console import Console

        from peer.swarm.net.socket_folder import open_socket_folder
        from peer.system.preflight import check_reachable

    open_socket_folder()
    check_reachable([address])
    logging.basicConfig(level=logging.CRITICAL)
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="atoll-watch-") as folder:
            return asyncio.run(_follow(arguments, address, Path(folder) / "identity.key", console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0


async def _follow(arguments: argparse.Namespace, address: PeerAddress, identity: Path, console: object) -> int:
    from rich.console import Console
    from rich.live import Live

    from peer.run.watch_view import WatchView
    from peer.swarm.observe.reader import visit_run

    assert isinstance(console, Console)
    async with visit_run(str(address), identity, arguments.run_id, arguments.run) as visit:
        closed = asyncio.ensure_future(visit.node.closed())
        view, changed = WatchView(visit.manifest, visit.reader.state, visit.control), asyncio.Event()
        visit.reader.changed = changed.set
        try:
            if arguments.json:
                await _until(closed, changed, view, lambda: print(json.dumps(view.news()), flush=True), arguments.once)
            elif arguments.once:
                await _until(closed, changed, view, lambda: console.print(view), once=True)
            elif console.is_terminal:
                with Live(view, console=console, screen=True, auto_refresh=False) as live:
                    await _until(closed, changed, view, lambda: live.update(view, refresh=True))
            else:
                await _until(closed, changed, view, lambda: _print_news(view))
            return 0
        finally:
            closed.cancel()


async def _until(
    closed: asyncio.Future[str], changed: asyncio.Event, view: WatchView, show: Callable[[], object],
    once: bool = False,
) -> None:  # fmt: skip
    """Show each new state, until the node ends; `once`: when the reader has looked for the second time.

    Raises:
        UserError: the node broke.
    """
    looks = 0
    while not closed.done():
        changing = asyncio.ensure_future(changed.wait())
        ends: list[asyncio.Future[Any]] = [changing, closed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        changing.cancel()
        changed.clear()
        view.take()
        looks += 1
        if not once:
            show()
        elif looks >= 3 or (looks >= 2 and view.state.events):  # reports come with the second look
            show()
            return
    raise UserError(f"the node that watches has ended: {closed.result()}", "Start it again.")


def _print_news(view: WatchView) -> None:
    for event in view.fresh_events():
        print(f"round {event.round}: {event.headline}", flush=True)
    if (line := view.line()) is not None:
        print(line, flush=True)
