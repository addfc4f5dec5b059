"""Snapshots of a state that goes on while they are written: no round waits, and each is of one round."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from peer.swarm import shelf as shelf_module
from peer.swarm.shelf import Shelf
from tests.swarm.runs import Run
from tests.swarm.shelves import NUMEL, content, lineage, names, on_disk, take

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "donor", numel=NUMEL).commit(1)


@pytest.fixture
def shelf(run):
    return Shelf(run.history, run.state, asyncio.Lock, lambda: True, run.digest, run.written)


def interrupted_shelf(run, *entries, by=None):
    """A shelf, and rounds of the state by the time it has held it still: before these entries it commits one more."""
    held = []

    @contextlib.asynccontextmanager
    async def still():
        if len(held) in entries:
            (by or run.commit)()
        held.append(run.state.round)
        yield

    return Shelf(run.history, run.state, still, lambda: True, run.digest, run.written), held


@pytest.mark.parametrize(
    ("entries", "held"),
    [
        ((), [1, 1, 1, 1]),
        ((2,), [1, 1, 2, 2, 2]),  # the last entry waits for the update's file
        ((1, 2, 3), [1, 2, 3, 4, 4, 4, 4]),
    ],
)
async def test_columns_that_rounds_leave_behind_are_carried_on(run, entries, held):
    shelf, entered = interrupted_shelf(run, *entries)
    file = await shelf.offer(None, 0)
    assert file.path.read_bytes() == content(run.state)
    assert (file.meta.round, file.digest) == (1 + len(entries), run.states[-1])
    assert on_disk(run) == names(run.state.lineage_id)
    assert entered == held  # once for each column, and no longer


async def test_rounds_that_come_while_columns_are_carried_on_are_for_the_next_file(run):
    shelf, _ = interrupted_shelf(run, 2, 4, 5)  # 4 and 5: while the update of the first is waited for
    file = await shelf.offer(None, 0)
    assert (file.meta.round, run.state.round) == (2, 3)
    assert file.digest == run.states[2]


async def test_a_snapshot_that_another_donor_has_is_made_of_the_one_that_is_here(run, shelf):
    first = await shelf.offer(None, 0)
    run.commit(3)
    expected, wanted = content(run.state), run.state.lineage_id
    run.commit()
    made = await shelf.get(wanted)
    assert (made.meta.round, made.path.read_bytes()) == (4, expected)
    assert shelf.files == [first, made]
    assert await shelf.offer(wanted, 0) is made


async def test_a_snapshot_of_many_rounds_later_is_not_made_of_an_old_one(run, shelf):
    await shelf.offer(None, 0)
    run.commit(shelf_module.MAX_CARRIED + 1)
    wanted = run.state.lineage_id
    run.commit()
    assert await shelf.get(wanted) is None
    assert await shelf.get(lineage(run, 1 + shelf_module.MAX_CARRIED)) is not None


async def test_no_snapshot_is_made_of_columns_whose_update_is_gone(run, caplog):
    caplog.set_level("INFO")

    def commit():
        run.commit()
        run.history.update(run.history.chain[-1].link.update_digest).unlink()

    shelf, _ = interrupted_shelf(run, 2, by=commit)
    assert await shelf.offer(None, 0) is None
    assert "no snapshot: the update of round 2 is not kept any more" in caplog.text
    assert on_disk(run) == set()
    assert (await shelf.offer(None, 0)).path.read_bytes() == content(run.state)


async def test_columns_of_two_lineages_are_not_mixed(run, tmp_path):
    other = Run(tmp_path / "other", numel=NUMEL).commit(2, seed=5)
    shelf, held = interrupted_shelf(run, 2, by=lambda: take(run, other))
    assert await shelf.offer(None, 0) is None
    assert held == [1, 1, 2]
    assert on_disk(run) == set()
    assert (await shelf.offer(None, 0)).path.read_bytes() == content(other.state)


@pytest.mark.parametrize("beyond", [0, 1, 5])
async def test_rounds_go_first_until_the_updates_would_be_gone(run, beyond):
    behind = shelf_module.PATIENT_ROUNDS + beyond
    shelf, _ = interrupted_shelf(run, 1, by=lambda: run.commit(behind))
    turns = []

    @contextlib.asynccontextmanager
    async def turn():
        turns.append(run.state.round)
        yield

    shelf.courtesy.turn = turn
    assert (await shelf.offer(None, 0)).path.read_bytes() == content(run.state)
    # two columns and then two more; the first is carried on, without waiting until it is near enough
    assert len(turns) == 2 + (2 if beyond == 0 else 0) + shelf_module.PATIENT_ROUNDS
