from __future__ import annotations

import asyncio

import pytest

from peer.errors import ProtocolError
from peer.protocol.wire import HEADER_BYTES, MAX_MESSAGE_BYTES, HelloMessage, Kind, pack_header
from peer.swarm.net import node as node_module
from peer.swarm.net.stream import WRITE_BYTES, StreamClosedError, StreamTimeoutError
from tests.swarm.gathering import until
from tests.swarm.network import stream_pair


@pytest.fixture
async def pair():
    one, two = await stream_pair()
    yield one, two
    one.close()
    two.close()


def raw(stream, data):
    stream._pipe.write(data)


async def test_frames_arrive_whole_and_in_order(pair):
    one, two = pair
    bodies = [b"", b"x", bytes(range(256)) * 10, b"y" * WRITE_BYTES, b"z" * (3 * WRITE_BYTES + 1)]

    async def send():
        for body in bodies:
            await one.send(Kind.DATA, body)
        await one.send(Kind.END)

    sending = asyncio.ensure_future(send())
    for body in bodies:
        assert await two.receive({Kind.DATA: 10**6, Kind.END: 0}) == (Kind.DATA, body)
    assert await two.receive({Kind.DATA: 10**6, Kind.END: 0}) == (Kind.END, b"")
    await sending
    total = sum(HEADER_BYTES + len(body) for body in (*bodies, b""))
    assert (one.traffic.sent, one.traffic.received) == (total, 0)
    assert (two.traffic.sent, two.traffic.received) == (0, total)


async def test_every_slice_but_the_first_waits_for_what_is_between(pair):
    one, two = pair
    body, asked, go = bytes(range(256)) * (3 * WRITE_BYTES // 256) + b"end", [], asyncio.Semaphore(0)

    async def between():
        asked.append(one.sending)
        await go.acquire()

    sending = asyncio.ensure_future(one.send(Kind.DATA, body, between))
    assert await two.receive_header({Kind.DATA: 10**6}) == (Kind.DATA, len(body))
    received = memoryview(bytearray(len(body)))
    for number in range(3):
        first = number * WRITE_BYTES
        await two._pipe.read_into(received[first : first + WRITE_BYTES])
        await until(lambda number=number: len(asked) == number + 1, 10.0)
        assert two._pipe._first == two._pipe._last
        go.release()
    await two._pipe.read_into(received[3 * WRITE_BYTES :])
    await sending
    assert (bytes(received), asked, one.sending) == (body, [True] * 3, False)
    await one.send(Kind.DATA, b"x" * WRITE_BYTES, between)
    assert len(asked) == 3


@pytest.mark.parametrize("sent", [b"", pack_header(Kind.CONTRIBUTION, 50) + bytes(49)])
async def test_a_frame_that_does_not_come_in_time_says_so(pair, sent):
    one, two = pair
    raw(one, sent)
    with pytest.raises(StreamTimeoutError, match=r"^right: sent nothing for 0\.05 s$") as caught:
        await asyncio.wait_for(two.receive({Kind.CONTRIBUTION: 50}, timeout_s=0.05), 5.0)
    assert isinstance(caught.value, StreamClosedError)


async def test_an_end_that_does_not_read_in_time_says_so(pair):
    one, _ = pair
    with pytest.raises(StreamTimeoutError, match=r"^left: did not read for 0\.05 s$"):
        await asyncio.wait_for(one.send(Kind.DATA, bytes(1 << 24), timeout_s=0.05), 5.0)
    assert one.sending  # nothing more can be said on it


async def test_what_several_frames_take_together_is_bounded(pair):
    one, two = pair

    async def two_frames():
        async with two.within(0.05, "did not end"):
            await two.receive({Kind.END: 0})
            await two.receive({Kind.END: 0})

    await one.send(Kind.END)
    with pytest.raises(StreamTimeoutError, match=r"^right: did not end for 0\.05 s$"):
        await asyncio.wait_for(two_frames(), 5.0)


async def test_a_message_survives(pair):
    one, two = pair
    message = HelloMessage(group_id="a" * 64)
    await one.send_message(Kind.HELLO, message)
    assert await two.receive_message(Kind.HELLO, HelloMessage) == message


async def test_a_malformed_message_is_a_protocol_error(pair):
    one, two = pair
    await one.send(Kind.HELLO, b'{"group_id":"A"}')
    with pytest.raises(ProtocolError, match="malformed HelloMessage"):
        await two.receive_message(Kind.HELLO, HelloMessage)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (pack_header(Kind.CONTRIBUTION, 101), "announces 101 bytes of CONTRIBUTION; the limit is 100"),
        (pack_header(Kind.CONTRIBUTION, 2**31), "announces 2147483648 bytes of CONTRIBUTION"),
        (pack_header(Kind.VOTE, 1), "sent VOTE; expected CONTRIBUTION or ABORT"),
        (b"ATL1\x07\0\0\0\xff\xff\xff\xff", "the limit is 2147483648"),
        (b"GET / HTTP/1", "not an Atoll frame"),
        (b"ATL1\x63" + bytes(7), "unknown frame kind 99"),
    ],
)
async def test_limits_hold_before_a_byte_of_the_body_is_read(pair, header, reason):
    one, two = pair
    raw(one, header)  # no body follows: whoever waited for it would hang
    with pytest.raises(ProtocolError, match=reason):
        await two.receive({Kind.CONTRIBUTION: 100, Kind.ABORT: MAX_MESSAGE_BYTES})
    assert two.traffic.received == 0


