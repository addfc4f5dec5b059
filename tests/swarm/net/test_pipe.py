from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref

import pytest

from peer.swarm.net.pipe import DIRECT_BYTES, STAGING_BYTES, ZeroCopyProtocol
from peer.swarm.net.tls import client_side, server_side
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


async def connections_that_are_lost_are_freed_without_the_garbage_collector():
    loop, (context, _) = asyncio.get_running_loop(), server_side()
    gone = []

    async def fails(pipe):
        try:
            await pipe.read_into(memoryview(bytearray(1)))
        except (EOFError, OSError):
            return "as it must"

    def refuses(pipe):
        try:
            return pipe.write(b"3")
        except ConnectionResetError:
            return "as it must"

    async def lose(how):
        ours, theirs = socket.socketpair()
        pipes = [ZeroCopyProtocol(), ZeroCopyProtocol()]
        accepted = loop.connect_accepted_socket(lambda: pipes[0], theirs, ssl=context)
        made = loop.create_connection(lambda: pipes[1], sock=ours, ssl=client_side(), server_hostname="localhost")
        (stays, _), _ = await asyncio.gather(made, accepted)
        pipes[1].write(b"12")
        assert pipes[0].direct
        assert await read(pipes[0], 2) == b"12"
        waits = asyncio.ensure_future(fails(pipes[0]))
        await asyncio.sleep(0)
        stays.abort() if how == "killed" else pipes[1].close()
        assert await waits
        assert await fails(pipes[0])
        assert await fails(pipes[1])
        pipes[0].close()
        while not (pipes[0]._lost and pipes[1]._lost):
            await asyncio.sleep(0)
        for pipe in pipes:
            assert refuses(pipe)
            pipe.close()
        gone.extend(weakref.ref(pipe) for pipe in pipes)

    gc.collect()
    gc.disable()
    try:
        for number in range(10):
            await lose("killed" if number % 2 else "closed")
        while any(pipe() is not None for pipe in gone):
            await asyncio.sleep(0)
    finally:
        gc.enable()


CASES = [
    reads_of_every_size, what_the_reader_holds_already_is_not_lost, an_end_in_the_middle_is_an_error,
    writing_heeds_the_pace_of_the_reader, a_connection_that_broke_before_it_was_adopted_is_an_error,
    connections_that_are_lost_are_freed_without_the_garbage_collector,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_pipe(case):
    run_case(asyncio.new_event_loop(), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_pipe_on_uvloop(case):
    run_on_uvloop(case)
