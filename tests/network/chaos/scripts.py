"""The scripted attacks: by a stranger with a connection. `insiders` has the others, and makes `ATTACKS` whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from functools import partial

from peer.protocol.identity import Identity
from peer.protocol.lineage import Position
from peer.protocol.records import dump_json, seal
from peer.protocol.wire import (
    HistoryRequest,
    InviteMessage,
    JoinMessage,
    Kind,
    StatusMessage,
)
from peer.swarm.group.roster import JOIN_DOMAIN
from peer.swarm.net.stream import FrameStream, StreamClosedError
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

    async def claim(stream: FrameStream) -> None:
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


async def _ask(a: Attacker, request: HistoryRequest) -> FrameStream:
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
