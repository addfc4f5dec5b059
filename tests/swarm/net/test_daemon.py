"""What is kept of calls that hivemind answers, and what is said where its daemon does not start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest
from hivemind.p2p import P2P, P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from peer.errors import UserError
from peer.swarm.net.daemon import NodeConfig, RunningTasks, explain_join_failure, start_daemon


async def test_a_call_that_is_cancelled_leaves_nothing_in_hivemind():
    control = await ControlClient.create(None, Multiaddr("/unix/nowhere"), use_persistent_conn=False)
    begun, answered = asyncio.Queue(), asyncio.Event()

    async def handler(_data, _remote):
        begun.put_nowait(None)
        await answered.wait()
        return b""

    async def read(reader):
        await control._read_from_persistent_conn(reader)

    control.unary_handlers["x"] = handler
    control._handler_tasks = RunningTasks()
    reader = asyncio.StreamReader()
    reading = asyncio.ensure_future(read(reader))
    calls = [uuid4() for _ in range(3)]
    for call in calls:
        request = p2pd_pb2.CallUnaryRequest(peer=b"\x12\x20" + bytes(32), proto="x", data=b"")
        _feed(reader, call, requestHandling=request)
    for _ in calls:
        await begun.get()
    assert len(control._handler_tasks) == 3
    ended = list(control._handler_tasks.values())
    for call in calls[:2]:
        _feed(reader, call, cancel=p2pd_pb2.Cancel())
    await asyncio.wait(ended[:2])
    await asyncio.sleep(0)
    assert list(control._handler_tasks) == calls[2:]
    answered.set()
    await asyncio.wait(ended)
    assert len(control._handler_tasks) == 0
    reader.feed_eof()
    await reading


def _feed(reader, call, **content):
    message = p2pd_pb2.PersistentConnectionResponse(callId=call.bytes, **content).SerializeToString()
    size, prefix = len(message), b""
    while size >= 0x80:
        prefix, size = prefix + bytes([size & 0x7F | 0x80]), size >> 7
    reader.feed_data(prefix + bytes([size]) + message)


@pytest.mark.parametrize(("said", "remedy"), [
    ("listen unix /tmp/atoll-0/p2pd-x.sock: bind: read-only file system", "set TMPDIR"),
    ("failed to listen on any addresses: [listen tcp4 8.8.8.8:0: bind: cannot assign]", "check --host-maddrs"),
    ("exit status 2", "set GOLOG_LOG_LEVEL=info"),
])  # fmt: skip
async def test_the_remedy_fits_what_the_daemon_says(monkeypatch, said, remedy):
    async def fail(**_):
        raise P2PDaemonError(f"Daemon failed to start: {said}")

    monkeypatch.setattr(P2P, "create", fail)
    with pytest.raises(UserError, match="the libp2p daemon did not start") as refused:
        await start_daemon(NodeConfig(identity_path=Path("key"), host_maddrs=()), "key")
    assert refused.value.hint.startswith(remedy)


@pytest.mark.parametrize(("ahead_s", "words"), [(4.2, "4 s ahead of"), (-3600.4, "3,600 s behind")])
def test_a_clock_that_differs_is_told_with_how_much_and_the_limit(ahead_s, words):
    told = f"local time must be within 3 seconds  of others(local: {9000 + ahead_s:.5f}, peer: {9000:.5f})"
    error = explain_join_failure(RuntimeError(told), ("/ip4/127.0.0.1/tcp/1",))
    assert error.render().startswith(f"atoll: this machine's clock is {words} the swarm's; at most 3 s are allowed\n")
