"""Whether others can open connections to a host: the questions and answers, over a network in memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.utils.multiaddr import Multiaddr

from peer.errors import ProtocolError
from peer.protocol.records import parse_json
from peer.protocol.wire import Kind, ReachMessage, ReachRequest
from peer.swarm.net.reachability import GREETING, REACH_NAME, DialBackServer, accepts_connections, greets, tcp_ports
from peer.swarm.runtime.timing import STANDARD


async def listener(greeting: bytes = bytes([len(GREETING)]) + GREETING):
    """(a TCP server that says this to whoever connects, its port)"""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def seen_at(node, peer_id, *addresses):
    """Let the node's host see a connection of this peer from these addresses."""

    async def list_peers():
        return [SimpleNamespace(peer_id=peer_id, addrs=[Multiaddr(address) for address in addresses])]

    node.p2p.list_peers = list_peers


async def ask(network, *ports, addresses=("/ip4/127.0.0.1/tcp/1",)):
    helper, asker = network.node(), network.node()
    seen_at(helper, asker.peer_id, *addresses)
    await helper.serve(REACH_NAME, "reach", DialBackServer(helper.p2p, network.timing).answer)

    async def maddrs():
        return [f"/ip4/10.0.0.2/tcp/{port}" for port in ports]

    return await accepts_connections(asker.p2p, [helper.peer_id], maddrs, 1, network.timing)


async def test_a_host_that_answers_is_reached(network):
    server, port = await listener()
    async with server:
        assert await ask(network, port) is True


async def test_a_closed_port_is_not_reached(network):
    server, port = await listener()
    server.close()
    await server.wait_closed()
    assert await ask(network, port) is False


async def test_something_else_on_the_port_is_no_host(network):
    server, port = await listener(b"HTTP/1.1 200 OK, and so on, and so on\r\n")
    async with server:
        assert await ask(network, port) is False


async def test_only_where_the_asker_is_seen_is_dialled(network):
    server, port = await listener()
    async with server:
        assert await ask(network, port, addresses=("/ip4/127.0.0.2/tcp/1",)) is False
        assert not await greets("127.0.0.2", port, STANDARD)
        assert await greets("127.0.0.1", port, STANDARD)


async def test_nobody_who_can_say(network):
    network.retime(dial_back_pause_s=0.0)
    assert await ask(network, 1, addresses=()) is None


async def test_whoever_did_not_say_is_asked_again(network):
    network.retime(dial_back_pause_s=0.0)
    helper, asker = network.node(), network.node()
    answers = [ReachMessage(reached=False, tried=False), ReachMessage(reached=False, tried=True)]

    async def answer(stream):
        await stream.receive_message(Kind.REACH, ReachRequest)
        await stream.send_message(Kind.REACH, answers.pop(0))

    await helper.serve(REACH_NAME, "reach", answer)

    async def maddrs():
        return ["/ip4/10.0.0.2/tcp/4001"]

    assert await accepts_connections(asker.p2p, [helper.peer_id], maddrs, 1, network.timing) is False
    assert answers == []


def test_ports_come_from_addresses_that_can_be_dialled():
    addresses = ["/ip4/10.0.0.2/tcp/4001/p2p/12D3", "/ip4/1.2.3.4/tcp/4001", "/ip4/10.0.0.2/udp/4002/quic-v1"]
    assert tcp_ports([*addresses, "/ip4/1.2.3.4/tcp/77", "/unix/x"]) == (4001, 77)


@pytest.mark.parametrize("ports", ["[0]", "[65536]", "[1,2,3,4,5]", '["22"]'])
def test_requests_are_bounded(ports):
    with pytest.raises(ProtocolError):
        parse_json(ReachRequest, f'{{"ports": {ports}}}'.encode())
