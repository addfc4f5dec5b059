"""Circles of real exchanges in which a member stalls or lies, with guards and short deadlines."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from tests.swarm.circle import Circle
from tests.swarm.gathering import until


async def circle_of(network, folder, count=4, deadline_s=0.6):
    network.retime(
        min_exchange_s=deadline_s, soft_exchange_s=deadline_s / 2, stall_words_s=1.5, least_waste_s=1.0, dispute_s=600.0
    )  # a refusal outlasts the test, and the words of a member that has no processor for a second count
    circle = await Circle(network, count, folder=folder).start()
    for seat in circle.seats:
        seat.exchange._budget._cap_s = deadline_s
    return circle


def stalls(seat, kind, victim=None):
    """Let a member send frames of this kind never: to all, or to one."""
    opening = seat.node.open

    async def opened(peer_id, *arguments, **options):
        stream = await opening(peer_id, *arguments, **options)
        send = stream.send

        async def sends(what, *rest, **more):
            if what is kind and victim in (None, peer_id):
                await asyncio.Event().wait()
            await send(what, *rest, **more)

        stream.send = sends
        return stream

    seat.node.open = opened


async def failed_round(circle):
    """A round of all that fails; -> what each member says."""
    locals_, said = circle.locals(), []
    circle._joins = None
    firsts = [circle._first(seat) for seat in circle.seats]

    async def one(index):
        seat = circle.seats[index]
        with pytest.raises(RoundAborted) as caught:
            await circle.one_round(index, locals_[index], firsts[index])
        await seat.exchange.release(firsts[index], caught.value)

    await asyncio.wait_for(asyncio.gather(*(one(index) for index in range(len(circle.seats)))), 20.0)
    group = firsts[0].id
    await until(lambda: all(seat.guard.stalls._failures[group].settled for seat in circle.seats), 5.0)
    for seat in circle.seats:
        said.append(seat.guard.stalls._failures[group].lacks)
    return said


def refused(circle, seat):
    return {other.peer_id for other in circle.seats if seat.guard.refuses(other.peer_id)}


def sends(seat, sending):
    """Let a member send its frames by this: (stream, its own `send`, frame kind, body)."""
    opening = seat.node.open

    async def opened(*arguments, **options):
        stream = await opening(*arguments, **options)
        send = stream.send

        async def by(kind, body=b"", *rest, **more):
            await sending(stream, lambda other=body: send(kind, other, *rest, **more), kind, body)

        stream.send = by
        return stream

    seat.node.open = opened
