"""A chain that few established peers signed is followed after a long wait only, in which a peer was awake."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from peer.protocol.identity import Identity
from peer.protocol.lineage import Position
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.chain_scout import NothingNewError
from peer.swarm.catchup.claims import OF_STRANGERS
from peer.swarm.catchup.donors import DonorQueue
from peer.swarm.catchup.fork_choice import ForkChoice
from peer.swarm.catchup.history_server import history_name
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.donor import Joiner, ScriptedDonor
from tests.swarm.network import MemoryNetwork
from tests.swarm.runs import RUN, Run


async def beside_a_forgery(network, folder):
    """A peer's fork choice; and a stranger whose chain only its own made-up identities have signed."""
    run = Run(folder / "run").commit(3)
    forged = run.fork(folder / "forged", [Identity.generate() for _ in range(4)]).commit(5)
    return await beside(network, folder, run, forged, forged.state.lineage_id)


async def beside(network, folder, run, shown, claimed):
    """A peer's fork choice; and a donor that claims one lineage, and shows this chain."""
    stranger = await ScriptedDonor(network.node(), shown).start()
    record = PeerRecord(
        run_id=RUN, nickname="x", state="training", round=8, lineage_id=claimed, lineage_weight=2**40, expires_at=1e10,
    )  # fmt: skip
    position = Position(run.state.round, run.state.lineage_id, run.history.weight)
    store = SimpleNamespace(position=position, history=run.history, valid=True, state=run.state, digest=run.digest)
    directory = SimpleNamespace(reachable={stranger.peer_id: record}, peers={})
    host = SimpleNamespace(on_answer=lambda _: None, on_ahead=lambda: None)
    rules = Joiner(network, folder / "joiner").scout.rules
    return ForkChoice(network.node(), directory, RUN, rules, store, host, None), stranger.peer_id


