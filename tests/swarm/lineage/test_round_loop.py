from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer.outer.recipe.plan import RunPlan
from peer.outer.record import RoundRecord
from peer.protocol.lineage import Position
from peer.protocol.manifest import parse_manifest
from peer.protocol.records import PeerRecord
from peer.swarm.lineage import round_loop
from peer.swarm.lineage.retry import BEHIND_TRIES, RetryPolicy
from peer.swarm.lineage.round_loop import LineageRounds
from peer.swarm.loop import RunContext
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state.chain import ChainStore
from tests.swarm.gathering import PARENT, gather
from tests.swarm.runs import RUN, make_state

QUICKSTART = Path(__file__).parents[3] / "configs/runs/quickstart.yaml"


class Line:
    """Rests until it is told otherwise; counts how often it is asked."""

    looks, rests = 0, True

    @property
    def resting(self):
        self.looks += 1
        return self.rests


@pytest.mark.parametrize("how", ["it leaves between rounds", "its rounds are cancelled"])
async def test_a_peer_that_leaves_ends_its_persistent_group(monkeypatch, how):
    rounds, ended = LineageRounds.__new__(LineageRounds), []

    async def wait(_):
        await asyncio.Event().wait()

    async def dissolve(abort, tell=False):
        ended.append((abort.reason, tell))

    monkeypatch.setattr(LineageRounds, "_wait_for_work", wait)
    monkeypatch.setattr(LineageRounds, "finished", False)
    rounds._exchange, rounds.leaving = SimpleNamespace(dissolve=dissolve), how == "it leaves between rounds"
    running = asyncio.ensure_future(rounds.run())
    await asyncio.sleep(0)
    if not rounds.leaving:
        running.cancel()
    await asyncio.wait({running}, timeout=5.0)
    assert ended == [("this peer leaves", True)]


async def test_a_peer_that_rests_ends_its_group_takes_no_part_and_comes_back(monkeypatch, network):
    network.retime(recheck_s=0.001)
    rounds, ended, node, announced = LineageRounds.__new__(LineageRounds), [], network.node(), []
    node.line = line = Line()
    rested = asyncio.Event()

    async def dissolve(abort, tell=False):
        ended.append((abort.reason, tell))

    async def wait(_):
        if not node.resting:
            rested.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(LineageRounds, "_wait_for_work", wait)
    monkeypatch.setattr(LineageRounds, "finished", False)
    rounds._exchange, rounds._node = SimpleNamespace(dissolve=dissolve), node
    rounds.leaving, rounds.joined = False, True
    rounds._directory = SimpleNamespace(announce_soon=lambda: announced.append(1))
    rounds.control = SimpleNamespace(paused=False)
    running = asyncio.ensure_future(rounds._go_round())
    while line.looks < 5:
        await asyncio.sleep(0)
    assert (ended, len(announced), rested.is_set()) == ([("this peer rests", True)], 1, False)
    assert not rounds.taking_part()
    line.rests = False
    await asyncio.wait_for(rested.wait(), 5.0)
    assert (len(ended), len(announced)) == (1, 2)
    assert rounds.taking_part()
    await cancel_and_wait([running])


async def test_whoever_claims_to_be_ahead_and_cannot_show_it_is_not_expected_for_a_while(network):
    now = 100.0
    network.clock = lambda: now
    leader, byzantine = await gather(network, 2)
    network.retime(recheck_s=0.001)

    looks, shown = [], set()

    async def nobody_shows_it(patience_s):
        assert 0.0 <= patience_s <= BEHIND_TRIES * STANDARD.recheck_s
        looks.append(1)
        return False

    async def refresh():
        """As before."""

    directory = SimpleNamespace(refresh=refresh)
    claims = SimpleNamespace(donors=lambda: ["donor"], turned_down=lambda donor: donor in shown)
    following = SimpleNamespace(claims=claims, catch_up=nobody_shows_it)
    after = RetryPolicy(leader.node, directory, leader.matchmaker, following, None, random.Random(1))
    membership = leader.matchmaker.membership
    assert membership.expected() == [byzantine.peer_id]
    record = RoundRecord(status="aborted", round=6, lineage_id=PARENT, culprit=byzantine.peer_id, instead="catch_up")
    await after.of(record)
    assert membership.expected() == []
    now += STANDARD.unproven_s - 1.0
    assert membership.expected() == []
    now += 1.0
    assert membership.expected() == [byzantine.peer_id]
    assert len(looks) == BEHIND_TRIES
    shown.add(byzantine.peer_id)  # a chain that too few have signed: others may be there to make a round with
    await after.of(record)
    assert membership.expected() == []
    assert len(looks) == BEHIND_TRIES + 1


