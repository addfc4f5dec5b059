"""What a node finds on its way to the swarm, and how the speed of a line is measured."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from google.protobuf.message import DecodeError
from hivemind.p2p import P2PHandlerError

from peer.protocol.wire import Kind
from peer.swarm.net import probe
from peer.swarm.net.probe import Ping, clock_finding, latency_finding, line_speed, reach_finding, speed_finding
from peer.swarm.net.speed import SERVED_AT_MOST, SIZES, SPEED_NAME, LineSpeed, SpeedServer
from peer.swarm.net.stream import StreamClosedError


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"), [(0.4, "pass", "ahead"), (-2.0, "warn", "behind"), (3.5, "fail", "ahead")]
)
def test_a_clock_that_is_off(ahead_s, level, words):
    finding = clock_finding(Ping(rtt_s=0.01, ahead_s=ahead_s))
    assert (finding.level, words in finding.text) == (level, True)
    assert finding.advice == ("" if level == "pass" else "Set it, by NTP: timedatectl set-ntp true")


def test_a_swarm_that_is_far():
    assert latency_finding(Ping(rtt_s=0.5, ahead_s=0.0)).level == "pass"
    far = latency_finding(Ping(rtt_s=0.6, ahead_s=0.0))
    assert (far.level, far.text, "nearer" in far.advice) == ("warn", "600.0 ms to the swarm and back", True)


def test_a_slow_line():
    assert speed_finding(LineSpeed(up=2e6, down=5e7)).level == "pass"
    slow = speed_finding(LineSpeed(up=1e6, down=5e7))
    assert (slow.level, slow.text) == ("warn", "1.0 Mbit/s up, 50.0 Mbit/s down: a slow line")
    assert "atoll plan" in slow.advice
    assert speed_finding(None).level == "pass"


@pytest.mark.parametrize(
    ("client", "reached", "level"),
    [(True, None, "warn"), (False, False, "warn"), (False, True, "pass"), (False, None, "pass")],
)
async def test_reachability(monkeypatch, client, reached, level):
    async def answer(*_):
        return reached

    monkeypatch.setattr(probe, "accepts_connections", answer)
    node = SimpleNamespace(client=client, p2p=None, introducers=(), maddrs=("/ip4/10.0.0.2/tcp/4001",), timing=None)
    finding = await reach_finding(node)
    assert (finding.level, "--host-maddrs" in finding.advice) == (level, level == "warn")
    assert client or "4001" in finding.text


@pytest.mark.parametrize("error", [P2PHandlerError("mine"), DecodeError("broken"), TimeoutError()], ids=repr)
async def test_a_ping_ends_quietly_whatever_its_answer_raises(error):
    async def rpc_ping(_):
        raise error

    protocol = SimpleNamespace(node_info=None, get_stub=lambda _: SimpleNamespace(rpc_ping=rpc_ping))
    node = SimpleNamespace(dht=SimpleNamespace(protocol=protocol), timing=SimpleNamespace(dht_timeout_s=1.0))
    assert await probe.ping(node, "12D3KooWGekoMmCizPeSWJfpZ1o8188qycJNG11Ra8gft7Bpsft7") is None


async def test_a_swarm_that_answers_no_ping(network):
    finding, = await probe.examine(network.node())
    assert (finding.level, finding.text) == ("warn", "the swarm answers no ping")


async def serving(network, **timing):
    network.retime(**timing)
    server = network.node()
    await server.serve(SPEED_NAME, "speed", SpeedServer(network.timing, server.clock).answer)
    return server


async def test_as_much_comes_back_as_was_sent_and_both_directions_are_timed(network):
    server, asker = await serving(network), network.node()
    ticks = iter([0.0, 0.1, 0.2, 1.0, 1.1, 1.2, 2.0, 2.5, 4.5])
    asker.clock = lambda: next(ticks)
    assert await line_speed(asker, server.peer_id, rtt_s=0.1) == LineSpeed(up=8 * SIZES[2] / 0.4, down=8 * SIZES[2] / 2)
    traffic = asker.traffic["speed"]
    assert traffic.sent == traffic.received == sum(SIZES) + 12 * len(SIZES)


async def test_a_slow_line_is_measured_with_few_bytes(network):
    server, asker = await serving(network), network.node()
    ticks = iter([0.0, 0.5, 1.0])
    asker.clock = lambda: next(ticks)
    assert await line_speed(asker, server.peer_id, rtt_s=0.0) == LineSpeed(up=2 * 8 * SIZES[0], down=2 * 8 * SIZES[0])


async def test_a_peer_measures_for_each_newcomer_once_and_for_few_in_all(network):
    server = await serving(network)
    first, *others = (network.node() for _ in range(SERVED_AT_MOST + 1))
    assert await line_speed(first, server.peer_id, 0.0) is not None
    assert await line_speed(first, server.peer_id, 0.0) is None
    measured = [await line_speed(other, server.peer_id, 0.0) is not None for other in others]
    assert measured == [True] * (SERVED_AT_MOST - 1) + [False]


async def test_a_measurement_that_does_not_end_gives_its_place_back(network):
    server, asker = await serving(network, speed_s=0.2), network.node()
    stream = await asker.open(server.peer_id, SPEED_NAME, "speed")
    await stream.send(Kind.SPEED, bytes(10))
    assert await stream.receive({Kind.SPEED: 10}) == (Kind.SPEED, bytes(10))
    busy = await network.node().open(server.peer_id, SPEED_NAME, "speed")
    assert await busy.receive({Kind.BUSY: 0}) == (Kind.BUSY, b"")
    await asyncio.wait_for(stream.closed(), 5.0)
    assert await line_speed(network.node(), server.peer_id, 0.0) is not None


async def test_more_bytes_than_agreed_are_refused_unread(network):
    server, asker = await serving(network), network.node()
    stream = await asker.open(server.peer_id, SPEED_NAME, "speed")
    await stream.send(Kind.SPEED, bytes(SIZES[0] + 1))
    with pytest.raises(StreamClosedError):
        await stream.receive({Kind.SPEED: SIZES[1]}, timeout_s=5.0)
    assert server.traffic["speed"].received == 0