async def test_a_peer_that_wakes_after_a_night_follows_no_stranger(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.swarm.catchup.claims.LINKS_A_SECOND", math.inf)
    now = [1000.0]
    network = MemoryNetwork(clock=lambda: now[0])
    network.retime(not_heavier_s=0.0)
    choice, stranger = await beside_a_forgery(network, tmp_path)

    async def follows():
        await choice.claims.look_around()
        await asyncio.sleep(0)
        return choice.claims.donors()

    try:
        assert await follows() == []
        now[0] += 8 * 3600.0  # its lid was closed
        assert await follows() == []
        for _ in range(60):
            now[0] += 10.0
            choice.claims.names()
        assert await follows() == [stranger]
    finally:
        await network.close()


async def test_a_chain_that_is_not_followed_is_known_for_seconds(tmp_path):
    now = [1000.0]
    network = MemoryNetwork(clock=lambda: now[0])
    choice, stranger = await beside_a_forgery(network, tmp_path)
    try:
        assert not choice.claims.turned_down(stranger)
        await choice.claims.look_around()
        now[0] += STANDARD.not_heavier_s - 0.1
        assert choice.claims.turned_down(stranger)
        assert choice.claims._queue.distrusted == {stranger}
        now[0] += 0.1
        assert not choice.claims.turned_down(stranger)
    finally:
        await network.close()


async def test_whoever_has_nothing_new_yet_is_not_turned_down(tmp_path):
    network, run = MemoryNetwork(), Run(tmp_path / "run").commit(3)
    choice, donor = await beside(network, tmp_path, run, run, "a" * 64)
    try:
        await choice.claims.look_around()
        assert choice.claims._queue.distrusted == {donor}
        assert not choice.claims.turned_down(donor)
    finally:
        await network.close()


async def test_whoever_claims_what_it_cannot_show_any_more_is_left_for_seconds_only(tmp_path):
    network, run = MemoryNetwork(), Run(tmp_path / "run").commit(3)
    choice, donor = await beside(network, tmp_path, run, run, "a" * 64)
    accused = []
    choice.claims.accuse = lambda donor, why: accused.append((donor, why))

    async def nothing_new(*_):
        raise NothingNewError("the chain does not reach round 4")

    choice.claims.scout.look = nothing_new
    try:
        await choice.claims.look_around()
        assert (choice.claims._queue.distrusted, accused) == ({donor}, [])
    finally:
        await network.close()


async def test_a_full_disk_is_no_fault_of_the_donor(tmp_path, monkeypatch, caplog):
    """It is asked again soon: only one that lies is left alone for a minute."""
    network = MemoryNetwork()
    network.retime(not_heavier_s=0.01, distrust_s=1000.0)
    run = Run(tmp_path / "run").commit(3)
    choice, donor = await beside(network, tmp_path, run, run, run.state.lineage_id)
    newcomer = Joiner(network, tmp_path / "newcomer")
    choice._store = choice.claims._store = SimpleNamespace(
        position=Position(0, run.history.genesis, 0), history=newcomer.history, valid=True
    )  # fmt: skip
    choice.claims.scout = newcomer.scout
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    try:
        await choice.claims.look_around()
        assert "cannot be a donor" not in caplog.text
        assert f"no room for the chain of {donor} in " in caplog.text
        monkeypatch.setattr(os, "pwrite", write)
        async with asyncio.timeout(5.0):
            while not choice.claims.donors():
                await choice.claims.look_around()
                await asyncio.sleep(0)
        assert choice.claims.donors() == [donor]
    finally:
        await network.close()


@pytest.mark.parametrize("silent", [1, 6])
async def test_silent_strangers_hold_up_no_look_at_a_peer_that_has_a_say(tmp_path, silent):
    network = MemoryNetwork()
    network.retime(claim_s=1000.0, recheck_s=0.01)
    run = Run(tmp_path / "run").commit(3)
    shown = run.fork(tmp_path / "longer", run.identities).commit(2)
    choice, donor = await beside(network, tmp_path, run, shown, shown.state.lineage_id)
    choice.claims.scout.has_say = lambda peer_id: peer_id == donor
    (record,), asked, ahead = choice._directory.reachable.values(), asyncio.Semaphore(0), asyncio.Event()
    choice._host.on_ahead = ahead.set

    async def be_silent(_):
        asked.release()
        await asyncio.Event().wait()

    strangers = [network.node() for _ in range(silent)]
    for node in strangers:
        await node.serve(history_name(RUN), "history", be_silent)
    claims = {node.peer_id: record for node in strangers}
    choice._directory.reachable = dict(claims)
    scouting = asyncio.ensure_future(choice.claims.scout_forever())
    try:
        async with asyncio.timeout(5.0):
            for _ in range(min(silent, OF_STRANGERS)):
                await asked.acquire()
            choice._directory.reachable = {**claims, donor: record}  # it comes while the others are awaited
            await ahead.wait()
        assert choice.claims.donors() == [donor]
    finally:
        await cancel_and_wait([scouting])
        await network.close()


async def test_a_look_that_ends_from_within_ends_no_scout(tmp_path):
    network = MemoryNetwork()
    network.retime(recheck_s=0.001)
    run = Run(tmp_path / "run").commit(3)
    choice, _ = await beside(network, tmp_path, run, run, "f" * 64)
    looks = asyncio.Semaphore(0)

    async def look(_):
        looks.release()
        raise asyncio.CancelledError

    choice.claims._look = look
    scouting = asyncio.ensure_future(choice.claims.scout_forever())
    try:
        async with asyncio.timeout(5.0):
            for _ in range(3):
                await looks.acquire()
    finally:
        await cancel_and_wait([scouting])
        await network.close()


@pytest.mark.parametrize("round_s", [30.0, 1800.0])
async def test_the_wait_is_longer_than_the_rounds_of_the_run(tmp_path, monkeypatch, round_s):
    """Between two rounds of half an hour all train, and a former member could end the run's next round alone."""
    monkeypatch.setattr("peer.swarm.catchup.claims.LINKS_A_SECOND", math.inf)
    now = [1000.0]
    network = MemoryNetwork(clock=lambda: now[0])
    network.retime(not_heavier_s=0.0)
    choice, stranger = await beside_a_forgery(network, tmp_path)
    first = choice._store.position

    def wait(seconds):
        for _ in range(int(seconds / 10.0)):
            now[0] += 10.0
            choice.claims.names()

    async def follows():
        await choice.claims.look_around()
        await asyncio.sleep(0)
        return choice.claims.donors()

    try:
        for round in range(3):
            choice._store.position = replace(first, round=round)
            wait(round_s)
        choice._store.position = first
        choice.claims.names()
        wait(max(600.0, 4 * round_s) - 50.0)
        assert await follows() == []
        wait(50.0)
        assert await follows() == [stranger]
    finally:
        await network.close()


def test_a_donor_that_stays_silent_is_asked_ever_more_rarely():
    queue, waits = DonorQueue(), []
    queue.distrust = lambda donor, seconds: waits.append((donor, seconds))
    for _ in range(4):
        queue.distrust_silent("silent", 10.0, 60.0)
    queue.answered("silent")
    queue.distrust_silent("silent", 10.0, 60.0)
    assert waits == [("silent", seconds) for seconds in (10.0, 20.0, 40.0, 60.0, 10.0)]
