"""Direct connections between real hosts: who comes in, who does not, and what happens where an endpoint is shut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer.protocol.wire import DirectEndpoint, DirectMessage, DirectRequest, EntryMessage, Kind
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.direct import DIRECT_NAME, DirectTransport
from peer.swarm.net.direct_listener import MAX_ARRIVING_OF_HOST
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.stream import FrameStream, StreamClosedError, Traffic
from peer.swarm.net.tls import client_side, server_side

NAME = "atoll/test/direct"
BODY = os.urandom(3 << 20)


async def _start(tmp_path: Path, name: str, known: tuple[str, ...] = (), port: int | None = 0) -> Node:
    return await start_node(NodeConfig(
        identity_path=tmp_path / name, host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=known, nat_port_map=False,
        direct_port=port, check_identity=False,
    ))  # fmt: skip


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    """`two` opens streams to `one`, which answers with what it was sent."""
    one = await _start(tmp_path, "one")
    two = await _start(tmp_path, "two", one.maddrs[:1])
    for node in (one, two):
        await node.serve(NAME, "test", _echo)
    try:
        yield one, two
    finally:
        await asyncio.gather(one.close(), two.close())


async def _echo(stream: FrameStream) -> None:
    _, name = await stream.receive({Kind.REQUEST: 100})
    assert name.decode() == stream.remote  # the asking peer names itself: the endpoint must know it
    _, body = await stream.receive({Kind.DATA: len(BODY)})
    await stream.send(Kind.DATA, body)


async def _ask(node: Node, other: Node) -> bool:
    """Send BODY there and back; whether that went past libp2p."""
    stream = await node.open(other.peer_id, NAME, "test", bulk=True)
    try:
        await stream.send(Kind.REQUEST, node.peer_id.encode())
        await stream.send(Kind.DATA, BODY)
        _, body = await stream.receive({Kind.DATA: len(BODY)})
        assert body == BODY
        return stream.direct
    finally:
        stream.close()


def _transport(node: Node) -> DirectTransport:
    assert node.direct is not None
    return node.direct


def _shut(node: Node) -> None:
    """Nobody comes in any more."""
    for task in _transport(node)._tasks:
        task.cancel()


async def test_what_is_large_goes_past_libp2p_and_the_endpoint_knows_who_comes(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    assert await _ask(two, one)
    assert await _ask(one, two)
    small = await two.open(one.peer_id, NAME, "test")
    assert not small.direct
    small.close()
    assert two.traffic["test"].received >= 2 * len(BODY)


async def test_a_peer_that_has_started_again_has_another_endpoint(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    one, _ = nodes
    endpoints = []
    for _ in range(2):
        other = await _start(tmp_path, "other", one.maddrs[:1])
        try:
            await other.serve(NAME, "test", _echo)
            assert await _ask(one, other)
            endpoints.append(_transport(one)._endpoints[other.peer_id])
        finally:
            await other.close()
    assert endpoints[0].fingerprint != endpoints[1].fingerprint
    assert endpoints[0].token != endpoints[1].token


async def test_behind_a_closed_endpoint_the_other_comes_through_the_askers(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    _shut(two)
    assert await _ask(one, two)
    assert two.peer_id not in _transport(one)._endpoints
    assert await _ask(two, one)


async def test_without_any_endpoint_it_goes_through_libp2p(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    _shut(one)
    _shut(two)
    now, transport = 1000.0, _transport(one)
    transport._clock = lambda: now
    for seconds in (60.0, 120.0, 240.0):
        assert not await _ask(one, two)
        assert transport._shut[two.peer_id] == (now + seconds, seconds)
        assert not await _ask(one, two)  # not tried again so soon
        assert transport._shut[two.peer_id] == (now + seconds, seconds)
        now += seconds
    _transport(two).listener.listen(("/ip4/127.0.0.1/tcp/0",), 0)
    assert await _ask(one, two)
    assert two.peer_id not in transport._shut


async def test_with_a_peer_that_knows_no_direct_connections_it_goes_through_libp2p(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    one, _ = nodes
    plain = await _start(tmp_path, "plain", one.maddrs[:1], port=None)
    try:
        await plain.serve(NAME, "test", _echo)
        assert not await _ask(one, plain)
        assert not await _ask(plain, one)
    finally:
        await plain.close()


async def test_a_peer_that_is_refused_finds_no_way_in(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    assert await _ask(two, one)  # it has a token
    one.refuses = lambda peer_id: peer_id == two.peer_id
    with pytest.raises(StreamClosedError):
        await _ask(two, one)


async def test_whoever_shows_another_certificate_hears_no_token(nodes: tuple[Node, Node]) -> None:
    """Somebody who has taken over the port cannot pass for the peer, nor learn what would let it in."""
    one, two = nodes
    assert await _ask(two, one)
    endpoint = _transport(two)._endpoints[one.peer_id]
    context, _ = server_side()
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(1000))
        writer.close()

    impostor = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = impostor.sockets[0].getsockname()[1]
    _transport(two)._endpoints[one.peer_id] = endpoint.model_copy(update={"port": port})
    assert await _ask(two, one)  # asked again, one told its true endpoint
    assert _transport(two)._endpoints[one.peer_id] == endpoint
    impostor.close()
    await impostor.wait_closed()
    assert not heard


async def test_behind_endpoints_that_say_nothing_it_goes_through_libp2p(nodes: tuple[Node, Node]) -> None:
    """As a proxy does that takes every connection: `open` has ten seconds in all."""
    one, two = nodes
    assert await _ask(two, one)
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60.0), "127.0.0.1", 0)
    for node in nodes:
        _transport(node).listener.port = silent.sockets[0].getsockname()[1]
    _transport(two)._endpoints.clear()
    assert not await _ask(two, one)
    silent.close()


async def test_who_comes_and_says_it_did_not_leaves_no_connection_behind(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    left: asyncio.Queue[ZeroCopyProtocol] = asyncio.Queue()

    async def answer(stream: FrameStream) -> None:
        request = await stream.receive_message(Kind.DIRECT, DirectRequest)
        if request.endpoint is not None:
            entry = EntryMessage(token=request.endpoint.token, ticket=request.ticket)
            left.put_nowait(await _transport(two)._through(one.peer_id, request.endpoint, entry))
        await stream.send_message(Kind.DIRECT, DirectMessage())

    two._handlers[DIRECT_NAME] = "direct", answer
    assert not await _ask(one, two)
    with pytest.raises(EOFError):
        await asyncio.wait_for((await left.get()).read_into(memoryview(bytearray(1))), 5.0)


@pytest.mark.parametrize("said", ["no TLS", "an unknown token", "an unknown name"])
async def test_a_client_that_says_the_wrong_thing_is_disconnected(nodes: tuple[Node, Node], said: str) -> None:
    one, two = nodes
    assert await _ask(two, one)
    endpoint = _transport(two)._endpoints[one.peer_id]
    if said == "no TLS":
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < 100  # an alert, and the end
        writer.close()
    else:
        entry = EntryMessage(token=endpoint.token, name="atoll/nothing")
        if said == "an unknown token":
            entry = EntryMessage(token="0" * 64, name=NAME)
        assert await _entered(endpoint, entry) is (said == "an unknown name")
    assert await _ask(two, one)


async def _entered(endpoint: DirectEndpoint, entry: EntryMessage) -> bool:
    """Whether the endpoint opens; then it must shut again at once, for there is nothing behind."""
    pipe = ZeroCopyProtocol()
    await asyncio.get_running_loop().create_connection(lambda: pipe, "127.0.0.1", endpoint.port, ssl=client_side())
    stream = FrameStream("somebody", pipe, Traffic())
    await stream.send_message(Kind.DIRECT, entry)
    try:
        await stream.receive({Kind.DIRECT: 0})
    except StreamClosedError:
        return False
    with pytest.raises(StreamClosedError):
        await stream.receive({Kind.DATA: 0})
    return True


async def test_many_that_say_nothing_hold_up_nobody_for_long(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    assert await _ask(two, one)
    port = _transport(one).listener.port
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_ARRIVING_OF_HOST)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""  # one too many is closed unheard
    writer.close()
    assert await _ask(two, one)  # while they wait: two's endpoint is open, and so is libp2p
    for _, held in silent:
        held.close()


async def test_strangers_from_elsewhere_are_closed_before_any_handshake(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    port = _transport(one).listener.port
    assert await _closed_at_once(port, "127.0.0.1")  # no peer has been told of the endpoint
    assert await _ask(two, one)
    assert not await _closed_at_once(port, "127.0.0.1")
    assert await _closed_at_once(port, "127.0.0.2")


async def _closed_at_once(port: int, host: str) -> bool:
    """Whether a connection from this address ends before it could say anything; TLS would answer a client's hello."""
    connecting = asyncio.open_connection("127.0.0.1", port, ssl=client_side(), local_addr=(host, 0))
    try:
        _, writer = await connecting
    except (ConnectionError, ssl.SSLError):
        return True
    writer.close()
    return False


async def test_old_tls_is_not_spoken(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    assert await _ask(two, one)
    context = client_side()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await asyncio.open_connection("127.0.0.1", _transport(one).listener.port, ssl=context)
