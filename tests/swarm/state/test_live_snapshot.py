"""Snapshots of a state that goes on while they are written: no round waits, and each is of one round."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from dataclasses import replace

import pytest

from peer.outer.numerics.tiles import TILE_ELEMENTS
from peer.outer.optim.optimizers import Nesterov
from peer.outer.state import outer_state as state_module
from peer.outer.state.outer_state import CHUNK
from peer.swarm.runtime.round_priority import IoSlot
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state import live_snapshot, snapshot_file
from peer.swarm.state import snapshot_cache as shelf_module
from peer.swarm.state.snapshot_cache import SnapshotCache
from tests.swarm.runs import Run
from tests.swarm.shelves import NUMEL, content, lineage, names, on_disk, take

LATEST = 2**53 - 1

pytestmark = pytest.mark.usefixtures("small_chunks")


def interrupted_shelf(run, *entries, by=None):
    """A shelf, and rounds of the state by the time it has held it still: before these entries it commits one more."""
    held = []

    @contextlib.asynccontextmanager
    async def still():
        if len(held) in entries:
            (by or run.commit)()
        held.append(run.state.round)
        yield

    run.still = still
    return SnapshotCache(run), held


@pytest.mark.parametrize(
    ("entries", "held"),
    [
        ((), [1, 1, 1, 1]),
        ((2,), [1, 1, 2, 2, 2]),  # the last entry waits for the update's file
        ((1, 2, 3), [1, 2, 3, 4, 4, 4, 4]),
    ],
)
async def test_columns_that_rounds_leave_behind_are_carried_on(run, entries, held):
    snapshot_cache, entered = interrupted_shelf(run, *entries)
    file = await snapshot_cache.offer(None, 0)
    assert file.path.read_bytes() == content(run.state)
    assert (file.meta.round, file.digest) == (1 + len(entries), run.states[-1])
    assert on_disk(run) == names(run.state.lineage_id)
    assert entered == held  # once for each column, and no longer


async def test_rounds_that_come_while_columns_are_carried_on_are_for_the_next_file(run):
    snapshot_cache, _ = interrupted_shelf(run, 2, 4, 5)  # 4 and 5: while the update of the first is waited for
    file = await snapshot_cache.offer(None, 0)
    assert (file.meta.round, run.state.round) == (2, 3)
    assert file.digest == run.states[2]


async def test_a_snapshot_that_another_donor_has_is_made_of_the_one_that_is_here(run, snapshot_cache):
    first = await snapshot_cache.offer(None, 0)
    run.commit(3)
    expected, wanted = content(run.state), run.state.lineage_id
    run.commit()
    made = await snapshot_cache.get(wanted)
    assert (made.meta.round, made.path.read_bytes()) == (4, expected)
    assert snapshot_cache.files == [first, made]
    assert await snapshot_cache.offer(wanted, 0) is made


class Whole(Nesterov):
    """A step of all elements at once."""

    elementwise = False


async def test_columns_that_a_step_does_not_change_one_by_one_are_copied_of_one_round(run):
    run.state.optimizer = Whole(lr=0.7, momentum=0.6)
    snapshot_cache, held = interrupted_shelf(run)
    file = await snapshot_cache.offer(None, 0)
    assert (file.path.read_bytes(), file.meta.round, held) == (content(run.state), 1, [1])
    run.commit()
    wanted = run.state.lineage_id
    run.commit()
    assert await snapshot_cache.get(wanted) is None  # the columns of the file cannot be carried on


async def test_a_snapshot_of_many_rounds_later_is_not_made_of_an_old_one(run, snapshot_cache):
    await snapshot_cache.offer(None, 0)
    run.commit(shelf_module.MAX_AGE_ROUNDS + 1)
    wanted = run.state.lineage_id
    run.commit()
    assert await snapshot_cache.get(wanted) is None
    assert await snapshot_cache.get(lineage(run, 1 + shelf_module.MAX_AGE_ROUNDS)) is not None


async def test_no_snapshot_is_made_of_columns_whose_update_is_gone(run, caplog):
    caplog.set_level("INFO")

    def commit():
        run.commit()
        run.history.update(run.history.chain[-1].link.update_digest).unlink()

    snapshot_cache, _ = interrupted_shelf(run, 2, by=commit)
    assert await snapshot_cache.offer(None, 0) is None
    assert "no snapshot: the update of round 2 is not kept any more" in caplog.text
    assert on_disk(run) == set()
    assert (await snapshot_cache.offer(None, 0)).path.read_bytes() == content(run.state)


async def test_columns_of_two_lineages_are_not_mixed(run, tmp_path):
    other = Run(tmp_path / "other", numel=NUMEL).commit(2, seed=5)
    snapshot_cache, held = interrupted_shelf(run, 2, by=lambda: take(run, other))
    assert await snapshot_cache.offer(None, 0) is None
    assert held == [1, 1, 2]
    assert on_disk(run) == set()
    assert (await snapshot_cache.offer(None, 0)).path.read_bytes() == content(other.state)


@pytest.mark.parametrize(
    ("behind", "copied", "carried"),
    [
        (live_snapshot.PATIENT_ROUNDS, 4, live_snapshot.PATIENT_ROUNDS),
        (live_snapshot.PATIENT_ROUNDS + 1, 2, live_snapshot.PATIENT_ROUNDS + 1),
        # without a turn until it is near enough
        (live_snapshot.PATIENT_CARRYING + 3, 2, live_snapshot.PATIENT_CARRYING),
    ],
)
async def test_rounds_go_first_until_there_have_been_many(run, behind, copied, carried):
    snapshot_cache, _ = interrupted_shelf(run, 1, by=lambda: run.commit(behind))
    turns = []

    @contextlib.asynccontextmanager
    async def turn():
        turns.append(run.state.round)
        yield IoSlot()

    snapshot_cache.priority.turn = turn
    assert (await snapshot_cache.offer(None, 0)).path.read_bytes() == content(run.state)
    assert len(turns) == copied + 3 * carried + 3  # columns; an update, its check, a column for each; to hash


async def test_all_that_is_done_to_a_column_stands_aside_for_rounds(run):
    snapshot_cache, _ = interrupted_shelf(run, 2)  # after two of the four columns
    asides = []

    @contextlib.asynccontextmanager
    async def turn():
        yield IoSlot(lambda: asides.append(run.state.round))

    snapshot_cache.priority.turn = turn
    assert (await snapshot_cache.offer(None, 0)).path.read_bytes() == content(run.state)
    put, carried, sealed = 2, 1 + 1 + 2 * 2, 2  # an anchor and a buffer to write; read, a step, both hashed and written
    assert len(asides) == 4 * put + 2 * carried + 2 * sealed
    asides.clear()
    run.commit(3)
    wanted = run.state.lineage_id
    run.commit()
    assert (await snapshot_cache.get(wanted)).meta.round == 5
    assert len(asides) == 4 * put + 4 * (3 * (carried - 2) + 2)  # hashed after the last of three rounds


async def test_rounds_that_came_while_a_file_was_written_do_not_make_it_old(run):
    snapshot_cache, _ = interrupted_shelf(run, 3, 5, by=lambda: run.commit(2 + shelf_module.MAX_AGE_ROUNDS))
    first = await snapshot_cache.offer(None, 0)
    assert (first.meta.round, first.finished_at, run.state.round) == (7, 13, 13)
    run.commit(shelf_module.MAX_AGE_ROUNDS)
    assert await snapshot_cache.offer(None, 0) is first
    run.commit()
    assert await snapshot_cache.offer(None, 0) is not first


async def test_updates_are_read_turn_by_turn(run, monkeypatch):
    monkeypatch.setattr(live_snapshot, "BYTES_PER_TURN", 1000)
    snapshot_cache, _ = interrupted_shelf(run, 1)
    turns = 0

    @contextlib.asynccontextmanager
    async def turn():
        nonlocal turns
        turns += 1
        yield IoSlot()

    snapshot_cache.priority.turn = turn
    assert (await snapshot_cache.offer(None, 0)).path.read_bytes() == content(run.state)
    size = run.history.update(run.history.chain[-1].link.update_digest).stat().st_size
    assert size > 3000
    assert turns == 4 + math.ceil(size / 1000) + 2 + 3  # columns; pieces; checked, and a column; to hash


async def test_a_damaged_update_makes_no_snapshot_and_is_not_kept(run, caplog):
    snapshot_cache, _ = interrupted_shelf(run, 1, by=lambda: spoil(run.commit().history))
    assert await snapshot_cache.offer(None, 0) is None
    assert run.history.update(run.history.chain[-1].link.update_digest) is None
    assert "is damaged and is not served any more" in caplog.text
    assert (await snapshot_cache.offer(None, 0)).path.read_bytes() == content(run.state)


def spoil(history):
    """Flip a bit of the newest update's file."""
    path = history.update(history.chain[-1].link.update_digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def test_updates_are_read_as_those_of_their_round(run):
    snapshot_cache, _ = interrupted_shelf(run, 2)
    split, rounds = run.state.split_update, []

    def noted(payload, weights, round=None, shares=()):
        rounds.append(round)
        return split(payload, weights, round, shares)

    run.state.split_update = noted
    assert (await snapshot_cache.offer(None, 0)).meta.round == 2
    assert rounds == [1]


async def test_no_file_is_made_of_one_of_another_lineage(run, snapshot_cache, tmp_path, caplog):
    await snapshot_cache.offer(None, 0)
    take(run, Run(tmp_path / "other", numel=NUMEL).commit(3, seed=5))
    assert await snapshot_cache.get(lineage(run, 2)) is None
    assert snapshot_cache.files == []
    assert "not what it was" not in caplog.text


async def test_a_file_that_is_served_does_not_make_room_for_one_that_cannot_be_made(run, snapshot_cache):
    run.timing = replace(STANDARD, file_held_s=0.0)
    files = [await snapshot_cache.offer(None, LATEST)]
    run.commit()
    files.append(await snapshot_cache.offer(None, LATEST))
    run.commit(3)
    run.history.update(run.history.chain[2].link.update_digest).unlink()
    assert await snapshot_cache.get(lineage(run, 4)) is None
    assert snapshot_cache.files == files


async def test_who_asks_for_older_rounds_makes_no_donor_write_them(run, snapshot_cache):
    first = await snapshot_cache.offer(None, 0)
    run.commit(2 + shelf_module.MAX_AGE_ROUNDS)
    assert await snapshot_cache.get(lineage(run, 2)) is None
    assert snapshot_cache.files == [first]


async def test_a_damaged_file_is_neither_copied_nor_kept(run, snapshot_cache, caplog):
    first = await snapshot_cache.offer(None, 0)
    with first.path.open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    run.commit()
    assert await snapshot_cache.get(run.state.lineage_id) is None
    assert f"{first.path.name} is damaged in column 1: it is not served any more" in caplog.text
    assert on_disk(run) == set()
    assert await snapshot_cache.get(run.state.lineage_id) is not None


async def test_on_a_full_disk_the_file_that_is_here_is_served(run, snapshot_cache, monkeypatch, caplog):
    first = await snapshot_cache.offer(None, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run.commit()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_file.os, "pwrite", full)
        assert await snapshot_cache.offer(None, LATEST) is first
    assert "no snapshot for joiners: [Errno 28] No space left on device" in caplog.text
    assert on_disk(run) == names(first.meta.lineage_id)


async def test_a_state_that_is_given_up_is_not_written_to_its_end(run):
    snapshot_cache, held = interrupted_shelf(
        run, 2, by=lambda: clearing.append(asyncio.ensure_future(snapshot_cache.clear()))
    )
    clearing = []
    file = asyncio.ensure_future(snapshot_cache.offer(None, 0))
    while not clearing:
        await asyncio.sleep(0)
    await asyncio.gather(*clearing)
    assert await file is None
    assert len(held) == 3 + 1
    assert on_disk(run) == set()


def test_a_thread_whose_work_was_cancelled_writes_into_nobody_elses_file(run, tmp_path):
    with snapshot_file.SnapshotWriter(tmp_path / "snapshot.tmp", run.state) as writer:
        writer.copy(0)
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() > 2
        with pytest.raises(ValueError, match="closed"):
            writer.put(0)
        with pytest.raises(ValueError, match="closed"):
            writer.carry_on(0, None, final=True)
    assert (tmp_path / "other").read_bytes() == b""


def test_between_the_tiles_of_a_column_a_round_may_go_first(tmp_path, monkeypatch):
    for module in (state_module, snapshot_file):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    run = Run(tmp_path / "run", numel=TILE_ELEMENTS + 512).commit(1)
    done = []
    write, digest, carry_on = snapshot_file.os.pwrite, snapshot_file.hashing.digest, run.state.carry_on
    monkeypatch.setattr(snapshot_file.os, "pwrite", lambda *given: done.append(len(given[1])) or write(*given))
    monkeypatch.setattr(snapshot_file.hashing, "digest", lambda *given: done.append("hash") or digest(*given))
    monkeypatch.setattr(run.state, "carry_on", lambda *given: done.append(given[2:4]) or carry_on(*given))
    with snapshot_file.SnapshotWriter(tmp_path / "snapshot.tmp", run.state) as writer:
        writer.copy(0)
        writer.put(0, aside=lambda: done.append("aside"))
        of_one = ["aside", 4 * TILE_ELEMENTS, "aside", 4 * 512]
        assert done == 2 * of_one
        done.clear()
        link = run.commit(1).history.chain[-1].link
        payload = run.history.update(link.update_digest).read_bytes()
        update = run.state.split_update(payload, [member.tokens for member in link.roster], link.round)
        done.clear()
        writer.carry_on(0, update, final=True, aside=lambda: done.append("aside"))
        steps = ["aside", "aside", (0, TILE_ELEMENTS), "aside", (TILE_ELEMENTS, TILE_ELEMENTS + 512)]
        assert done == [*steps, *2 * ["aside", "hash", *of_one]]
        done.clear()
        writer.seal(0, lambda: done.append("aside"))
        assert done == 2 * ["aside", "hash"]
        writer.finish(tmp_path / "snapshot.bin", run.state.lineage_id)
    assert (tmp_path / "snapshot.bin").read_bytes() == content(run.state)
