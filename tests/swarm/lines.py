"""The lines between the machines of a `MemoryNetwork`: any may be down for a while, and carries the rest afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections import Counter
from contextlib import contextmanager, suppress

CHUNK_BYTES = 1 << 16


class Lines:
    """Which lines are down, and what runs over the others.

    A machine's name stands for all its lines, a pair for the way from one machine to another.
    """

    def __init__(self):
        self._down, self._carrying, self._changed = Counter(), {}, asyncio.Event()

    def up(self, source, sink):
        """Whether bytes pass."""
        return not (self._down[source] or self._down[sink] or self._down[source, sink])

    @contextmanager
    def down(self, *places):
        """Nothing passes there meanwhile, and nothing is lost."""
        self._down.update(places)
        try:
            yield
        finally:
            self._down.subtract(places)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _clear(self, source, sink):
        while not self.up(source, sink):
            await self._changed.wait()

    async def connect(self, source, sink):
        """-> the ends of a new stream, a socket each, as soon as both ways are up."""
        await self._clear(source, sink)
        await self._clear(sink, source)
        ours, mine = socket.socketpair()
        theirs, other = socket.socketpair()
        carrying = self._carry_both(source, mine, sink, other)
        task = asyncio.get_running_loop().create_task(carrying, context=contextvars.Context())  # of no machine
        self._carrying[task] = {source, sink}
        task.add_done_callback(self._carrying.pop)
        return ours, theirs

    async def _carry_both(self, source, mine, sink, other):
        """Until one end closes."""
        near, far = await asyncio.open_connection(sock=mine), await asyncio.open_connection(sock=other)
        ways = [
            asyncio.ensure_future(self._carry(source, near[0], sink, far[1])),
            asyncio.ensure_future(self._carry(sink, far[0], source, near[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            near[1].close()
            far[1].close()

    async def _carry(self, source, reader, sink, writer):
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._clear(source, sink)
                writer.write(data)
                await writer.drain()
            await self._clear(source, sink)  # that it closes is news as well

    async def break_off(self, machine):
        """All streams of a machine end at once, as when its processes are killed."""
        broken = [task for task, ends in self._carrying.items() if machine in ends]
        for task in broken:
            task.cancel()
        await asyncio.gather(*broken, return_exceptions=True)