async def test_a_run_that_is_ended_is_left_after_the_named_round_or_after_one_more(network):
    rounds, now = LineageRounds.__new__(LineageRounds), 100.0
    node = network.node()
    node.clock = lambda: now
    rounds._node, rounds._directory = node, SimpleNamespace(announce_soon=lambda: None)
    rounds._manifest = SimpleNamespace(rounds=SimpleNamespace(straggler_wait_s=5.0))
    rounds.slot = SimpleNamespace(due_in_s=lambda: 30.0, work=asyncio.Event())
    rounds.store = SimpleNamespace(state=SimpleNamespace(round=7))
    rounds._retry = SimpleNamespace(committed=lambda: None)
    committed = RoundRecord(status="committed", round=8, lineage_id=PARENT)
    for named, total in ((True, 9), (False, None)):
        rounds.control = SimpleNamespace(rounds_total=total, state="finished", names_last_round=named)
        rounds.steer()
        assert not rounds.finished
        await rounds._after(committed)
        assert rounds.finished is not named
    rounds.control = SimpleNamespace(rounds_total=9, state="finished", names_last_round=True)
    rounds.steer()
    now += 30.0 + 5.0 + STANDARD.last_round_s  # alone, or the round does not come
    assert rounds.finished
    rounds.steer()
    rounds.store.state.round = 9
    assert rounds.finished


async def test_a_donor_that_cannot_be_reached_is_not_asked_again_at_once(network, tmp_path, monkeypatch):
    """Its record outlives it by seconds: a peer that is behind it must not spin meanwhile."""
    node, asked = network.node(), []

    async def gone(peer_id, *_, **__):
        asked.append(peer_id)
        await asyncio.sleep(0)
        raise StreamClosedError(peer_id, "cannot be reached")

    monkeypatch.setattr(node, "open", gone)
    ahead = PeerRecord(run_id=RUN, nickname="x", state="training", round=9, lineage_id="f" * 64, lineage_weight=99,
                       expires_at=1e10)  # fmt: skip
    state = make_state()
    store = SimpleNamespace(
        state=state, history=ChainStore(tmp_path, state.lineage_id), valid=True,
        position=Position(0, state.lineage_id, 0), adopt=None, digest=None,
        snapshot_cache=SimpleNamespace(priority=RoundPriority()),
    )  # fmt: skip
    directory = SimpleNamespace(peers={"donor": ahead}, reachable={"donor": ahead})
    manifest = parse_manifest(QUICKSTART.read_text(), "quickstart")
    context = RunContext(
        node=node, directory=directory, plan=replace(RunPlan.of(manifest), nominal_tokens=64),
        organiser="organiser", trainer=SimpleNamespace(tell=print), rng=random.Random(0),
    )  # fmt: skip
    rounds = LineageRounds(context, store)
    running = [asyncio.ensure_future(work) for work in (rounds.run(), rounds._fork_choice.claims.scout_forever())]
    for _ in range(200):  # turns of the loop
        await asyncio.sleep(0)
    await cancel_and_wait(running)
    assert asked == ["donor"]


async def test_however_often_rounds_fail_the_next_one_is_tried(network):
    leader, _ = await gather(network, 2)
    network.retime(max_backoff_s=0.0)
    wanted = []
    following = SimpleNamespace(claims=SimpleNamespace(donors=list))
    slot = SimpleNamespace(want_snapshot=lambda: wanted.append(1))
    after = RetryPolicy(leader.node, None, leader.matchmaker, following, slot, random.Random(1))
    record = RoundRecord(status="aborted", round=6, lineage_id=PARENT, phase="match", reason="x", instead="retry")
    for _ in range(1100):
        await after.of(record)
    assert len(wanted) == 1100


@pytest.mark.parametrize("since", [2, 0])
def test_a_peer_that_catches_up_tells_its_guard_who_made_the_rounds_that_it_missed(monkeypatch, since):
    monkeypatch.setattr(round_loop, "MISSED_ROUNDS", 4)
    rounds, missed = LineageRounds.__new__(LineageRounds), []
    signed = ["ab", "ab", "abx", "ay", "by"]
    chain = [SimpleNamespace(signatures=dict.fromkeys(names)) for names in signed]
    rounds._matchmaker = SimpleNamespace(caught_up=lambda: None)
    rounds._guard = rounds._retry = SimpleNamespace(missed=lambda names: missed.append("".join(names)))
    rounds.store = SimpleNamespace(history=SimpleNamespace(chain=chain))
    rounds.on_caught_up(since)
    assert missed == [names for names in signed[max(1, since) :] for _ in ("guard", "retry")]
