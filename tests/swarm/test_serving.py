from __future__ import annotations

import asyncio

import pytest

from peer.outer.state import CHUNK
from peer.protocol.lineage import Certificate
from peer.protocol.records import parse_json
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm import history as history_module
from peer.swarm.history import HistoryServer, SnapshotFile, history_name
from peer.swarm.streams import StreamClosedError
from tests.swarm.donor import Joiner, assert_same
from tests.swarm.runs import RUN, Run

LIMITS = {Kind.DATA: 1 << 23, Kind.META: 1 << 16, Kind.END: 0}


@pytest.fixture
def serve(network, tmp_path):
    async def start(numel=1000, rounds=3, snapshot=True):
        run = Run(tmp_path / "donor", numel=numel).commit(rounds)
        file = SnapshotFile.write(run.history.folder / "snapshot.bin", run.state) if snapshot else None
        node = network.node()

        async def current():
            return file

        await HistoryServer(node, RUN, run.history, current).start()
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


async def test_peers_replay_and_load_what_is_served(serve, network, tmp_path):
    run, server = await serve()
    replaying, loading = Joiner(network, tmp_path / "a"), Joiner(network, tmp_path / "b")
    loading.valid = False
    assert (await replaying.catch_up(server)).replayed == 3
    assert (await loading.catch_up(server)).snapshot_round == 3
    assert_same(replaying, run)
    assert_same(loading, run)


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


async def test_a_client_that_asks_nothing_is_dropped(serve, network, monkeypatch):
    monkeypatch.setattr(history_module, "REQUEST_TIMEOUT_S", 0.05)
    _, server = await serve()
    stream = await network.node().open(server.peer_id, history_name(RUN), "history")
    await asyncio.wait_for(stream.closed(), 5.0)


async def test_joiners_that_take_snapshots_do_not_block_each_others_chains(serve, network, tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "SERVED_AT_ONCE", 2)
    run, server = await serve(numel=CHUNK, rounds=1)  # a chunk is more than the buffers of a stream hold
    joiners = [Joiner(network, tmp_path / str(number), numel=CHUNK) for number in range(3)]
    for joiner in joiners:
        joiner.valid = False
    await asyncio.gather(*(joiner.catch_up(server) for joiner in joiners))
    for joiner in joiners:
        assert_same(joiner, run)


async def test_clients_that_do_not_read_lose_their_slot(serve, network, tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "SERVED_AT_ONCE", 1)
    monkeypatch.setattr(history_module, "SEND_TIMEOUT_S", 0.2)
    run, server = await serve(numel=CHUNK, rounds=1)
    lazy = await ask(network.node(), server, what="snapshot")
    assert (await lazy.receive(LIMITS))[0] is Kind.META
    joiner = Joiner(network, tmp_path / "joiner", numel=CHUNK)
    joiner.valid = False
    await joiner.catch_up(server)
    assert_same(joiner, run)
    lazy.close()
