"""The scripted attacks: from a stranger with a connection, from the DHT, and from a member of the group."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial

from peer.protocol.identity import Identity
from peer.protocol.records import MANIFEST_KEY, dump_json, seal
from peer.protocol.wire import (
    AbortMessage,
    HistoryRequest,
    InviteMessage,
    JoinMessage,
    Kind,
    RejectMessage,
    SnapshotMeta,
    StatusMessage,
    VoteMessage,
)
from peer.swarm.directory import write_record
from peer.swarm.keeper import Position
from peer.swarm.roster import JOIN_DOMAIN, RosterMessage, roster_key
from peer.swarm.streams import Stream, StreamClosedError
from tests.network.chaos.attacker import HANDLERS, Attacker, header

Script = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Script] = {}
FIRST_KINDS = {"join": Kind.JOIN, "invite": Kind.INVITE, "round": Kind.HELLO, "history": Kind.REQUEST}
FLOOD = 40
HEAVIER = 2**52


def attack(name: str) -> Callable[[Script], Script]:
    """Under this name in `ATTACKS`."""

    def keep(script: Script) -> Script:
        ATTACKS[name] = script
        return script

    return keep


# -- a stranger: every stream handler, before it knows anything of who speaks ------------------------------------------


def _bytes_first(handler: str, data: bytes) -> Script:
    async def script(a: Attacker) -> None:
        stream = await a.open(handler)
        a.raw(stream, data)
        await a.dropped(stream)

    return script


async def _one_byte_a_second(handler: str, a: Attacker) -> None:
    stream = await a.open(handler)

    async def drip() -> None:
        for byte in header(FIRST_KINDS[handler], 60):
            a.raw(stream, bytes([byte]))
            await asyncio.sleep(1.0)

    dripping = asyncio.ensure_future(drip())
    try:
        await a.dropped(stream)
    finally:
        dripping.cancel()


async def _flood(handler: str, a: Attacker) -> None:
    """More silent streams than one peer may have; they must all be gone soon."""
    streams = []
    for _ in range(FLOOD):
        with contextlib.suppress(StreamClosedError):
            streams.append(await a.open(handler))
    await asyncio.gather(*(a.dropped(stream) for stream in streams))


async def _come_and_go(handler: str, a: Attacker) -> None:
    for _ in range(FLOOD):
        with contextlib.suppress(StreamClosedError):
            stream = await a.open(handler)
            a.raw(stream, header(FIRST_KINDS[handler], 500) + bytes(a.rng.randrange(400)))
            stream.close()


for _handler, _kind in FIRST_KINDS.items():
    ATTACKS[f"{_handler}: 2 GB announced"] = _bytes_first(_handler, header(_kind, 2**31))
    ATTACKS[f"{_handler}: 4 GB announced"] = _bytes_first(_handler, header(_kind, 2**32 - 1))
    ATTACKS[f"{_handler}: another kind"] = _bytes_first(_handler, header(Kind.VOTE, 0))
    ATTACKS[f"{_handler}: no frame at all"] = _bytes_first(_handler, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    ATTACKS[f"{_handler}: nested JSON"] = _bytes_first(_handler, header(_kind, 4000) + b"[" * 4000)
    ATTACKS[f"{_handler}: one byte a second"] = partial(_one_byte_a_second, _handler)
    ATTACKS[f"{_handler}: flood of silent streams"] = partial(_flood, _handler)
    ATTACKS[f"{_handler}: come and go"] = partial(_come_and_go, _handler)
assert set(FIRST_KINDS) == set(HANDLERS)


# -- joins, invitations, history ---------------------------------------------------------------------------------------


async def _hand_in(a: Attacker, sealed: bytes) -> None:
    stream = await a.open("join")
    await stream.send(Kind.JOIN, sealed)
    await a.dropped(stream)


@attack("join: signed by somebody else")
async def _(a: Attacker) -> None:
    now = await a.position()
    join, _ = a.rosters.join(now, 100)
    await _hand_in(a, seal(Identity.generate(), JOIN_DOMAIN, dump_json(join)))


@attack("join: signed for something else")
async def _(a: Attacker) -> None:
    join, _ = a.rosters.join(await a.position(), 100)
    await _hand_in(a, seal(a.node.identity, "vote", dump_json(join)))


@attack("join: another run")
async def _(a: Attacker) -> None:
    now = await a.position()
    join = JoinMessage(run_id="f" * 64, round=now.round, parent=now.lineage_id, tokens=1)
    await _hand_in(a, seal(a.node.identity, JOIN_DOMAIN, dump_json(join)))


@attack("join: a replayed one of an honest peer")
async def _(a: Attacker) -> None:
    roster, _ = await a.take_seat()
    theirs = next(bytes.fromhex(one) for one in roster["joins"] if a.me.encode() not in bytes.fromhex(one))
    await _hand_in(a, theirs)


@attack("join: seats in far rounds")
async def _(a: Attacker) -> None:
    """Joins for rounds to come wait at the leader; one peer has one seat, however often it asks."""
    streams = []
    for number in range(20):
        join = JoinMessage(run_id=a.run_id, round=2**52 + number, parent=f"{number:064x}", tokens=1)
        with contextlib.suppress(StreamClosedError):
            streams.append(await a.open("join"))
            await streams[-1].send(Kind.JOIN, seal(a.node.identity, JOIN_DOMAIN, dump_json(join)))
    for stream in streams:
        stream.close()


@attack("join: a seat that is left at once, again and again")
async def _(a: Attacker) -> None:
    for _ in range(10):
        _, sealed = a.rosters.join(await a.position(), 100)
        with contextlib.suppress(StreamClosedError):
            stream = await a.open("join")
            await stream.send(Kind.JOIN, sealed)
            stream.close()


@attack("invite: from a heavier lineage that is not there")
async def _(a: Attacker) -> None:
    for number in range(5):
        with contextlib.suppress(StreamClosedError):
            await a.invite(a.target, Position(2**40, f"{number + 1:064x}", HEAVIER))


@attack("invite: answers from a heavier lineage that is not there")
async def _(a: Attacker) -> None:
    """To the leader, who must not call every round off for it; it lasts long enough for many."""

    async def claim(stream: Stream) -> None:
        await stream.receive({Kind.INVITE: 1 << 16})
        status = StatusMessage(coming=False, round=2**40, lineage_id="d" * 64, weight=HEAVIER, leader=a.me)
        await stream.send_message(Kind.STATUS, status)
        await stream.closed()

    a.answers["invite"] = claim
    before = await a.position()
    for _ in range(6):
        await a.publish(a.record(await a.position()))
        await asyncio.sleep(5.0)
    now = await a.position()
    assert now.round > before.round, f"no round while it claimed to be ahead: still {now.round}"


@attack("invite: flood for the present round")
async def _(a: Attacker) -> None:
    for _ in range(FLOOD):
        with contextlib.suppress(StreamClosedError, asyncio.TimeoutError):
            await a.invite(a.target, await a.position())


@attack("invite: another run")
async def _(a: Attacker) -> None:
    now = await a.position()
    stream = await a.open("invite")
    invite = InviteMessage(run_id="f" * 64, round=now.round, parent=now.lineage_id, weight=now.weight, wait_s=1e11)
    await stream.send_message(Kind.INVITE, invite)
    await a.dropped(stream)


async def _ask(a: Attacker, request: HistoryRequest) -> Stream:
    stream = await a.open("history")
    await stream.send_message(Kind.REQUEST, request)
    return stream


@attack("history: another run")
async def _(a: Attacker) -> None:
    await a.dropped(await _ask(a, HistoryRequest(what="chain", run_id="f" * 64)))


@attack("history: a chain from the end of time")
async def _(a: Attacker) -> None:
    await a.dropped(await _ask(a, HistoryRequest(what="chain", run_id=a.run_id, from_round=2**53 - 1)))


@attack("history: an update that never was")
async def _(a: Attacker) -> None:
    await a.dropped(await _ask(a, HistoryRequest(what="update", run_id=a.run_id, digest="9" * 64)))


@attack("history: chunks that are not there")
async def _(a: Attacker) -> None:
    now = await a.position()
    await _ask(a, HistoryRequest(what="snapshot", run_id=a.run_id))
    request = HistoryRequest(what="chunks", run_id=a.run_id, digest=now.lineage_id, indexes=(2**24 - 1,) * 64)
    await a.dropped(await _ask(a, request))


@attack("history: the same chunks for ever")
async def _(a: Attacker) -> None:
    offer = await _ask(a, HistoryRequest(what="snapshot", run_id=a.run_id))
    kind, body = await asyncio.wait_for(offer.receive({Kind.META: 1 << 16, Kind.END: 0}), 10.0)
    offer.close()
    assert kind is Kind.META, "a peer that trains has a snapshot"
    request = HistoryRequest(what="chunks", run_id=a.run_id, digest=json.loads(body)["lineage_id"], indexes=(0,) * 64)
    stream = await _ask(a, request)
    with contextlib.suppress(StreamClosedError):
        for _ in range(50):
            await stream.send_message(Kind.REQUEST, request)
    await a.dropped(stream)


@attack("history: whoever asks and does not read")
async def _(a: Attacker) -> None:
    streams = []
    for _ in range(12):
        with contextlib.suppress(StreamClosedError):
            streams.append(await _ask(a, HistoryRequest(what="chain", run_id=a.run_id)))
    honest = await _ask(a, HistoryRequest(what="update", run_id=a.run_id, digest="9" * 64))
    with contextlib.suppress(StreamClosedError):  # a place is left for another kind of request
        await asyncio.wait_for(honest.receive({Kind.END: 0}), 10.0)
    for stream in [*streams, honest]:
        stream.close()


# -- the directory -----------------------------------------------------------------------------------------------------


@attack("directory: a record under an honest peer's name")
async def _(a: Attacker) -> None:
    now = await a.position()
    await a.publish(a.record(now, state="finished"), owner=a.target)


@attack("directory: heavier ghosts")
async def _(a: Attacker) -> None:
    """Peers that nobody can reach and that claim to be far ahead."""
    for number in range(20):
        ghost = Identity.generate()
        await a.publish(a.record(Position(2**40, f"{number + 7:064x}", HEAVIER + number)), ghost)
    await asyncio.sleep(3.0)


@attack("directory: ghosts that train with us")
async def _(a: Attacker) -> None:
    """Peers that nobody can reach, at the place where everybody is: expected, and never coming."""
    for _ in range(20):
        await a.publish(a.record(await a.position()), Identity.generate())
    await asyncio.sleep(3.0)


@attack("directory: a heavier lineage with a hostile donor")
async def _(a: Attacker) -> None:
    answers = [
        (Kind.END, b""), (Kind.DATA, b"{}"), (Kind.DATA, b"[" * 60_000), (Kind.VOTE, b""), (Kind.DATA, bytes(65_537)),
    ]  # fmt: skip

    async def lie(stream: Stream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        await stream.send(*a.rng.choice(answers))
        await stream.closed()

    await _hostile_donor(a, lie)


@attack("directory: a donor whose snapshot is absurd")
async def _(a: Attacker) -> None:
    async def lie(stream: Stream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        meta = SnapshotMeta(round=9, lineage_id="e" * 64, numel=2**39, num_buffers=4, num_chunks=2**24 - 1)
        await stream.send_message(Kind.META, meta)
        await stream.closed()

    await _hostile_donor(a, lie)


@attack("directory: a donor that says nothing")
async def _(a: Attacker) -> None:
    async def lie(stream: Stream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        await stream.closed()

    await _hostile_donor(a, lie)


@attack("directory: a donor whose answer never ends")
async def _(a: Attacker) -> None:
    async def lie(stream: Stream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        a.raw(stream, header(Kind.DATA, 60_000))
        with contextlib.suppress(StreamClosedError):
            for _ in range(20):
                a.raw(stream, b"{")
                await asyncio.sleep(0.5)

    await _hostile_donor(a, lie)


async def _hostile_donor(a: Attacker, lie: Callable[[Stream], Awaitable[None]]) -> None:
    asked = asyncio.Event()

    async def answer(stream: Stream) -> None:
        asked.set()
        await lie(stream)

    a.answers["history"] = answer
    await a.publish(a.record(Position(2**40, "e" * 64, HEAVIER)))
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asked.wait(), 10.0)
        await asyncio.sleep(2.0)


@attack("directory: garbage, giants and immortals")
async def _(a: Attacker) -> None:
    now = await a.position()
    key = f"atoll/{a.run_id}/peers"
    for blob in (b"", bytes(4096), bytes(100_000), seal(a.node.identity, "peer", b"{}"), b"\xff" * 200):
        await write_record(a.node, key, blob, time.time() + 10.0)
    await write_record(a.node, key, seal(a.node.identity, "peer", dump_json(a.record(now))), time.time() + 10**6)


@attack("directory: other runs under the manifest's key")
async def _(a: Attacker) -> None:
    for _ in range(5):
        ghost = Identity.generate()
        await write_record(a.node, MANIFEST_KEY, seal(ghost, "manifest", b"\x78\x9c"), time.time() + 60, ghost.peer_id)


# -- a member of the group ---------------------------------------------------------------------------------------------


def _member(*frames: tuple[Kind, bytes], linger_s: float = 2.0) -> Script:
    """Take a seat, begin the exchange properly, then say this to everybody."""

    async def script(a: Attacker) -> None:
        a.absorb()
        _, group_id = await a.take_seat()
        streams = []
        for peer_id in a.honest:
            with contextlib.suppress(StreamClosedError):
                stream = await a.speak(group_id, peer_id)
                streams.append(stream)
                for kind, body in frames:
                    await stream.send(kind, body)
        await asyncio.sleep(linger_s)
        for stream in streams:
            stream.close()

    return script


NAN = struct.pack("<f", float("nan"))
ATTACKS["member: leaves after the roster"] = _member(linger_s=0.0)
ATTACKS["member: a part of the wrong size"] = _member((Kind.PART, bytes(100)))
ATTACKS["member: a part of 64 MB"] = _member((Kind.PART, bytes(1 << 26)))
ATTACKS["member: a part without bytes"] = _member((Kind.PART, b""))
ATTACKS["member: a mean before anything"] = _member((Kind.REDUCED, NAN * 600))
ATTACKS["member: a vote at once"] = _member(
    (Kind.VOTE, dump_json(VoteMessage(link_id="a" * 64, signature="0" * 128)))
)
ATTACKS["member: frames of another conversation"] = _member((Kind.JOIN, bytes(300)), (Kind.META, b"{}"))
ATTACKS["member: an abort that is no abort"] = _member((Kind.ABORT, b'{"reason": 5}'))


@attack("member: an abort that blames an honest peer")
async def _(a: Attacker) -> None:
    blame = dump_json(AbortMessage(reason="it lies", culprit=a.honest[1]))
    for _ in range(3):
        await _member((Kind.ABORT, blame), linger_s=0.2)(a)


@attack("member: says nothing until the deadline")
async def _(a: Attacker) -> None:
    a.absorb()
    await a.take_seat()
    await asyncio.sleep(8.0)


@attack("member: two beginnings")
async def _(a: Attacker) -> None:
    a.absorb()
    _, group_id = await a.take_seat()
    streams = [await a.speak(group_id, a.target) for _ in range(2)]
    await asyncio.sleep(1.0)
    for stream in streams:
        stream.close()


@attack("group: streams for groups that are not")
async def _(a: Attacker) -> None:
    streams = []
    for number in range(FLOOD):
        with contextlib.suppress(StreamClosedError):
            streams.append(await a.speak(f"{number:064x}", a.target))
    await asyncio.gather(*(a.dropped(stream) for stream in streams))


# -- the leader --------------------------------------------------------------------------------------------------------


def _leader(answer: Callable[[Attacker, list[bytes], int], tuple[Kind, bytes] | None], rounds: int = 2) -> Script:
    """Lead; -> to each of the honest, what `answer` makes of their joins and the place of this one."""

    async def script(a: Attacker) -> None:
        async with a.leading() as joins:
            for _ in range(rounds):
                gathered = [await asyncio.wait_for(joins.get(), 25.0)]
                with contextlib.suppress(asyncio.TimeoutError):
                    gathered.append(await asyncio.wait_for(joins.get(), 1.0))
                for place, (stream, _) in enumerate(gathered):
                    frame = answer(a, [sealed for _, sealed in gathered], place)
                    with contextlib.suppress(StreamClosedError):
                        await (stream.send(*frame) if frame else asyncio.sleep(1.0))

    return script


def _roster(a: Attacker, joins: list[bytes], tokens: int) -> tuple[Kind, bytes]:
    """A roster of these and this leader, in its order; its own join has this weight."""
    theirs = json.loads(joins[0][joins[0].index(b"{") :])
    mine = JoinMessage.model_validate({**theirs, "tokens": tokens})
    sealed = [*joins, seal(a.node.identity, JOIN_DOMAIN, dump_json(mine))]
    order = sorted(sealed, key=lambda one: roster_key(mine.parent, one[1 : 1 + one[0]].decode()))
    return Kind.ROSTER, dump_json(RosterMessage(joins=tuple(one.hex() for one in order)))


def _reject(reason: str, leader: str | None = None, round: int = 0) -> tuple[Kind, bytes]:
    message = RejectMessage.model_validate({"reason": reason, "leader": leader, "round": round})
    return Kind.REJECT, dump_json(message)


ATTACKS["leader: two rosters for one round"] = _leader(lambda a, joins, place: _roster(a, joins, 10 + place))
ATTACKS["leader: a roster without who asks"] = _leader(lambda a, joins, place: _roster(a, joins[:place], 10))
ATTACKS["leader: says nothing"] = _leader(lambda *_: None, rounds=1)
ATTACKS["leader: garbage for a roster"] = _leader(lambda *_: (Kind.ROSTER, b'{"joins": ["zz", "00"]}'))
ATTACKS["leader: follow each other in a circle"] = _leader(
    lambda a, _, place: _reject("follow", a.honest[place % 2]), rounds=6
)
ATTACKS["leader: everybody is behind"] = _leader(lambda *_: _reject("behind", round=2**50))
