"""Production `Node`s without libp2p: every stream is a socket pair, and all hosts live in one loop."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from hivemind.p2p import P2PDaemonError

from peer.protocol.identity import Identity
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.node import Node
from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.stream import FrameStream, Traffic
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.virtual_time import now

CONFIG = NodeConfig(identity_path=Path("identity.key"), host_maddrs=())


async def stream_pair(left="left", right="right"):
    """Two ends of one stream; `left` is who the first end talks to."""
    ours, theirs = socket.socketpair()
    one, two = await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)
    return FrameStream(left, ZeroCopyProtocol.adopt(*one), Traffic()), FrameStream(
        right, ZeroCopyProtocol.adopt(*two), Traffic()
    )


class MemoryP2P:
    """The two calls of hivemind's P2P that a node makes."""

    def __init__(self, network, peer_id):
        self._network, self._peer_id = network, peer_id
        self.handlers, self.context = {}, None

    async def add_binary_stream_handler(self, name, handler):
        self.handlers[name], self.context = handler, contextvars.copy_context()  # in that of its machine

    async def call_binary_stream_handler(self, peer_id, name):
        network, remote = self._network, self._network.hosts.get(str(peer_id))
        if remote is None or name not in remote.handlers:
            raise P2PDaemonError(f"failed to dial {peer_id}")
        if network.lines is None:
            ours, theirs = socket.socketpair()
        else:
            ours, theirs = await network.lines.connect(str(self._peer_id), str(peer_id))
        info, handler = SimpleNamespace(peer_id=self._peer_id), remote.handlers[name]
        reader, writer = await network.spawn(self._opened(theirs), remote.context)
        network.spawn(handler(info, reader, writer), remote.context)
        return info, *await self._opened(ours)

    async def _opened(self, sock):
        reader, writer = await asyncio.open_connection(sock=sock)
        self._network.writers.append(writer)
        return reader, writer


def retime(node, **durations):
    """Let one peer wait so long from now on."""
    node.config = replace(node.config, timing=replace(node.timing, **durations))


class EmptyDHT:
    """A DHT that answers, and holds nothing."""

    async def get(self, *_, **__):
        return None

    async def store(self, *_, **__):
        return True


class MemoryNetwork:
    """All hosts of one test.

    Attributes:
        timing, clock: of the nodes that are made from now on.
        lines: `Lines` between the hosts; None: they never go down.
    """

    def __init__(self, timing=STANDARD, clock=now, lines=None):
        self.timing, self.clock, self.lines = timing, clock, lines
        self.hosts, self.nodes, self.tasks, self.writers = {}, [], set(), []

    def node(self, identity=None, dht=None):
        """A node that the others can reach."""
        identity = identity or Identity.generate()
        p2p = MemoryP2P(self, identity.peer_id)
        self.hosts[identity.peer_id] = p2p
        config = replace(CONFIG, timing=self.timing)
        self.nodes.append(Node(config, identity, p2p, dht or EmptyDHT(), (), clock=self.clock))
        return self.nodes[-1]

    def retime(self, **durations):
        """Let all peers wait so long: what is made for them from now on, and most of what is there."""
        self.timing = replace(self.timing, **durations)
        for node in self.nodes:
            retime(node, **durations)

    def cut(self, peer_id):
        """Nobody can open a stream to this peer any more."""
        del self.hosts[peer_id]

    def spawn(self, work, context=None):
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def close(self):
        await cancel_and_wait(self.tasks.union(*(node._tasks for node in self.nodes)))
        for writer in self.writers:
            writer.close()
