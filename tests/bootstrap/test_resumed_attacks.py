"""Hostile peers that would be followed as members that all resumed from older files."""

from __future__ import annotations

from peer.protocol.identity import Identity
from tests.bootstrap.post import announced
from tests.bootstrap.test_resumed_members import crash  # noqa: F401


def ids(chain):
    return [one.link.id[:6] for one in chain]


async def test_two_of_seven_take_the_run_where_three_made_the_tip(crash, tmp_path):  # noqa: F811
    """Who was there last is told by the last ten links of the chain, not by those after the fork alone."""
    await crash.happens()
    tip = crash.run.fork(tmp_path / "tip", crash.run.identities[:3])
    forged = crash.run.fork(tmp_path / "forged", [*crash.run.identities[:2], Identity.generate()])
    await crash.post.sees(await announced(crash.network, tip.commit(1)))
    before = list(tip.history.chain)
    assert ids(crash.post.history.chain) == ids(before)
    forged.commit(40, seed=1)
    followed = await crash.shown(forged, 200.0)
    assert ids(followed) == ids(before)


async def test_the_last_peer_takes_back_all_that_others_made(crash, tmp_path):  # noqa: F811
    """The others leave one after the other, as at night, and each time those that remain are followed."""
    await crash.happens()
    run = crash.run.commit(20)
    await crash.post.sees(await announced(crash.network, run))
    for members in (4, 2, 1):
        run.identities = run.identities[:members]
        await crash.post.sees(await announced(crash.network, run.commit(10)))
    before = list(run.history.chain)
    assert ids(crash.post.history.chain) == ids(before)
    assert crash.post.checkpoints.newest.round == 37
    forged = crash.older.fork(tmp_path / "forged", run.identities).commit(60, seed=1)
    donor = await announced(crash.network, forged, run.identities[0])
    for _ in range(20):
        crash.now[0] += 10.0
        crash.post.now += 10.0
        await crash.post.sees(donor)
    followed = crash.post.history.chain
    assert ids(followed) == ids(before)


async def test_a_longer_branch_that_all_gave_up_is_not_followed_while_they_pause(crash):  # noqa: F811
    """All resumed, one had the state after all, all went back. In a pause a stranger shows the branch."""
    await crash.happens()
    lost = crash.older.commit(9, seed=1)
    assert ids(await crash.shown(lost, 50.0)) == ids(crash.run.history.chain)
    assert ids(await crash.shown(crash.run.commit(1), 10.0)) == ids(crash.run.history.chain)
    before = list(crash.run.history.chain)
    assert ids(await crash.shown(lost, 200.0, others=False)) == ids(before)


async def test_a_minority_extends_a_longer_branch_that_most_gave_up(crash, tmp_path):  # noqa: F811
    await crash.happens()
    lost = crash.older.commit(5, seed=1)
    assert ids(await crash.shown(crash.run.commit(0), 50.0)) == ids(crash.run.history.chain)
    before = list(crash.run.history.chain)
    forged = lost.fork(tmp_path / "forged", crash.run.identities[:3]).commit(40, seed=1)
    assert ids(await crash.shown(forged, 200.0)) == ids(before)


async def test_newcomers_of_a_split_whose_longer_branch_lost(crash, tmp_path):  # noqa: F811
    """Eight newcomers make a longer branch without the established, give it up, and are most of the last members."""
    run = crash.run.commit(7)
    newer = [Identity.generate() for _ in range(8)]
    split = run.fork(tmp_path / "split", newer).commit(45, seed=1)  # they have no say
    await crash.post.sees(await announced(crash.network, run.commit(4)))
    run.identities = [*run.identities, *newer]
    await crash.post.sees(await announced(crash.network, run.commit(20)))
    run.identities = run.identities[4:]
    await crash.post.sees(await announced(crash.network, run.commit(12)))
    before = list(run.history.chain)
    assert ids(crash.post.history.chain) == ids(before)
    assert len(before) < len(split.history.chain)
    assert ids(await crash.shown(split, 200.0, others=False)) == ids(before)


async def test_a_round_in_the_same_look_ends_the_wait(crash, tmp_path):  # noqa: F811
    await crash.happens()
    nothing = crash.run.fork(tmp_path / "nothing", crash.run.identities)
    await crash.shown(nothing, 100.0)
    again = crash.older.commit(9, seed=1)
    true = await announced(crash.network, crash.run.commit(1, tokens=2**20), crash.run.identities[6])
    resumed = [await announced(crash.network, again, one) for one in crash.run.identities[:6]]
    crash.now[0] += 10.0
    crash.post.now += 10.0
    crash.post.directory.reachable = crash.post.directory.peers = dict([true, *resumed])
    crash.post.follower._failures.clear()
    await crash.post.follower.look_around()
    assert ids(crash.post.history.chain) == ids(crash.run.history.chain)


async def test_one_that_shows_the_lost_chain_in_the_same_look_hinders_no_checkpoint(crash):  # noqa: F811
    """A free identity claims what does not exist, and shows the chain whose checkpoint is still the newest."""
    await crash.happens()
    again = crash.older.commit(9, seed=1)
    members = [await announced(crash.network, again, one) for one in crash.run.identities]
    serving = members[:2]
    free, record = await announced(crash.network, crash.run)
    record = record.model_copy(update={"round": 12, "lineage_id": "e" * 64, "lineage_weight": 2**40})
    post = crash.post
    for _ in range(30):
        crash.now[0] += 10.0
        post.now += 10.0
        post.follower._failures.clear()
        post.directory.reachable = dict([*serving, (free, record)])
        post.directory.peers = dict([*members, (free, record)])
        await post.follower.look_around()
        post.follower._sign()
    assert ids(post.history.chain) == ids(again.history.chain)
    assert post.checkpoints.newest.round == 12
