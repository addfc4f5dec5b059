from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json, seal
from peer.protocol.wire import MAX_ROSTER_BYTES, Kind, StatusMessage
from peer.swarm.group.roster import RosterMessage, roster_order
from peer.swarm.net.stream import StreamClosedError
from tests.swarm.gathering import JOIN_NAME, PARENT, RUN, gather, join_of

STRANGER = Identity.generate()
OTHERS = [Identity.generate() for _ in range(3)]
AWAKE = StatusMessage(coming=True, round=5, lineage_id=PARENT, weight=100, leader=STRANGER.peer_id)


def forged_joins(me):
    """What a Byzantine peer may hand in."""
    return {
        "signed by another": join_of(STRANGER)[0],
        "another domain": seal(me, "vote", dump_json(join_of(me)[1])),
        "another run": join_of(me, run_id="f" * 64)[0],
        "another round at our lineage id": join_of(me, round=4)[0],
        "a later round at our lineage id": join_of(me, round=6)[0],
        "another fragment": join_of(me, fragment=1)[0],
        "data of a run that shares none": join_of(me, ranges="0:0-1")[0],
        "no join": seal(me, "join", b"{}"),
        "flipped": join_of(me)[0][:-1] + b" ",
        "garbage": b"\xff" * 300,
        "too large": seal(me, "join", b" " * 4096),
        "empty": b"",
    }


@pytest.mark.parametrize("name", forged_joins(STRANGER))
async def test_a_forged_join_is_refused(network, caplog, name):
    leader, byzantine = await gather(network, 2)
    stream = await byzantine.hand_in(leader, forged_joins(byzantine.node.identity)[name])
    with pytest.raises(StreamClosedError):
        await asyncio.wait_for(stream.receive({Kind.ROSTER: 10**5, Kind.REJECT: 10**5}), 5.0)
    assert not leader.matchmaker.anybody_waiting
    assert "dropped a stream" in caplog.text


def roster(*sealed):
    return Kind.ROSTER, dump_json(RosterMessage(joins=tuple(one.hex() for one in sealed)))


def ordered(mine, peer_id, *identities, **changes):
    """A roster in its right order: one member's own join and those of others."""
    joins = {peer_id: mine, **{one.peer_id: join_of(one, **changes)[0] for one in identities}}
    return roster(*(joins[key] for key in roster_order(RUN, joins)))


def hostile_answers(me, mine, peer_id):
    """What a leader may answer to the join `mine` of `peer_id`, by the reason that the member must give."""
    return {
        "lacks this peer's own join": ordered(join_of(STRANGER)[0], STRANGER.peer_id, me),
        "or the leader's": ordered(mine, peer_id, STRANGER),
        "5 members; the run allows 4": ordered(mine, peer_id, me, *OTHERS),
        "for another round": ordered(mine, peer_id, me, round=4),
        "is for another round": ordered(mine, peer_id, me, run_id="f" * 64),
        "reach beyond 0": ordered(mine, peer_id, me, ranges="0:0-1"),
        "members twice or out of order": roster(mine, mine, join_of(me)[0]),
        "no valid signature": roster(mine, join_of(me)[0][:-1] + b" "),
        "not hexadecimal": (Kind.ROSTER, b'{"joins":["xx","yy"]}'),
        "malformed RosterMessage": (Kind.ROSTER, b"[" * 60_000),
        "malformed RejectMessage": (Kind.REJECT, b'{"reason":"dislike"}'),
        "malformed StatusMessage": (Kind.STATUS, b'{"coming":1}'),
        "expected STATUS or REJECT or ROSTER": (Kind.END, b""),
        f"the limit is {MAX_ROSTER_BYTES}": (Kind.ROSTER, bytes(MAX_ROSTER_BYTES + 1)),
    }


@pytest.mark.parametrize("reason", hostile_answers(OTHERS[0], b"", ""))
async def test_a_bad_answer_aborts_the_round_and_names_the_leader(network, reason):
    leader, member = await gather(network, 2, high=4)

    async def serve(stream):
        _, sealed = await stream.receive({Kind.JOIN: 4096})
        if reason != "malformed StatusMessage":
            await stream.send_message(Kind.STATUS, AWAKE)
        await stream.send(*hostile_answers(leader.node.identity, sealed, member.peer_id)[reason])
        await stream.closed()

    await leader.node.serve(JOIN_NAME, "round", serve)
    with pytest.raises(RoundAborted) as caught:
        await member.match()
    assert (caught.value.phase, caught.value.culprit) == ("match", leader.peer_id)
    assert reason in caught.value.reason


async def test_an_honest_roster_of_the_same_make_is_accepted(network):
    leader, member = await gather(network, 2, high=4)

    async def serve(stream):
        _, sealed = await stream.receive({Kind.JOIN: 4096})
        await stream.send_message(Kind.STATUS, AWAKE)
        await stream.send(*ordered(sealed, member.peer_id, leader.node.identity, *OTHERS[:2]))
        await stream.closed()

    await leader.node.serve(JOIN_NAME, "round", serve)
    group = await member.match()
    assert {one.peer_id for one in group.members} == {
        leader.peer_id, member.peer_id, OTHERS[0].peer_id, OTHERS[1].peer_id
    }  # fmt: skip
