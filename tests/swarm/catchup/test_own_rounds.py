"""A peer that begins behind the rounds on its own disk makes them again, as far as its files allow."""

from __future__ import annotations

import shutil

import pytest

from peer.swarm.state.chain import ChainStore
from tests.swarm.played import rounds_at_genesis
from tests.swarm.runs import Run


def damaged(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def unreadable(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("breaks", "made"),
    [(None, 3), (damaged, 1), (lambda path: path.unlink(), 1), (unreadable, 1)],
    ids=["whole", "damaged", "gone", "unreadable"],
)
async def test_own_rounds_are_made_again_up_to_the_first_file_of_no_use(network, tmp_path, breaks, made):
    run = Run(tmp_path / "others").commit(3)
    rounds = rounds_at_genesis(network, tmp_path, run, [])
    history = rounds.store.history
    shutil.copytree(run.history.folder, history.folder, dirs_exist_ok=True)
    assert history.load(history.chain_path, history.genesis)
    assert (rounds.store.state.round, len(history.beyond)) == (0, 3)
    if breaks is not None:
        breaks(history.folder / run.history.update(run.history.chain[1].link.update_digest).name)
    assert await rounds._fork_choice.replay_own()
    assert (rounds.store.state.round, rounds.store.state.digest()) == (made, run.states[made])
    assert rounds.store.position.lineage_id == run.history.lineage_id(made)
    assert not await rounds._fork_choice.replay_own()  # once


@pytest.mark.parametrize("made", [0, 1, 2])
async def test_a_peer_that_crashes_as_it_makes_its_rounds_again_has_the_rest(network, tmp_path, made):
    """The state that it begins with is written, its chain ends there, and it crashes before the other rounds."""
    run = Run(tmp_path / "others").commit(4)
    rounds = rounds_at_genesis(network, tmp_path, run, [])
    history = rounds.store.history
    shutil.copytree(run.history.folder, history.folder, dirs_exist_ok=True)
    for _ in range(2):
        again = ChainStore(history.folder, history.genesis)
        assert again.load(again.chain_path, run.history.lineage_id(made))
        left = [run.history.lineage_id(number) for number in range(made + 1, 5)]
        assert [one.link.id for one in again.beyond] == left
        assert len(again.chain) == made
    assert history.load(history.chain_path, history.genesis)
    assert len(history.beyond) == 4
    assert await rounds._fork_choice.replay_own()
    assert rounds.store.state.digest() == run.state.digest()
    assert not again.load(again.chain_path, "f" * 64)
    assert [path.name for path in history.folder.glob("beyond*")] == []
