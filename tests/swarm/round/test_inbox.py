from __future__ import annotations

import asyncio

import pytest

from peer.errors import ProtocolError
from peer.outer.round import RoundAborted
from peer.protocol.statements import REDUCED_SEAL_BYTES, SEAL_BYTES
from peer.protocol.wire import Kind, VoteMessage
from peer.swarm.round.inbox import Inbox
from tests.swarm.gathering import until
from tests.swarm.network import stream_pair

SIZES, REDUCED = (5, 3), (4, 2)
FRAMES = [
    *((Kind.CONTRIBUTION, bytes(size)) for size in SIZES), (Kind.SEAL_SENT, bytes(SEAL_BYTES)),
    *((Kind.REDUCED, bytes([size]) * size) for size in REDUCED), (Kind.SEAL_REDUCED, bytes(REDUCED_SEAL_BYTES)),
]  # fmt: skip
VOTE = VoteMessage(link_id="a" * 64, signature="0" * 128)


async def a_member(frames):
    """A stream on which a member has said this much."""
    ours, theirs = await stream_pair()
    for kind, body in frames:
        await theirs.send(kind, body)
    return ours, theirs


async def until_read(inbox, frames):
    """Until the reader has taken this many frames of the kinds that leave a trace."""
    parts = sum(kind is Kind.CONTRIBUTION for kind, _ in frames)
    reduced = sum(kind is Kind.REDUCED for kind, _ in frames)
    await until(lambda: (inbox.counts[Kind.CONTRIBUTION], inbox.counts[Kind.REDUCED]) == (parts, reduced))


async def test_all_that_a_member_sends_reaches_its_futures():
    ours, theirs = await a_member(FRAMES)
    await theirs.send_message(Kind.VOTE, VOTE)
    inbox = Inbox(SIZES, REDUCED)
    await asyncio.wait_for(inbox.fill(ours), 10.0)
    assert [len(part.result()) for part in inbox.contributed] == [5, 3]
    assert bytes(inbox.reduced.result()) == b"\4\4\4\4\2\2"
    assert inbox.vote.result() == VOTE


async def test_slices_of_codecs_whose_size_depends_on_the_values_may_be_shorter_and_not_longer():
    sizes = [7, 9]
    ours, theirs = await a_member(FRAMES)
    await theirs.send_message(Kind.VOTE, VOTE)
    inbox = Inbox(SIZES, sizes, exact=False)
    await asyncio.wait_for(inbox.fill(ours), 10.0)
    assert (bytes(inbox.reduced.result()), inbox.lengths) == (b"\4\4\4\4\2\2", [4, 2])
    for sizes, exact, announced in (([7, 9], True, 4), ([3, 9], False, 4), ([4, 1], False, 2)):
        ours, _ = await a_member(FRAMES)
        with pytest.raises(ProtocolError, match=rf"{announced} bytes of REDUCED"):
            await asyncio.wait_for(Inbox(SIZES, sizes, exact=exact).fill(ours), 10.0)
    for kind in (Kind.CONTRIBUTION, Kind.SEAL_SENT):  # these are as long as ever
        ours, _ = await a_member([(one, body[:-1] if one is kind else body) for one, body in FRAMES])
        with pytest.raises(ProtocolError, match=f"bytes of {kind.name}; must be"):
            await asyncio.wait_for(Inbox(SIZES, [7, 9], exact=False).fill(ours), 10.0)


@pytest.mark.parametrize("before", range(len(FRAMES) + 1))
async def test_what_comes_after_the_round_has_ended_is_dropped_wherever_that_was(before):
    abort = RoundAborted("exchange", "another member left", culprit="left")
    ours, theirs = await a_member(FRAMES[:before])
    inbox = Inbox(SIZES, REDUCED)
    filling = asyncio.ensure_future(inbox.fill(ours))
    await until_read(inbox, FRAMES[:before])
    inbox.close(abort)
    for kind, body in FRAMES[before:]:
        await theirs.send(kind, body)
    await theirs.send_message(Kind.VOTE, VOTE)
    await asyncio.wait_for(filling, 10.0)  # the stream is read to the end of the round; nothing escapes
    for future in (*inbox.contributed, inbox.reduced):
        with pytest.raises(RoundAborted, match="another member left"):
            await future
