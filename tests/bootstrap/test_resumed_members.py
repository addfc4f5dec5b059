"""The bootstrap follows members that all crash at once and resume from before its checkpoint: no peer has its state."""

from __future__ import annotations

import pytest

from peer.protocol.identity import Identity
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from tests.bootstrap.post import Post, announced
from tests.swarm.network import MemoryNetwork
from tests.swarm.runs import RUN, Run


class Crash:
    """All members crash after their last checkpoint, and resume from files of round 3."""

    def __init__(self, folder):
        self.folder, self.now = folder, [1000.0]
        self.network = MemoryNetwork(clock=lambda: self.now[0])
        self.network.retime(abandoned_s=60.0)
        self.run = Run(folder / "run", members=7).commit(3)
        self.older = self.run.fork(folder / "older", self.run.identities)
        self.post = Post(self.network, folder / "post", self.run.history.genesis)

    async def happens(self):
        """-> what was followed before."""
        await self.post.sees(await announced(self.network, self.run.commit(4)))
        assert self.post.checkpoints.newest.round == 7
        return list(self.run.history.chain)

    async def shown(self, other, seconds, others=True):
        """What is followed after so many seconds in which another branch is shown."""
        donors = [await announced(self.network, other, one) for one in other.identities if others]
        donors = [*donors, await announced(self.network, other)]
        for _ in range(int(seconds // 10.0)):
            self.now[0] += 10.0
            self.post.now += 10.0
            await self.post.sees(*donors)
        return self.post.history.chain


@pytest.fixture
async def crash(tmp_path):
    crash = Crash(tmp_path)
    yield crash
    await crash.network.close()


async def test_members_that_all_resume_from_before_the_checkpoint_are_followed_in_time(crash, tmp_path):
    before = await crash.happens()
    again = crash.older.commit(4, seed=1)
    assert await crash.shown(again, 90.0) == before  # not further than what was lost
    again.commit(1, seed=1)
    assert await crash.shown(again, 10.0) == again.history.chain
    newest = crash.post.checkpoints.newest
    assert (newest.round, newest.lineage_id) == (8, again.state.lineage_id)
    assert NewestCheckpoint(tmp_path / "post", RUN, (crash.post.node.peer_id,)).newest == newest
    assert await crash.shown(crash.run.commit(9), 10.0) == again.history.chain  # one that had the state after all


async def test_those_that_have_the_state_have_time_to_show_it(crash):
    before = await crash.happens()
    again = crash.older.commit(9, seed=1)
    assert await crash.shown(again, 50.0) == before
    crash.run.commit(1)
    assert await crash.shown(crash.run, 10.0) == crash.run.history.chain
    assert await crash.shown(again, 50.0) == crash.run.history.chain


async def test_a_minority_cannot_take_a_run_back_behind_its_checkpoint(crash, tmp_path):
    before = await crash.happens()
    few, strangers = crash.run.identities[:3], [Identity.generate() for _ in range(4)]
    for name, members in (("few", few), ("many", [*few, *strangers]), ("strangers", strangers)):
        forged = crash.older.fork(tmp_path / name, members).commit(20, seed=1, tokens=2**30)
        assert await crash.shown(forged, 200.0) == before
    assert crash.post.checkpoints.newest.round == 7


async def test_a_minority_cannot_extend_a_branch_that_most_gave_up(crash, tmp_path):
    """As after a split: all have signed the branch that lost, and some of them continue it while the others pause."""
    lost = crash.older.commit(4, seed=1)
    before = await crash.happens()
    forged = lost.fork(tmp_path / "forged", crash.run.identities[:3]).commit(20, seed=1)
    assert await crash.shown(forged, 200.0) == before


async def test_founders_that_have_left_cannot_take_a_run_back(crash, tmp_path):
    newer = [Identity.generate() for _ in range(4)]
    then = crash.run.commit(3).fork(tmp_path / "then", crash.run.identities)
    for members, rounds in (([*crash.run.identities[3:], *newer], 20), (newer, 12)):
        crash.run.identities = members
        await crash.post.sees(await announced(crash.network, crash.run.commit(rounds)))
    before = list(crash.run.history.chain)
    assert (crash.post.history.chain, crash.post.checkpoints.newest.round) == (before, 26)
    assert await crash.shown(then.commit(40, seed=1), 200.0) == before


async def test_members_that_take_turns_are_followed_once_a_later_link_is_settled(crash, tmp_path):
    """Three of seven make each link, so that the tip lacks support: until it can be signed, nothing is followed."""
    before, again, followed = await crash.happens(), crash.older, dict[int, int]()
    for turn in range(1, 15):
        three = [crash.run.identities[(turn + place) % 7] for place in range(3)]
        again = again.fork(tmp_path / f"turn{turn}", three).commit(1, seed=1)
        if turn % 7 == 0:
            again.identities = crash.run.identities
            followed[turn] = len(await crash.shown(again, 100.0))
    assert followed[7] == len(before) == 7
    assert followed[14] >= 15
    assert crash.post.checkpoints.newest.on(again.history.chain)


async def test_the_links_before_a_checkpoint_are_read_from_no_stranger(crash, monkeypatch):
    """Each would be weighed against a thousand links, on the event loop."""
    await crash.happens()
    again, carried = crash.older.commit(9, seed=1), []
    monkeypatch.setattr(crash.post.scout, "carried", lambda chain: carried.append(chain) or chain)
    before = list(crash.run.history.chain)
    assert await crash.shown(again, 200.0, others=False) == before
    assert carried == []


async def test_members_are_not_followed_while_an_archive_has_the_state(crash):
    """Following them, the archive would give up the only copy."""
    before = await crash.happens()
    crash.post.follower._archive = crash.run.history
    again = crash.older.commit(9, seed=1)
    assert await crash.shown(again, 200.0) == before
    crash.post.follower._archive = crash.older.fork(crash.folder / "behind", crash.run.identities).history
    assert await crash.shown(again, 10.0) == again.history.chain


async def test_a_node_that_cannot_sign_there_leaves_its_checkpoint_to_others(crash):
    """The first donor of the old chain would lead it back."""
    before, keys = await crash.happens(), crash.post.checkpoints.keys
    again = crash.older.commit(9, seed=1)
    crash.post.checkpoints.keys = frozenset({Identity.generate().peer_id})
    assert await crash.shown(again, 200.0) == before
    crash.post.checkpoints.keys = keys
    assert await crash.shown(again, 10.0) == again.history.chain
