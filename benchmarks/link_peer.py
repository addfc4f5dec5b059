"""The process of one peer of `benchmarks.links`: sends to the other one over a node's streams, or over plain TCP."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TextIO, TypeVar

from benchmarks.member import MemberSetup, respond
from benchmarks.swarm_peer import run_peer
from peer.protocol.wire import Kind
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream

NAME = "atoll/benchmark/links"
PLAIN_PORT = 5001
FRAME_BYTES = 4 * 1024 * 1024
READ_BYTES = 1024 * 1024
T = TypeVar("T")


class LinkPeer:
    """One end of the link. Its methods run in a thread beside the main thread's loop.

    Args:
        setup: `numel` bytes go over the link in each transfer; peer 0 sends.
        node: the network.
        loop: its loop.
    """

    def __init__(self, setup: MemberSetup, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._setup, self._node, self._loop = setup, node, loop
        self._body = os.urandom(FRAME_BYTES)
        self._other = ""
        self.work: dict[str, Callable[[Any], Any]] = {"prepare": self._prepare, "meet": self._meet, "send": self._send}

    async def start(self) -> None:
        """Listen."""
        await self._node.serve(NAME, "benchmark", self._receive)
        await asyncio.start_server(_count, "0.0.0.0", PLAIN_PORT)

    def _prepare(self, _: Any) -> str:
        return self._node.peer_id

    def _meet(self, peer_ids: Sequence[str]) -> None:
        self._other = peer_ids[1 - self._setup.index]

    def _send(self, given: dict[str, Any]) -> float | None:
        """Seconds for all bytes to be there over `streams` streams, or over plain TCP to `plain` if that is given."""
        if self._setup.index:
            return None
        share = self._setup.numel // given["streams"]
        return self._wait(self._all(given, share))

    async def _all(self, given: dict[str, Any], share: int) -> float:
        began = time.monotonic()
        plain = given["plain"]
        works = [
            self._plain(plain, share) if plain else self._stream(share, given["direct"])
            for _ in range(given["streams"])
        ]
        await asyncio.gather(*works)
        return time.monotonic() - began

    async def _stream(self, share: int, direct: bool) -> None:
        stream = await self._node.open(self._other, NAME, "benchmark", bulk=direct)
        for start in range(0, share, FRAME_BYTES):
            await stream.send(Kind.DATA, memoryview(self._body)[: min(FRAME_BYTES, share - start)])
        await stream.send(Kind.END)
        await stream.receive({Kind.END: 0})
        stream.close()

    async def _plain(self, host: str, share: int) -> None:
        reader, writer = await asyncio.open_connection(host, PLAIN_PORT)
        for start in range(0, share, FRAME_BYTES):
            writer.write(memoryview(self._body)[: min(FRAME_BYTES, share - start)])
            await writer.drain()
        writer.write_eof()
        await reader.read()
        writer.close()

    async def _receive(self, stream: FrameStream) -> None:
        buffer = memoryview(bytearray(FRAME_BYTES))
        while True:
            kind, length = await stream.receive_header({Kind.DATA: FRAME_BYTES, Kind.END: 0})
            if kind is Kind.END:
                break
            await stream.receive_body(buffer[:length])
        await stream.send(Kind.END)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._setup.timeout_s)


async def _count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(READ_BYTES):
        pass
    writer.close()


async def start(setup: MemberSetup, node: Node, answers: TextIO) -> Callable[[], None]:
    """See `run_peer`."""
    peer = LinkPeer(setup, node, asyncio.get_running_loop())
    await peer.start()
    return lambda: respond(node.maddrs[0], peer.work, answers)


if __name__ == "__main__":
    run_peer(start)
