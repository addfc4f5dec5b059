"""What the Atoll peers of the benchmarks have in common: a process that is set up as an agent's is, with a node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TextIO

import torch
import uvloop

from benchmarks.member import MemberSetup, parse_setup
from peer.outer.recipe.resolve import swarm_recipe
from peer.protocol.manifest import RecipeSpec
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.runtime.malloc import trim_malloc_arenas
from peer.swarm.runtime.tasks import use_few_threads
from peer.system.death_signal import children_die_with_us, die_with_parent

RUN = "b" * 64
RECIPE = swarm_recipe(RecipeSpec(name="opendiloco"))
TOKENS = 1000
CLOSE_TIMEOUT_S = 2.0
Start = Callable[[MemberSetup, Node, TextIO], Awaitable[Callable[[], None]]]


def run_peer(start: Start) -> None:
    """The whole process of a peer.

    Args:
        start: (setup, node, where to answer) -> what answers the parent until it has had enough; that runs in a
            thread, the node in the main thread's loop.
    """
    die_with_parent(os.getppid())
    children_die_with_us()
    trim_malloc_arenas()
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    uvloop.install()
    asyncio.run(_run(start))


async def _run(start: Start) -> None:
    use_few_threads()
    setup, answers = parse_setup()
    node = await start_node(
        NodeConfig(
            identity_path=Path(setup.folder) / f"{setup.index}.key",
            host_maddrs=(setup.host,),
            initial_peers=(setup.first,) if setup.first else (),
            nat_port_map=False,
            direct_port=0,
        )
    )
    try:
        await asyncio.to_thread(await start(setup, node, answers))
    finally:
        await asyncio.wait({asyncio.ensure_future(node.close())}, timeout=CLOSE_TIMEOUT_S)