async def test_exact_means_neither_more_nor_less(pair):
    one, two = pair
    await one.send(Kind.CONTRIBUTION, bytes(100))
    assert await two.receive({Kind.CONTRIBUTION: 100}, exact=True) == (Kind.CONTRIBUTION, bytes(100))
    raw(one, pack_header(Kind.CONTRIBUTION, 99))
    with pytest.raises(ProtocolError, match="announces 99 bytes"):
        await two.receive({Kind.CONTRIBUTION: 100}, exact=True)


HEADER = pack_header(Kind.CONTRIBUTION, 50)


@pytest.mark.parametrize("sent", [b"", HEADER[:-1], HEADER + bytes(49)])
async def test_an_end_at_any_place_is_a_closed_stream(pair, sent):
    one, two = pair
    raw(one, sent)
    one.close()
    with pytest.raises(StreamClosedError, match=r"right: stream ended") as caught:
        await two.receive({Kind.CONTRIBUTION: 100})
    assert caught.value.remote == "right"
    assert two.traffic.received == 0


async def test_sending_to_a_closed_stream_is_noticed(pair):
    one, two = pair
    two.close()

    async def flood():
        for _ in range(100):
            await one.send(Kind.DATA, bytes(WRITE_BYTES))

    with pytest.raises(StreamClosedError, match="left"):
        await flood()
    with pytest.raises(StreamClosedError):
        await one.send(Kind.END)
    one.close()
    one.close()


async def test_closed_waits_for_the_end_and_refuses_data(pair):
    one, two = pair
    waiting = asyncio.ensure_future(two.closed())
    await asyncio.wait({waiting}, timeout=0.01)
    assert not waiting.done()
    one.close()
    await asyncio.wait_for(waiting, 5.0)
    one, two = await stream_pair()
    await one.send(Kind.END)
    with pytest.raises(ProtocolError, match="out of turn"):
        await two.closed()
    one.close()
    two.close()


async def test_a_node_counts_traffic_by_purpose_and_closes_streams_after_their_handler(network):
    one, two = network.node(), network.node()
    heard = []

    async def handler(stream):
        heard.append((stream.remote, await stream.receive({Kind.DATA: 10})))

    await two.serve("name", "round", handler)
    stream = await one.open(two.peer_id, "name", "round")
    await stream.send(Kind.DATA, b"12345")
    await asyncio.wait_for(stream.closed(), 5.0)
    assert heard == [(one.peer_id, (Kind.DATA, b"12345"))]
    assert one.traffic["round"].sent == two.traffic["round"].received == HEADER_BYTES + 5


async def test_an_unreachable_peer_is_a_closed_stream(network):
    one, two = network.node(), network.node()
    with pytest.raises(StreamClosedError, match="cannot be reached"):
        await one.open(two.peer_id, "name", "round")


