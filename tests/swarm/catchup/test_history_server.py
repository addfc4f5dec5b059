from __future__ import annotations

import asyncio
import contextlib
import math

import pytest

from peer.outer.state.outer_state import CHUNK
from peer.protocol.lineage import Certificate
from peer.protocol.records import parse_json
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm.catchup import history_server, readers
from peer.swarm.catchup.history_server import HistoryServer, history_name
from peer.swarm.net.stream import WRITE_BYTES, StreamClosedError
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.state.snapshot_cache import SnapshotCache
from tests.swarm.donor import Joiner, assert_same
from tests.swarm.runs import RUN, Run

LIMITS = {Kind.DATA: 1 << 23, Kind.META: 1 << 16, Kind.END: 0, Kind.BUSY: 0}


@pytest.fixture
def serve(network, tmp_path):
    async def start(numel=1000, rounds=3, snapshot=True, **options):
        run = Run(tmp_path / "donor", numel=numel).commit(rounds)
        node = network.node()
        run.valid = snapshot
        snapshot_cache = SnapshotCache(run)
        await HistoryServer(node, RUN, run.history, snapshot_cache, **options).start()
        return run, node

    return start


async def ask(node, server, **request):
    stream = await node.open(server.peer_id, history_name(RUN), "history")
    await stream.send_message(Kind.REQUEST, HistoryRequest(**{"run_id": RUN, **request}))
    return stream


async def answer(stream):
    """Every frame up to END."""
    frames = []
    while (frame := await asyncio.wait_for(stream.receive(LIMITS), 10.0))[0] is not Kind.END:
        frames.append(frame)
    stream.close()
    return frames


async def admitted(node, server, **request):
    """A stream that is answered: while the donor reads the next frame for its readers, none of them makes room."""
    async with asyncio.timeout(10.0):
        while True:
            stream = await ask(node, server, **request)
            if (await stream.receive(LIMITS))[0] is not Kind.BUSY:
                return stream
            stream.close()


async def test_peers_replay_and_load_what_is_served(serve, network, tmp_path):
    run, server = await serve()
    replaying, loading = Joiner(network, tmp_path / "a"), Joiner(network, tmp_path / "b")
    loading.valid = False
    assert (await replaying.catch_up(server)).replayed == 3
    assert (await loading.catch_up(server)).snapshot_round == 3
    assert_same(replaying, run)
    assert_same(loading, run)


async def test_whoever_asks_for_what_followed_a_round_of_its_own_is_back(serve, network):
    back = []
    run, server = await serve(rounds=3, on_return=back.append)
    returning, newcomer, level, probing, stranger = (network.node() for _ in range(5))
    run.history.seen.update(node.peer_id for node in (returning, newcomer, level, probing))
    for node, first in ((newcomer, 0), (level, 3), (probing, 2**53 - 1), (stranger, 2), (returning, 2)):
        await answer(await ask(node, server, what="chain", from_round=first))
    await answer(await ask(newcomer, server, what="snapshot", from_round=2))
    assert back == [returning.peer_id]


async def test_a_chain_is_served_from_any_round_on(serve, network):
    run, server = await serve()
    client = network.node()
    for first in range(5):
        frames = await answer(await ask(client, server, what="chain", from_round=first))
        assert [parse_json(Certificate, body) for _, body in frames] == run.history.chain[first:]
    assert await answer(await ask(client, server, what="chain", from_round=2**53 - 1)) == []


async def test_what_is_not_there_is_an_empty_answer(serve, network):
    _, server = await serve(snapshot=False)
    client = network.node()
    assert await answer(await ask(client, server, what="update", digest="f" * 64)) == []
    assert await answer(await ask(client, server, what="update")) == []
    assert await answer(await ask(client, server, what="snapshot")) == []


