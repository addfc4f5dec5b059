"""Requests to one peer over a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from peer.protocol.manifest import Spec
from peer.protocol.wire import Kind
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream


@contextlib.asynccontextmanager
async def open_request(
    node: Node, remote: str, name: str, purpose: str, request: Spec, *, timeout_s: float | None = None,
    bulk: bool = False,
) -> AsyncIterator[FrameStream]:  # fmt: skip
    """A stream to a peer with the request sent, to read the answer from; closed in the end.

    Args:
        name, purpose, timeout_s, bulk: as `Node.open` takes them.

    Raises:
        StreamClosedError: it cannot be reached.
    """
    stream = await node.open(remote, name, purpose, timeout_s, bulk)
    try:
        await stream.send_message(Kind.REQUEST, request)
        yield stream
    finally:
        stream.close()