async def test_a_failing_handler_drops_its_own_stream_only(network, caplog):
    one, two = network.node(), network.node()
    failures = [RuntimeError("bug"), ProtocolError("bad bytes"), StreamClosedError("x", "gone"), TimeoutError()]

    async def handler(stream):
        await stream.receive({Kind.END: 0})
        if failures:
            raise failures.pop(0)
        await stream.send(Kind.END)

    await two.serve("name", "round", handler)
    for _ in range(4):
        stream = await one.open(two.peer_id, "name", "round")
        await stream.send(Kind.END)
        await asyncio.wait_for(stream.closed(), 5.0)
    stream = await one.open(two.peer_id, "name", "round")
    await stream.send(Kind.END)
    assert await stream.receive({Kind.END: 0}) == (Kind.END, b"")
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]  # the bug alone
    assert "dropped a stream: bad bytes" in caplog.text


async def answering(network):
    """-> (a node, a function: the stream of another node that it answers on, None where it has no place for it)."""
    server = network.node()

    async def handler(stream):
        await stream.send(Kind.END)
        await stream.closed()

    async def admitted(node):
        stream = await node.open(server.peer_id, "name", "round")
        try:
            await asyncio.wait_for(stream.receive({Kind.END: 0}), 5.0)
        except StreamClosedError:
            return None
        return stream

    await server.serve("name", "round", handler)
    return server, admitted


async def test_strangers_hold_no_place_of_those_that_take_part(network, monkeypatch):
    monkeypatch.setattr(node_module, "MAX_OF_STRANGERS", 2)
    server, admitted = await answering(network)
    *strangers, member = (network.node() for _ in range(4))
    server.strange = lambda peer_id: peer_id != member.peer_id
    assert [await admitted(one) is not None for one in (*strangers, member)] == [True, True, True, True]


async def test_a_stranger_that_has_said_something_keeps_its_place(network, monkeypatch):
    monkeypatch.setattr(node_module, "MAX_OF_STRANGERS", 2)
    server, heard = network.node(), []
    server.strange = lambda _: True

    async def handler(stream):
        heard.append(await stream.receive({Kind.REQUEST: 0}))
        await stream.send(Kind.END)
        await stream.closed()

    await server.serve("name", "round", handler)

    async def opened(says):
        stream = await network.node().open(server.peer_id, "name", "round")
        if not says:
            return stream
        await stream.send(Kind.REQUEST)
        try:
            assert (await asyncio.wait_for(stream.receive({Kind.END: 0}), 5.0))[0] is Kind.END
        except StreamClosedError:
            return None
        return stream

    talks, silent = await opened(says=True), await opened(says=False)
    assert talks is not None
    assert await opened(says=True) is not None
    with pytest.raises(StreamClosedError):
        await silent.receive({Kind.END: 0})
    assert await opened(says=True) is None  # both have said what they want
    assert len(heard) == 2


async def test_one_peer_cannot_hold_all_streams(network, monkeypatch):
    monkeypatch.setattr(node_module, "MAX_STREAMS_PER_PEER", 2)
    monkeypatch.setattr(node_module, "MAX_STREAMS", 3)
    server, admitted = await answering(network)
    greedy, second, third = (network.node() for _ in range(3))
    held = [await admitted(greedy), await admitted(greedy)]
    assert None not in held
    assert await admitted(greedy) is None
    assert await admitted(second) is not None
    assert await admitted(third) is None
    held[0].close()
    while server._streams.held(greedy.peer_id) == 2:
        await asyncio.wait(network.tasks, timeout=0.01)
    assert await admitted(greedy) is not None


async def test_the_stranger_with_the_most_streams_makes_room_for_one_that_has_none(network, monkeypatch):
    monkeypatch.setattr(node_module, "MAX_OF_STRANGERS", 4)
    server, node = network.node(), network.node()
    server.strange = lambda _: True

    async def handler(stream):
        await stream.receive({Kind.REQUEST: 0})
        await stream.send(Kind.END)
        await stream.closed()

    await server.serve("name", "round", handler)

    async def opened(node):
        stream = await node.open(server.peer_id, "name", "round")
        await stream.send(Kind.REQUEST)
        assert (await asyncio.wait_for(stream.receive({Kind.END: 0}), 5.0))[0] is Kind.END
        return stream

    crowd = [await opened(node) for _ in range(4)]
    others = [await opened(network.node()) for _ in range(3)]
    for stream in crowd[:3]:
        with pytest.raises(StreamClosedError):
            await asyncio.wait_for(stream.receive({Kind.END: 0}), 5.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(others[0].receive({Kind.END: 0}), 0.1)