async def test_requests_for_other_runs_and_garbage_are_dropped(serve, network, caplog):
    _, server = await serve()
    client = network.node()
    with pytest.raises(StreamClosedError):
        await answer(await ask(client, server, what="chain", run_id="f" * 64))
    stream = await client.open(server.peer_id, history_name(RUN), "history")
    await stream.send(Kind.REQUEST, b'{"what":"update","digest":"../../identity.key"}')
    with pytest.raises(StreamClosedError):
        await answer(stream)
    assert "asks for run ffffffffffff" in caplog.text
    assert "malformed HistoryRequest" in caplog.text


async def test_a_client_that_asks_nothing_is_dropped(serve, network):
    network.retime(first_frame_s=0.05)
    _, server = await serve()
    stream = await network.node().open(server.peer_id, history_name(RUN), "history")
    await asyncio.wait_for(stream.closed(), 5.0)


@pytest.fixture
def places(network, monkeypatch):
    """Two for readers, one for each peer, and no time that a slow one is spared."""
    monkeypatch.setattr(history_server, "READERS", 2)
    monkeypatch.setattr(history_server, "READERS_PER_PEER", 1)
    network.retime(reader_spared_s=0.0)


@pytest.mark.usefixtures("places")
async def test_one_of_the_readers_that_read_nothing_makes_room(serve, network):
    run, server = await serve(numel=8 * CHUNK, rounds=1)  # more than the buffers of a stream hold
    request = {"what": "update", "digest": run.history.chain[-1].link.update_digest}
    strangers, newcomer = [network.node() for _ in range(2)], network.node()
    held = []
    for stranger in strangers:
        held.append(await ask(stranger, server, **request))
        assert (await held[-1].receive(LIMITS))[0] is Kind.DATA
    again = await ask(strangers[0], server, **request)
    assert (await again.receive(LIMITS))[0] is Kind.BUSY  # it holds its place
    await answer(await admitted(newcomer, server, **request))
    ends = await asyncio.gather(*map(answer, held), return_exceptions=True)
    assert sorted(isinstance(end, StreamClosedError) for end in ends) == [False, True]


@pytest.mark.usefixtures("places")
async def test_a_reader_that_reads_on_keeps_its_place(serve, network, monkeypatch):
    monkeypatch.setattr(readers, "LEAST_RATE", 0)
    run, server = await serve(numel=8 * CHUNK, rounds=1)
    request = {"what": "update", "digest": run.history.chain[-1].link.update_digest}
    held = [await ask(network.node(), server, **request) for _ in range(2)]
    for stream in held:
        assert (await stream.receive(LIMITS))[0] is Kind.DATA
    third = network.node()
    assert (await (await ask(third, server, **request)).receive(LIMITS))[0] is Kind.BUSY
    for stream in held:
        await answer(stream)
    assert await answer(await ask(third, server, **request))


async def test_joiners_that_take_snapshots_do_not_block_each_others_chains(serve, network, tmp_path, monkeypatch):
    monkeypatch.setitem(history_server.BULK_READERS, False, 2)
    network.retime(busy_retry_s=0.01)
    run, server = await serve(numel=CHUNK, rounds=1)  # a chunk is more than the buffers of a stream hold
    joiners = [Joiner(network, tmp_path / str(number), numel=CHUNK) for number in range(3)]
    for joiner in joiners:
        joiner.valid = False
    await asyncio.gather(*(joiner.catch_up(server) for joiner in joiners))
    for joiner in joiners:
        assert_same(joiner, run)


@pytest.mark.parametrize(
    "timing",
    [{"reader_idle_s": 0.0}, {"reader_idle_s": math.inf, "bulk_reader_spared_s": 0.0}],
    ids=["asks for no more", "asks for little, now and then"],
)
async def test_a_reader_of_chunks_makes_room(serve, network, monkeypatch, timing):
    monkeypatch.setitem(history_server.BULK_READERS, False, 2)
    network.retime(**timing)
    run, server = await serve()
    request = {"what": "chunks", "digest": run.state.lineage_id, "indexes": (0,)}
    held = [await ask(network.node(), server, **request) for _ in range(2)]
    for stream in held:
        assert (await stream.receive(LIMITS))[0] is Kind.DATA
    newcomer = await ask(network.node(), server, **request)
    assert (await newcomer.receive(LIMITS))[0] is Kind.DATA
    await asyncio.wait_for(held[0].closed(), 5.0)
    for stream in (held[1], newcomer):
        stream.close()


