"""The end of a stream between two real hosts: what was said last arrives, over each transport."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from peer.protocol.wire import MAX_MESSAGE_BYTES, AbortMessage, Kind
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.round.persistent_group import abort_stream
from peer.swarm.runtime.timing import STANDARD

NAME = "atoll/test/endings"
TIMES = 20
BODY = bytes(range(256)) * 256  # more than a stream's staging buffer would hide


@pytest.fixture(params=["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"], ids=["tcp", "quic"])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    made: list[Node] = []
    try:
        for name in ("one", "two"):
            known = made[0].maddrs[:1] if made else ()
            made.append(await start_node(NodeConfig(
                identity_path=tmp_path / name, host_maddrs=(request.param,), initial_peers=known, nat_port_map=False,
            )))  # fmt: skip
        yield made[0], made[1]
    finally:
        await asyncio.gather(*(node.close() for node in made))


async def test_an_answer_arrives_after_the_handler_has_returned(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    returning = asyncio.Queue[None]()

    async def answer(stream: FrameStream) -> None:
        await stream.receive({Kind.REQUEST: 0})
        await stream.send(Kind.DATA, BODY)
        await stream.send(Kind.END)
        returning.put_nowait(None)

    async def greet(stream: FrameStream) -> None:
        await stream.send(Kind.END)

    await one.serve(NAME, "test", answer)
    await one.serve(f"{NAME}/greet", "test", greet)
    for _ in range(TIMES):
        asking = await two.open(one.peer_id, NAME, "test")
        await asking.send(Kind.REQUEST)
        await returning.get()
        greeted = await two.open(one.peer_id, f"{NAME}/greet", "test")  # whatever the daemons do at the end is done
        await greeted.receive({Kind.END: 0})
        greeted.close()
        assert await asking.receive({Kind.DATA: len(BODY)}) == (Kind.DATA, BODY)
        assert await asking.receive({Kind.END: 0}) == (Kind.END, b"")
        asking.close()


async def test_what_a_member_said_before_it_left_its_group_arrives(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    may_read, heard = asyncio.Event(), asyncio.Queue[bytes]()

    async def listen(stream: FrameStream) -> None:
        await may_read.wait()
        _, body = await stream.receive({Kind.DATA: len(BODY)})
        assert (await stream.receive({Kind.ABORT: MAX_MESSAGE_BYTES}))[0] is Kind.ABORT
        heard.put_nowait(body)

    await one.serve(NAME, "test", listen)
    for _ in range(TIMES):
        stream = await two.open(one.peer_id, NAME, "test")
        await stream.send(Kind.DATA, BODY)
        leaving = asyncio.ensure_future(abort_stream(stream, AbortMessage(reason="the round is over"), STANDARD))
        may_read.set()
        assert await heard.get() == BODY
        await leaving
        may_read.clear()


@pytest.mark.parametrize("name", ["0OIl", "1", "z" * 40, "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"])
async def test_a_name_that_nobody_has_cannot_be_reached_and_the_daemon_goes_on(
    nodes: tuple[Node, Node], name: str
) -> None:
    """Any leader can name one, and it is asked for."""
    one, two = nodes

    async def answer(stream: FrameStream) -> None:
        await stream.send(Kind.END)

    await one.serve(NAME, "test", answer)
    with pytest.raises(StreamClosedError, match="cannot be reached"):
        await two.open(name, NAME, "test", 3.0)
    asking = await two.open(one.peer_id, NAME, "test")
    assert await asking.receive({Kind.END: 0}) == (Kind.END, b"")
    asking.close()


async def test_a_daemon_that_does_not_heed_the_end_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = await start_node(NodeConfig(
        identity_path=tmp_path / "one", host_maddrs=("/ip4/127.0.0.1/tcp/0",), nat_port_map=False,
        timing=replace(STANDARD, daemon_end_s=0.2),
    ))  # fmt: skip
    node.p2p._child.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{node.p2p._child.pid}/stat")
    while stat.read_text().rpartition(") ")[2][0] != "T":  # a busy machine stops its threads one after the other
        await asyncio.sleep(0.01)
    await asyncio.wait_for(node.close(), 20.0)
    assert node.p2p._child.returncode == -signal.SIGKILL
    assert "the libp2p daemon does not end within 0.2 s: it is killed" in caplog.text
