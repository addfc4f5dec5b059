"""A bootstrap follows the chain that members are on, without its state, and signs checkpoints of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bootstrap.follower import CHECKPOINT_ROUNDS
from peer.errors import ProtocolError
from peer.outer.recipe.resolve import resolve
from peer.protocol.checkpoints import Checkpoint, open_checkpoint, seal_checkpoint
from peer.protocol.identity import Identity
from peer.protocol.manifest import RecipeSpec
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm.catchup.checkpoint_exchange import CheckpointExchange
from peer.swarm.catchup.history_server import history_name
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import Timing
from tests.bootstrap.post import Post, announced
from tests.swarm.conftest import network  # noqa: F401
from tests.swarm.donor import ScriptedDonor
from tests.swarm.runs import RUN, Run


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run").commit(3)


async def test_a_checkpoint_is_signed_every_few_rounds_and_once_a_minute(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis)
    assert await post.sees(await announced(network, run)) == run.history.chain
    assert post.checkpoints.newest.round == 3  # the first
    run.commit(1)
    await post.sees(await announced(network, run))
    assert post.checkpoints.newest.round == 3
    post.now += 60.0
    await post.sees(await announced(network, run))
    assert (post.checkpoints.newest.round, post.checkpoints.newest.lineage_id) == (4, run.state.lineage_id)
    run.commit(CHECKPOINT_ROUNDS)
    await post.sees(await announced(network, run))
    assert post.checkpoints.newest.round == 4 + CHECKPOINT_ROUNDS
    again = NewestCheckpoint(tmp_path / "post", RUN, (post.node.peer_id,))
    assert again.newest == post.checkpoints.newest  # it is on disk


async def test_no_checkpoint_is_of_a_tip_that_most_may_still_leave(network, tmp_path):  # noqa: F811
    run = Run(tmp_path / "run", members=7).commit(3)
    post = Post(network, tmp_path / "post", run.history.genesis)
    await post.sees(await announced(network, run))
    few = run.fork(tmp_path / "few", run.identities[:3]).commit(CHECKPOINT_ROUNDS)
    assert await post.sees(await announced(network, few)) == few.history.chain
    assert post.checkpoints.newest.round == 3
    most = few.fork(tmp_path / "most", run.identities[2:]).commit(1)
    assert await post.sees(await announced(network, most)) == most.history.chain
    assert (post.checkpoints.newest.round, post.checkpoints.newest.lineage_id) == (8, most.state.lineage_id)


async def test_a_forged_chain_moves_neither_the_chain_nor_the_checkpoint(network, tmp_path, run, caplog):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis)
    await post.sees(await announced(network, run))
    forged = Run(tmp_path / "forged", members=16).commit(30, tokens=2**30)
    beyond = run.fork(tmp_path / "beyond", [Identity.generate() for _ in range(4)]).commit(9, tokens=2**30)
    for byzantine in (forged, beyond):
        assert await post.sees(await announced(network, byzantine)) == run.history.chain
    assert post.checkpoints.newest.lineage_id == run.state.lineage_id
    assert "few of those who were there signed round 12 of " in caplog.text


async def test_true_links_carry_no_forged_ones_that_follow_them(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis)
    await post.sees(await announced(network, run))
    run.commit(2)  # the follower has not seen these two
    mixed = run.fork(tmp_path / "mixed", [Identity.generate() for _ in range(16)]).commit(30)
    assert await post.sees(await announced(network, mixed)) == run.history.chain
    run.commit(CHECKPOINT_ROUNDS)
    assert await post.sees(await announced(network, run)) == run.history.chain
    assert post.checkpoints.newest.lineage_id == run.state.lineage_id


async def test_a_slow_claim_holds_up_no_checkpoint(network, tmp_path, run):  # noqa: F811
    network.retime(refresh_period_s=0.05, claim_s=60.0)
    post, node = Post(network, tmp_path / "post", run.history.genesis), network.node()
    true, (_, record) = await announced(network, run), await announced(network, run)

    async def sleep_over(stream):
        await stream.receive_message(Kind.REQUEST, HistoryRequest)
        await stream.closed()

    await node.serve(history_name(RUN), "history", sleep_over)
    slow = node.peer_id, record.model_copy(update={"lineage_weight": 2**50})
    async with asyncio.timeout(5.0):
        assert await post.sees(slow, true) == run.history.chain
    assert post.checkpoints.newest.lineage_id == run.state.lineage_id
    assert list(post.follower._looks) == [node.peer_id]
    running = asyncio.ensure_future(post.follower.run())
    await asyncio.sleep(0)
    (look,) = post.follower._looks.values()
    await cancel_and_wait([running])
    assert look.cancelled()


async def test_a_chain_that_the_disk_refuses_is_looked_at_again_later(network, tmp_path, run, monkeypatch, caplog):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis)

    def refuse(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(post.history, "advance", refuse)
        assert len(await post.sees(await announced(network, run))) == 0
    assert "cannot be kept: No space left on device" in caplog.text
    assert await post.sees(await announced(network, run)) == run.history.chain


async def test_silent_claims_hide_no_chain(network, tmp_path, run):  # noqa: F811
    """Two keys that claim the most and say nothing, each for as long as it is waited for."""
    network.retime(claim_s=0.5)
    post = Post(network, tmp_path / "post", run.history.genesis)
    silent = {}
    for _ in range(2):
        node, (_, record) = network.node(), await announced(network, run)
        await node.serve(history_name(RUN), "history", lambda stream: stream.closed())
        silent[node.peer_id] = record.model_copy(update={"lineage_weight": 2**50})
    async with asyncio.timeout(5.0):
        assert await post.sees(*silent.items(), await announced(network, run)) == run.history.chain


async def test_a_donor_of_the_chain_that_another_has_shown_is_asked_again_when_that_one_is_gone(
    network, tmp_path, run  # noqa: F811
):
    """All members show the same chain: that the first of them was enough is no fault of the others."""
    post = Post(network, tmp_path / "post", run.history.genesis)
    donors = [await ScriptedDonor(network.node(), run).start() for _ in range(3)]

    async def look(live):
        for donor in donors:
            donor.chain = list(run.history.chain)
        _, record = await announced(network, run)
        post.directory.reachable = {donor.peer_id: record for donor in live}
        await post.follower.look_around()
        assert post.history.chain == run.history.chain
        run.commit(1)

    for live in (donors, donors, donors, donors[:1], donors[1:2], donors[2:]):
        await look(live)


async def test_the_end_of_a_run_is_checkpointed_at_once(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis, total=4)
    await post.sees(await announced(network, run))
    run.commit(1)
    await post.sees(await announced(network, run))
    assert (len(post.history.chain), post.checkpoints.newest.round) == (4, 4)


async def test_the_end_that_only_the_archive_beside_it_was_shown_is_checkpointed(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis, total=4, archive=run.history)
    await post.sees(await announced(network, run))
    run.commit(1)
    post.directory.reachable = {}  # all have left
    following = asyncio.ensure_future(post.follower.run())
    async with asyncio.timeout(10.0):
        while post.checkpoints.newest.round < 4:
            await asyncio.sleep(0)
    following.cancel()
    assert post.history.chain == run.history.chain
    other = Run(tmp_path / "other").commit(5, seed=1)  # as it were after a split
    post.follower._archive = other.history
    await post.follower.take_from_archive()
    assert post.history.chain == run.history.chain


async def test_a_complete_chain_that_was_not_followed_live_is_no_end(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis, total=3)
    assert await post.sees(await announced(network, run)) == []


async def test_an_older_checkpoint_never_replaces_a_newer_one(tmp_path):
    organiser = Identity.generate()
    kept = NewestCheckpoint(tmp_path, RUN, (organiser.peer_id,))

    def sealed(round, serial):
        checkpoint = Checkpoint(run_id=RUN, round=round, lineage_id=f"{round:064x}", serial=serial, signed_at=0.0)
        return seal_checkpoint(organiser, checkpoint)

    assert [kept.offer(sealed(5, 10)), kept.offer(sealed(4, 99)), kept.offer(sealed(5, 9))] == [True, False, False]
    assert kept.offer(sealed(6, 11))
    assert open_checkpoint(kept.sealed, RUN, kept.keys)[1].round == 6
    assert NewestCheckpoint(tmp_path, RUN, (organiser.peer_id,)).newest.round == 6
    assert NewestCheckpoint(tmp_path, RUN, (Identity.generate().peer_id,)).newest is None


async def test_a_newcomer_hears_of_the_checkpoint_from_whom_it_joins_through(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis)
    await post.sees(await announced(network, run))
    await CheckpointExchange(post.node, RUN, post.checkpoints).start()
    mine = NewestCheckpoint(tmp_path / "mine", RUN, (post.node.peer_id,))
    await CheckpointExchange(network.node(), RUN, mine).ask(post.node.peer_id)
    assert mine.newest == post.checkpoints.newest


async def test_a_chain_with_more_rounds_than_the_time_allows_is_refused_unread(network, tmp_path, run):  # noqa: F811
    post = Post(network, tmp_path / "post", run.history.genesis)
    asked, links = [], post.scout._source.links

    async def counted(donor, from_round, count):
        asked.append(donor)
        return await links(donor, from_round, count)

    post.scout._source.links = counted
    donor, _ = await announced(network, run)
    pace = {"opened_at": 1000.0, "round_s": 0.05, "clock": lambda: post.now}

    def possible(known=0, **more):
        return replace(post.scout.rules, **pace, **more).most_rounds(known)

    assert [possible(), possible(known=30), possible(control=SimpleNamespace(rounds_total=40))] == [1000, 1030, 40]
    post.now += 10.0
    assert possible() == 1200
    post.now -= 5000.0  # a clock that is late
    assert possible() == 1000
    post.now = 1000.0
    post.scout.rules = replace(post.scout.rules, **pace)
    with pytest.raises(ProtocolError, match=f"{donor} claims round 1001; the run can have made 1000 by now"):
        await post.scout.look(donor, 1001)
    assert asked == []
    assert len(await post.scout.look(donor, 1000)) == 3
    assert set(asked) == {donor}
    post.checkpoints.newest = Checkpoint(
        run_id=RUN, round=5000, lineage_id="0" * 64, serial=1, signed_at=0.0
    )  # the manifest was published again
    assert possible() == 6000


def test_the_least_time_of_a_round_follows_from_its_steps_and_window():
    timing = Timing(least_step_s=0.002, least_exchange_s=0.005)
    assert timing.least_round_s(40, 15.0) == pytest.approx(0.045)
    assert timing.least_round_s(40, 0.01) == pytest.approx(0.015)
    recipe = resolve(RecipeSpec(name="diloco", steps_per_round=40))
    assert recipe.fewest_steps == 40
    assert resolve(RecipeSpec(name="selsync")).fewest_steps == 1
