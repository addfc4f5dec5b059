"""Puts the page together: a reader of the run, its history, the board, the server."""

from __future__ import annotations

import asyncio
import logging
import socket

from bootstrap.node import Bootstrap
from bootstrap.page.board import Board
from bootstrap.page.run_card import RunCard
from bootstrap.page.server import PageServer
from peer.explain.history import FILE_NAME, History
from peer.explain.swarm_state import SwarmState
from peer.swarm.observe.reader import SwarmReader

log = logging.getLogger(__name__)


def open_page(bootstrap: Bootstrap, listener: socket.socket, alone: bool) -> PageServer:
    """Serve the page of a running bootstrap at a listening socket, until it is closed.

    Args:
        alone: it has no other run.

    Raises:
        UserError: the history's file cannot be opened.
    """
    node, plan, chain = bootstrap.node, bootstrap.plan, bootstrap.history
    state = SwarmState(plan.recipe.num_fragments)
    if not plan.recipe.gossips:  # no stranger's claims count once members have made a round
        state.trusted = lambda peer_id: not chain.seen or chain.seen[peer_id] > 0
    card = RunCard(plan, node.peer_id, bootstrap.addresses, bootstrap.control, alone)
    history = History(chain.folder / FILE_NAME)
    board = Board(card, node, state, None if plan.recipe.gossips else chain, history)
    reader, new = SwarmReader(node, plan.manifest.run_id, bootstrap.directory, state), asyncio.Event()
    reader.changed = new.set

    node.spawn(reader.run())
    node.spawn(look_whenever(new, board))
    server = PageServer(board, listener)
    server.start()
    return server


async def look_whenever(new: asyncio.Event, board: Board) -> None:
    """Let the board look whenever the state has changed, until this is cancelled."""
    while True:
        await new.wait()
        new.clear()
        try:
            await board.look()
        except Exception:  # root of a task: the next look may see it right
            log.exception("the page could not be updated")
