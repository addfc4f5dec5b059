"""Snapshot files while rounds go on: which are kept, which are written, and that each is of one round."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from peer.protocol.wire import HistoryRequest, Kind, SnapshotMeta
from peer.swarm.catchup.history_server import HistoryServer, history_name
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state import snapshot_cache as shelf_module
from peer.swarm.state import snapshot_file
from peer.swarm.state.snapshot_cache import SnapshotCache
from tests.swarm.donor import Joiner, assert_same
from tests.swarm.runs import RUN, Run
from tests.swarm.shelves import NUMEL, content, lineage, names, on_disk, take

LATEST = 2**53 - 1

pytestmark = pytest.mark.usefixtures("small_chunks")


async def test_one_file_serves_the_rounds_that_follow(run, snapshot_cache):
    first = await snapshot_cache.offer(None, 0)
    assert first.path.read_bytes() == content(run.state)
    assert (first.meta.round, first.meta.lineage_id) == (1, run.state.lineage_id)
    for _ in range(shelf_module.MAX_AGE_ROUNDS):
        run.commit()
        assert await snapshot_cache.offer(None, 0) is first
        assert await snapshot_cache.offer("f" * 64, 0) is first
    run.commit()
    second = await snapshot_cache.offer(None, 0)
    assert second.meta.round == 2 + shelf_module.MAX_AGE_ROUNDS
    assert second.path.read_bytes() == content(run.state)


async def test_who_compares_lineages_gets_the_newest(run, snapshot_cache):
    run.timing = replace(STANDARD, file_held_s=0.0)
    await snapshot_cache.offer(None, 0)
    run.commit()
    assert (await snapshot_cache.offer(None, 2)).meta.round == 2
    run.commit()
    assert (await snapshot_cache.offer(None, LATEST)).meta.round == 3


async def test_two_files_are_kept_while_they_are_read_and_no_third_is_written(run, snapshot_cache):
    before, old = content(run.state), await snapshot_cache.offer(None, LATEST)
    run.commit()
    with old.reading() as descriptor:
        new = await snapshot_cache.offer(None, LATEST)
        run.commit()
        assert await snapshot_cache.offer(None, LATEST) is new  # no room: the newest there is
        assert await snapshot_cache.offer(old.meta.lineage_id, LATEST) is old
        assert await snapshot_cache.get(run.state.lineage_id) is None
        assert on_disk(run) == names(lineage(run, 1), lineage(run, 2))
        assert snapshot_file.os.pread(descriptor, len(before), 0) == before
    assert await snapshot_cache.offer(None, LATEST) is new  # a reader may have lost its stream only
    run.timing = replace(STANDARD, file_held_s=0.0)
    assert (await snapshot_cache.offer(None, LATEST)).meta.round == 3
    assert on_disk(run) == names(lineage(run, 2), lineage(run, 3))
    assert await snapshot_cache.get(old.meta.lineage_id) is None


async def test_the_oldest_of_two_files_is_written_over_unless_somebody_reads_it(run, snapshot_cache):
    run.timing = replace(STANDARD, file_held_s=0.0)
    places = []
    for _ in range(2):
        places.append((await snapshot_cache.offer(None, 0)).path.stat().st_ino)
        run.commit(1 + shelf_module.MAX_AGE_ROUNDS)
    left = snapshot_cache.files[1].meta.lineage_id
    new = await snapshot_cache.offer(None, 0)
    assert (new.path.stat().st_ino, new.path.read_bytes()) == (places[0], content(run.state))
    assert on_disk(run) == names(left, run.state.lineage_id)
    with snapshot_cache.files[0].reading():
        run.commit(1 + shelf_module.MAX_AGE_ROUNDS)
        assert await snapshot_cache.offer(None, 0) is new  # there is no room: better than none


async def test_who_asks_for_offers_alone_keeps_no_file(run, snapshot_cache):
    old = [await snapshot_cache.offer(None, LATEST)]
    run.commit()
    old.append(await snapshot_cache.offer(None, LATEST))
    for file in old:
        file.offered("stranger")
        age(file)
    for _ in range(2):
        run.commit(1 + shelf_module.MAX_AGE_ROUNDS)
        for file in old:
            if await snapshot_cache.offer(file.meta.lineage_id, 0) is file:
                file.offered("stranger")
        newest = await snapshot_cache.offer(None, LATEST)
        assert newest.meta.round == run.state.round
        age(newest)


async def test_nobody_takes_a_file_from_a_newcomer_that_checks_its_chain_first(network, run, snapshot_cache):
    server, newcomer = network.node(), network.node()
    await HistoryServer(server, RUN, run.history, snapshot_cache).start()
    old = await snapshot_cache.offer(None, LATEST)
    run.commit()
    age(old, await snapshot_cache.offer(None, LATEST))
    stream = await newcomer.open(server.peer_id, history_name(RUN), "history")
    await stream.send_message(Kind.REQUEST, HistoryRequest(what="snapshot", run_id=RUN, digest=old.meta.lineage_id))
    assert (await stream.receive_message(Kind.META, SnapshotMeta)).round == 1
    stream.close()
    for _ in range(2):
        run.commit(1 + shelf_module.MAX_AGE_ROUNDS)
        await snapshot_cache.offer(None, LATEST)
    assert await snapshot_cache.get(old.meta.lineage_id) is old


def age(*files):
    """As if nobody had been seen at them for long enough."""
    for file in files:
        file.used_at -= STANDARD.file_held_s


async def test_the_second_attempt_writes_over_what_the_first_has_left(run, snapshot_cache):
    (run.history.folder / "snapshot.tmp").write_bytes(bytes(10 * len(content(run.state))))  # of a larger state
    place = (run.history.folder / "snapshot.tmp").stat().st_ino
    file = await snapshot_cache.offer(None, 0)
    assert (file.path.stat().st_ino, file.path.read_bytes()) == (place, content(run.state))
    assert on_disk(run) == names(run.state.lineage_id)


async def test_nobody_can_keep_old_files_for_ever(run, snapshot_cache):
    before, old = content(run.state), await snapshot_cache.offer(None, LATEST)
    run.commit()
    with old.reading() as descriptor:
        await snapshot_cache.offer(None, LATEST)
        run.commit()
        run.timing = replace(STANDARD, longest_file_held_s=0.0)
        assert (await snapshot_cache.offer(None, LATEST)).meta.round == 3
        assert on_disk(run) == names(lineage(run, 2), lineage(run, 3))
        assert snapshot_file.os.pread(descriptor, len(before), 0) == before  # what is open stays readable


async def test_a_snapshot_of_another_lineage_is_not_offered_even_to_who_wants_it(run, snapshot_cache, tmp_path):
    left = (await snapshot_cache.offer(None, 0)).meta.lineage_id
    other = Run(tmp_path / "other", numel=NUMEL).commit(1, seed=5)
    take(run, other)
    file = await snapshot_cache.offer(left, 0)
    assert file.meta.lineage_id == other.state.lineage_id
    assert file.path.read_bytes() == content(other.state)
    assert on_disk(run) == names(other.state.lineage_id)


async def test_files_of_an_earlier_life_are_removed(run):
    (run.history.folder / "snapshot-0123.bin").write_bytes(b"x")
    (run.history.folder / "snapshot-0123.tmp").write_bytes(b"x")
    SnapshotCache(run)
    assert on_disk(run) == set()


async def test_chunks_of_a_file_that_is_here_do_not_wait_for_one_that_is_written(run):
    free, holds = asyncio.Event(), asyncio.Event()
    free.set()

    @contextlib.asynccontextmanager
    async def still():
        holds.set()
        await free.wait()
        yield

    run.still = still
    snapshot_cache = SnapshotCache(run)
    first = await snapshot_cache.offer(None, 0)
    run.commit()
    free.clear()
    holds.clear()
    writing = asyncio.ensure_future(snapshot_cache.offer(None, LATEST))
    await holds.wait()
    assert await snapshot_cache.get(first.meta.lineage_id) is first
    free.set()
    assert (await writing).meta.round == 2


async def test_an_invalid_state_is_not_served(run):
    run.valid = False
    snapshot_cache = SnapshotCache(run)
    assert await snapshot_cache.offer(None, 0) is None
    assert await snapshot_cache.get(run.state.lineage_id) is None
    assert on_disk(run) == set()


async def test_a_state_that_has_changed_since_it_was_new_is_not_served(run, snapshot_cache, caplog):
    run.state.anchor[5] += 1.0
    assert await snapshot_cache.offer(None, 0) is None
    assert "the state of round 1 is not what it was when it was new" in caplog.text
    assert on_disk(run) == set()


async def test_a_donor_that_moves_on_serves_what_a_joiner_has_begun(network, run, snapshot_cache, tmp_path):
    server, client = network.node(), network.node()
    await HistoryServer(server, RUN, run.history, snapshot_cache).start()
    before, begun = content(run.state), run.state.lineage_id
    stream = await client.open(server.peer_id, history_name(RUN), "history")

    async def chunk(index):
        request = HistoryRequest(what="chunks", run_id=RUN, digest=begun, indexes=(index,))
        await stream.send_message(Kind.REQUEST, request)
        return (await asyncio.wait_for(stream.receive({Kind.DATA: 4096}), 5.0))[1]

    pieces = [await chunk(0)]
    for index in range(1, 8):
        run.commit()
        later = Joiner(network, tmp_path / f"joiner{index}", numel=NUMEL)
        later.valid = False
        how = await later.catch_up(server)
        assert how.snapshot_round >= run.state.round - shelf_module.MAX_AGE_ROUNDS
        later.valid = True
        if how.snapshot_round < run.state.round:
            assert (await later.catch_up(server)).replayed == run.state.round - how.snapshot_round
        assert_same(later, run)
        pieces.append(await chunk(index))
        assert len(on_disk(run)) <= 2
    assert b"".join(pieces) == before
    assert {file.meta.round for file in snapshot_cache.files} == {1, 6}
    stream.close()