async def test_strangers_and_members_have_places_of_their_own(serve, network, monkeypatch):
    monkeypatch.setattr(history_server, "BULK_READERS", {True: 1, False: 1})
    network.retime(reader_idle_s=math.inf)
    run, server = await serve()
    stranger, member = network.node(), network.node()
    server.strange = lambda peer_id: peer_id == stranger.peer_id
    request = {"what": "chunks", "digest": run.state.lineage_id, "indexes": (0,)}
    streams = [await ask(client, server, **request) for client in (stranger, member, stranger, member)]
    kinds = [(await stream.receive(LIMITS))[0] for stream in streams]
    assert kinds == [Kind.DATA, Kind.DATA, Kind.BUSY, Kind.BUSY]
    for stream in streams:
        stream.close()


async def test_a_donor_says_that_it_is_busy(serve, network, monkeypatch):
    monkeypatch.setitem(history_server.BULK_READERS, False, 3)
    network.retime(reader_idle_s=math.inf)
    run, server = await serve()
    request = {"what": "chunks", "digest": run.state.lineage_id, "indexes": (0,)}
    one, two = network.node(), network.node()
    held = [await ask(client, server, **request) for client in (one, one, two)]
    for stream in held:
        assert (await stream.receive(LIMITS))[0] is Kind.DATA
    over_its_own, over_all = await ask(one, server, **request), await ask(two, server, **request)
    assert (await over_its_own.receive(LIMITS))[0] is Kind.BUSY
    assert (await over_all.receive(LIMITS))[0] is Kind.BUSY
    held[0].close()
    over_its_own.close()
    await until(lambda: server._streams.held(one.peer_id) == 1)
    again = await ask(one, server, **request)
    assert (await again.receive(LIMITS))[0] is Kind.DATA
    third = await ask(one, server, **request)
    assert (await third.receive(LIMITS))[0] is Kind.BUSY
    for stream in (*held, over_all, again, third):
        stream.close()


async def test_who_waits_for_a_snapshot_that_is_being_written_hears_so(serve, network, monkeypatch):
    network.retime(busy_period_s=0.001)
    written, offer = asyncio.Event(), SnapshotCache.offer

    async def slowly(*arguments):
        await written.wait()
        return await offer(*arguments)

    monkeypatch.setattr(SnapshotCache, "offer", slowly)
    _, server = await serve(rounds=2)
    leaving, staying = network.node(), network.node()
    streams = [await ask(node, server, what="snapshot") for node in (leaving, staying)]
    for stream in streams:
        for _ in range(3):
            assert (await asyncio.wait_for(stream.receive(LIMITS), 10.0))[0] is Kind.BUSY
    streams[0].close()
    written.set()
    frames = [kind for kind, _ in await answer(streams[1]) if kind is not Kind.BUSY]
    assert frames == [Kind.META, Kind.DATA]


async def test_chunks_come_in_the_order_in_which_they_are_asked_for(serve, network):
    run, server = await serve(numel=2 * CHUNK + 5)
    content = b"".join(tensor.numpy().tobytes() for tensor in (run.state.anchor, *run.state.buffers))
    sizes = [4 * CHUNK, 4 * CHUNK, 20] * 2
    stream = await ask(network.node(), server, what="chunks", digest=run.state.lineage_id, indexes=(5, 0, 2))
    more = HistoryRequest(what="chunks", run_id=RUN, digest=run.state.lineage_id, indexes=(3, 3))
    await stream.send_message(Kind.REQUEST, more)
    for index in (5, 0, 2, 3, 3):
        kind, body = await asyncio.wait_for(stream.receive(LIMITS), 10.0)
        first = sum(sizes[:index])
        assert (kind, body) == (Kind.DATA, content[first : first + sizes[index]])
    stream.close()


