"""A solution is kept beside the key; a record and a join without one are refused."""

from __future__ import annotations

import json

import pytest

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.identity_work import IdentityWork
from peer.protocol.lineage import Position
from peer.protocol.manifest import RoundSpec
from peer.protocol.records import dump_json
from peer.protocol.weights import WeightRule
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.identity_work import solved
from tests.swarm.net.published import ALICE, BOB
from tests.swarm.net.test_directory import reader_of
from tests.swarm.runs import RUN

WORK = IdentityWork(RUN, 8)


async def no_search(*_):
    raise AssertionError("it is known already")


async def test_a_solution_is_kept_for_each_run_and_bits_that_are_raised_need_another(tmp_path, monkeypatch):
    key, told = tmp_path / "identity.key", []
    first = await solved(WORK, ALICE.peer_id, key, told.append)
    assert WORK.shown(ALICE.peer_id, first.nonce)
    other = await solved(IdentityWork("e" * 64, 8), ALICE.peer_id, key, told.append)
    raised = await solved(IdentityWork(RUN, 11), ALICE.peer_id, key, told.append)
    assert IdentityWork(RUN, 11).shown(ALICE.peer_id, raised.nonce)
    kept = json.loads((tmp_path / "identity.key.work").read_text())
    assert kept == {"nonces": {RUN: raised.nonce, "e" * 64: other.nonce}}
    monkeypatch.setattr("peer.swarm.net.identity_work.asyncio.to_thread", no_search)
    assert await solved(IdentityWork(RUN, 11), ALICE.peer_id, key, told.append) == raised
    assert told == []


async def test_a_damaged_file_is_written_again(tmp_path):
    (tmp_path / "identity.key.work").write_text("[")
    found = await solved(WORK, ALICE.peer_id, tmp_path / "identity.key", print)
    assert json.loads((tmp_path / "identity.key.work").read_text()) == {"nonces": {RUN: found.nonce}}


async def test_what_takes_more_than_a_second_is_told_once_with_its_mean(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.swarm.net.identity_work.AT_ONCE", 16)
    seconds = iter(range(100_000))
    told = []
    await solved(IdentityWork(RUN, 10), ALICE.peer_id, tmp_path / "key", told.append, clock=lambda: next(seconds))
    # 16 hashes a second: 2^10 take 64 s
    assert told == ["this run asks for work of each new identity: about 64 s of computing, once"]


async def test_the_directory_shows_only_identities_that_have_done_the_work(network):
    dht, reader = reader_of(network)
    reader.work = WORK
    nonce = WORK.search(ALICE.peer_id, 0, 1 << 16)
    dht.tell(ALICE, work=nonce)
    dht.tell(BOB, work=nonce)
    await reader.refresh()
    assert list(reader.peers) == [ALICE.peer_id]


def authority(identity, nonce=0, work=WORK):
    mine = IdentityWork(work.run_id, work.bits, nonce)
    return RosterAuthority(identity, RUN, RoundSpec(), WeightRule(), work=mine)


def test_a_join_without_the_work_of_its_run_gets_no_seat():
    position = Position(5, "c" * 64, 0)
    nonce = WORK.search(ALICE.peer_id, 0, 1 << 16)
    leader, leader_nonce = Identity.generate(), 0
    leader_nonce = WORK.search(leader.peer_id, 0, 1 << 16)
    leading = authority(leader, leader_nonce)
    _, sealed = authority(ALICE, nonce).join(position, 10)
    assert leading.open_join(sealed, ALICE.peer_id, position).work == nonce
    elsewhere = IdentityWork("f" * 64, 8).search(ALICE.peer_id, nonce + 1, 1 << 16)
    for wrong in (nonce + 1, elsewhere):
        assert not WORK.shown(ALICE.peer_id, wrong)
        _, sealed = authority(ALICE, wrong).join(position, 10)
        with pytest.raises(ProtocolError, match="has not done the work of 8 bits that this run asks for"):
            leading.open_join(sealed, ALICE.peer_id, position)


def test_a_roster_with_an_identity_that_has_not_done_the_work_is_refused():
    position, leader = Position(5, "c" * 64, 0), Identity.generate()
    leading = authority(leader, WORK.search(leader.peer_id, 0, 1 << 16))
    alice, bob = (authority(who, WORK.search(who.peer_id, 0, 1 << 16)) for who in (ALICE, BOB))
    lazy = authority(BOB, work=IdentityWork(RUN, 0))
    mine, sealed = alice.join(position, 10)
    for other, refused in ((bob, False), (lazy, True)):
        joins = {ALICE.peer_id: (sealed, mine), leader.peer_id: leading.join(position, 10)[::-1]}
        joins[BOB.peer_id] = other.join(position, 10)[::-1]
        body = dump_json(leading.write(joins)[0])
        if refused:
            with pytest.raises(ProtocolError, match=f"{BOB.peer_id} has not done the work"):
                alice.read(body, sealed, mine, leader.peer_id)
        else:
            assert len(alice.read(body, sealed, mine, leader.peer_id).members) == 3
