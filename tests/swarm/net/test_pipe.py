from __future__ import annotations

import asyncio
import os
import socket

import pytest

from peer.swarm.net.pipe import DIRECT_BYTES, STAGING_BYTES, ZeroCopyProtocol
from tests.swarm.uvlooped import run_case, run_on_uvloop

BODY = os.urandom(3 * STAGING_BYTES + 17)


async def pair():
    """A plain socket's writer, and a pipe at the other end."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    return writer, ZeroCopyProtocol.adopt(*await asyncio.open_connection(sock=theirs))


async def read(pipe, length):
    out = bytearray(length)
    await asyncio.wait_for(pipe.read_into(memoryview(out)), 10.0)
    return bytes(out)


async def reads_of_every_size():
    writer, pipe = await pair()
    writer.write(BODY)
    sizes = [1, 12, DIRECT_BYTES - 1, DIRECT_BYTES, 5, STAGING_BYTES + 1, 0]
    sizes.append(len(BODY) - sum(sizes))
    assert b"".join([await read(pipe, size) for size in sizes]) == BODY
    writer.close()
    assert not await pipe.read_some()
    pipe.close()


async def what_the_reader_holds_already_is_not_lost():
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, other = await asyncio.open_connection(sock=theirs, limit=STAGING_BYTES)
    writer.write(BODY)
    await reader.readexactly(100)  # it has taken much more from the socket by now: as much as its limits allow
    while len(reader._buffer) < 2 * STAGING_BYTES - 100:
        await asyncio.sleep(0)
    pipe = ZeroCopyProtocol.adopt(reader, other)
    assert await read(pipe, len(BODY) - 100) == BODY[100:]
    pipe.close()
    writer.close()


async def an_end_in_the_middle_is_an_error():
    writer, pipe = await pair()
    writer.write(b"12345")
    writer.close()
    with pytest.raises(EOFError, match="after 5 of 6 bytes"):
        await read(pipe, 6)
    writer, pipe = await pair()
    reading = asyncio.ensure_future(read(pipe, 2 * DIRECT_BYTES))
    writer.write(bytes(DIRECT_BYTES))
    await writer.drain()
    writer.close()
    with pytest.raises(EOFError, match=f"after {DIRECT_BYTES} of {2 * DIRECT_BYTES} bytes"):
        await reading


async def writing_heeds_the_pace_of_the_reader():
    one, two = socket.socketpair()
    left = ZeroCopyProtocol.adopt(*await asyncio.open_connection(sock=one))
    right = ZeroCopyProtocol.adopt(*await asyncio.open_connection(sock=two))

    async def send():
        for start in range(0, len(BODY), 4096):
            left.write(memoryview(BODY)[start : start + 4096])
            await left.drain()
        left.write(bytes(8 << 20))
        await left.drain()
        return "sent"

    sending = asyncio.ensure_future(send())
    done, _ = await asyncio.wait({sending}, timeout=0.05)
    assert not done  # nobody reads: the socket and the staging buffer are full
    assert await read(right, len(BODY)) == BODY
    assert await read(right, 8 << 20) == bytes(8 << 20)
    assert await sending == "sent"
    right.close()

    async def flood():
        for _ in range(1000):
            left.write(bytes(65536))
            await left.drain()
            await asyncio.sleep(0)

    with pytest.raises(OSError, match=r"closed|pipe|reset"):
        await flood()


async def a_connection_that_broke_before_it_was_adopted_is_an_error():
    for broken in (True, False):
        ours, theirs = socket.socketpair()
        reader, other = await asyncio.open_connection(sock=theirs)
        other.write(b"never read")
        ours.send(b"12")
        ours.close()  # with something unread: the other end sees a reset
        await reader.readexactly(2)
        while broken and reader.exception() is None and not reader.at_eof():
            await asyncio.sleep(0)
        pipe = ZeroCopyProtocol.adopt(reader, other)
        with pytest.raises((ConnectionResetError, EOFError)):
            await asyncio.wait_for(pipe.read_into(memoryview(bytearray(1))), 2.0)
        pipe.close()


CASES = [
    reads_of_every_size, what_the_reader_holds_already_is_not_lost, an_end_in_the_middle_is_an_error,
    writing_heeds_the_pace_of_the_reader, a_connection_that_broke_before_it_was_adopted_is_an_error,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_pipe(case):
    run_case(asyncio.new_event_loop(), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_pipe_on_uvloop(case):
    run_on_uvloop(case)