async def test_a_round_that_begins_in_the_middle_of_a_chunk_goes_first(serve, network):
    rounds, pieces = RoundPriority(), []

    class Overtaken(RoundPriority):
        @contextlib.asynccontextmanager
        async def turn(self):
            async with rounds.turn() as turn:

                async def wait():
                    pieces.append(turn)
                    if len(pieces) == 3:
                        rounds.round_begins()
                    await turn.wait()

                yield turn._replace(wait=wait)

    run, server = await serve(numel=CHUNK, priority=Overtaken())
    stream = await ask(network.node(), server, what="chunks", digest=run.state.lineage_id, indexes=(0,))
    chunk = memoryview(bytearray(4 * CHUNK))
    assert await asyncio.wait_for(stream.receive_header(LIMITS), 10.0) == (Kind.DATA, len(chunk))
    await asyncio.wait_for(stream._pipe.read_into(chunk[: 3 * WRITE_BYTES]), 10.0)
    await until(lambda: len(pieces) == 3)
    assert stream._pipe._first == stream._pipe._last
    rounds.round_ends()
    await asyncio.wait_for(stream._pipe.read_into(chunk[3 * WRITE_BYTES :]), 10.0)
    assert bytes(chunk) == run.state.anchor.numpy().tobytes()
    assert len(pieces) == 4 * CHUNK // WRITE_BYTES - 1
    stream.close()


TOO_MUCH = {
    "no such chunk": ({"indexes": (2,)}, "asks for chunk 2 of 2"),
    "too many": ({"indexes": (0,) * 5}, "more than the chunks of one snapshot"),
    "another snapshot": ({"indexes": (0,), "digest": "f" * 64}, "more than the chunks of one snapshot"),
    "something else": ({"what": "chain"}, "more than the chunks of one snapshot"),
    "another run": ({"indexes": (0,), "run_id": "f" * 64}, "asks for run ffffffffffff"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
async def test_requests_for_what_is_not_there_end_the_stream(serve, network, caplog, case):
    changes, complaint = TOO_MUCH[case]
    run, server = await serve()
    request = {"what": "chunks", "run_id": RUN, "digest": run.state.lineage_id}
    stream = await ask(network.node(), server, **request, indexes=(0,))
    assert (await stream.receive(LIMITS))[0] is Kind.DATA
    await stream.send_message(Kind.REQUEST, HistoryRequest(**{**request, **changes}))
    with pytest.raises(StreamClosedError):
        await answer(stream)
    assert complaint in caplog.text


async def test_the_snapshot_of_another_state_is_not_here(serve, network):
    _, server = await serve()
    assert await answer(await ask(network.node(), server, what="chunks", digest="f" * 64, indexes=(0,))) == []


async def test_clients_that_do_not_read_lose_their_place(serve, network, tmp_path, monkeypatch):
    monkeypatch.setitem(history_server.BULK_READERS, False, 1)
    network.retime(frame_timeout_s=0.2)
    network.retime(busy_retry_s=0.01)
    run, server = await serve(numel=CHUNK, rounds=1)
    lazy = await ask(network.node(), server, what="chunks", digest=run.state.lineage_id, indexes=(0, 1))
    assert (await lazy.receive_header(LIMITS))[0] is Kind.DATA
    joiner = Joiner(network, tmp_path / "joiner", numel=CHUNK)
    joiner.valid = False
    await joiner.catch_up(server)
    assert_same(joiner, run)
    lazy.close()


async def until(condition):
    """Let the other tasks work until it is so."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be so")
