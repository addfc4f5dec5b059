"""The scripted attacks, continued: by records in the DHT, by a member of the group, by its leader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

from peer.protocol.identity import SIGNATURE_BYTES, Identity
from peer.protocol.lineage import Position
from peer.protocol.records import MANIFEST_KEY, dump_json, seal
from peer.protocol.wire import (
    AbortMessage,
    JoinMessage,
    Kind,
    RejectMessage,
    SnapshotMeta,
    VoteMessage,
)
from peer.swarm.group.roster import JOIN_DOMAIN, lot
from peer.swarm.net.directory import write_record
from peer.swarm.net.stream import FrameStream, StreamClosedError
from tests.network.chaos.attacker import SEAT_WITHIN_S, Attacker, GivenUpError, header
from tests.network.chaos.scripts import ATTACKS, FLOOD, HEAVIER, Script, attack

__all__ = ["ATTACKS"]

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

    async def lie(stream: FrameStream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        await stream.send(*a.rng.choice(answers))
        await stream.closed()

    await _hostile_donor(a, lie)


@attack("directory: a donor whose snapshot is absurd")
async def _(a: Attacker) -> None:
    async def lie(stream: FrameStream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        meta = SnapshotMeta(round=9, lineage_id="e" * 64, fragments=(2**39,), num_buffers=4, num_chunks=2**24 - 1)
        await stream.send_message(Kind.META, meta)
        await stream.closed()

    await _hostile_donor(a, lie)


@attack("directory: a donor that says nothing")
async def _(a: Attacker) -> None:
    async def lie(stream: FrameStream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        await stream.closed()

    await _hostile_donor(a, lie)


@attack("directory: a donor whose answer never ends")
async def _(a: Attacker) -> None:
    async def lie(stream: FrameStream) -> None:
        await stream.receive({Kind.REQUEST: 1 << 16})
        a.raw(stream, header(Kind.DATA, 60_000))
        with contextlib.suppress(StreamClosedError):
            for _ in range(20):
                a.raw(stream, b"{")
                await asyncio.sleep(0.5)

    await _hostile_donor(a, lie)


async def _hostile_donor(a: Attacker, lie: Callable[[FrameStream], Awaitable[None]]) -> None:
    asked = asyncio.Event()

    async def answer(stream: FrameStream) -> None:
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


def _member(*frames: tuple[Kind, bytes], linger_s: float = 2.0, seat_within_s: float = SEAT_WITHIN_S) -> Script:
    """Take a seat, begin the exchange properly, then say this to everybody."""

    async def script(a: Attacker) -> None:
        a.absorb()
        _, group_id = await a.take_seat(seat_within_s)
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
ATTACKS["member: a contribution of the wrong size"] = _member((Kind.CONTRIBUTION, bytes(100)))
ATTACKS["member: a contribution of 64 MB"] = _member((Kind.CONTRIBUTION, bytes(1 << 26)))
ATTACKS["member: a contribution without bytes"] = _member((Kind.CONTRIBUTION, b""))
ATTACKS["member: a mean before anything"] = _member((Kind.REDUCED, NAN * 600))
ATTACKS["member: a vote at once"] = _member(
    (Kind.VOTE, dump_json(VoteMessage(link_id="a" * 64, signature="0" * 128)))
)
ATTACKS["member: frames of another conversation"] = _member((Kind.JOIN, bytes(300)), (Kind.META, b"{}"))
ATTACKS["member: an abort that is no abort"] = _member((Kind.ABORT, b'{"reason": 5}'))


@attack("member: an abort that blames an honest peer")
async def _(a: Attacker) -> None:
    blame = dump_json(AbortMessage(reason="it lies", culprit=a.honest[1]))
    await _member((Kind.ABORT, blame), linger_s=0.2)(a)
    with contextlib.suppress(GivenUpError):  # the others may refuse a seat to a member that has ended their round
        for _ in range(2):
            await _member((Kind.ABORT, blame), linger_s=0.2, seat_within_s=5.0)(a)


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
    """Lead; -> to each of the honest, what `answer` makes of their joins and the place of this one.

    Args:
        rounds: at most: after the first, the honest may refuse this leader.
    """

    async def script(a: Attacker) -> None:
        async with a.leading() as joins:
            for made in range(rounds):
                try:
                    gathered = [await asyncio.wait_for(joins.get(), 25.0)]
                except TimeoutError:
                    if not made:
                        raise
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    gathered.append(await asyncio.wait_for(joins.get(), 1.0))
                for place, (stream, _) in enumerate(gathered):
                    frame = answer(a, [sealed for _, sealed in gathered], place)
                    with contextlib.suppress(StreamClosedError):
                        await (stream.send(*frame) if frame else asyncio.sleep(1.0))

    return script


def _roster(a: Attacker, asking: bytes, joins: list[bytes], tokens: int) -> tuple[Kind, bytes]:
    """A roster of these and this leader for the round of who asks, in its order; its own join has this weight."""
    theirs = json.loads(asking[1 + asking[0] + SIGNATURE_BYTES :])
    mine = JoinMessage.model_validate({**theirs, "tokens": tokens})
    sealed = [*joins, seal(a.node.identity, JOIN_DOMAIN, dump_json(mine))]
    order = sorted(sealed, key=lambda one: lot(mine.run_id, one[1 : 1 + one[0]].decode()))
    return Kind.ROSTER, json.dumps({"joins": [one.hex() for one in order]}).encode()


def _reject(reason: str, leader: str | None = None, **claims: Any) -> tuple[Kind, bytes]:
    message = RejectMessage.model_validate({"reason": reason, "leader": leader, **claims})
    return Kind.REJECT, dump_json(message)


ATTACKS["leader: two rosters for one round"] = _leader(
    lambda a, joins, place: _roster(a, joins[place], joins, 10 + place)
)
ATTACKS["leader: a roster without who asks"] = _leader(
    lambda a, joins, place: _roster(a, joins[place], joins[:place] + joins[place + 1 :], 10)
)
ATTACKS["leader: says nothing"] = _leader(lambda *_: None, rounds=1)
ATTACKS["leader: garbage for a roster"] = _leader(lambda *_: (Kind.ROSTER, b'{"joins": ["zz", "00"]}'))
ATTACKS["leader: follow each other in a circle"] = _leader(
    lambda a, _, place: _reject("follow", a.honest[place % 2]), rounds=6
)
# once: it cannot show it, and is avoided from then on
ATTACKS["leader: everybody is behind"] = _leader(lambda *_: _reject("behind", round=2**50), rounds=1)
ATTACKS["leader: everybody is behind a lineage that is not there"] = _leader(
    lambda *_: _reject("behind", round=2**50, weight=2**50, lineage_id="f" * 64), rounds=1
)
