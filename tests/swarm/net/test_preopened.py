from __future__ import annotations

import asyncio

import pytest

from peer.swarm.net.preopened import PreopenedStream
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.timing import STANDARD
from peer.system.clock import boot_clock


class Opened:
    def __init__(self, remote):
        self.remote, self.closed = remote, False

    def close(self):
        self.closed = True


class Opener:
    """Opens when it is allowed to."""

    def __init__(self):
        self.opened, self.allowed = [], asyncio.Event()
        self.error = None

    async def __call__(self, remote):
        await self.allowed.wait()
        if self.error is not None:
            raise self.error
        self.opened.append(Opened(remote))
        return self.opened[-1]


@pytest.fixture
async def opener():
    return Opener()


async def turn():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_who_asks_takes_it_and_the_next_opens_another(opener):
    stream = PreopenedStream(opener, "donor", STANDARD.preopened_kept_s, boot_clock)
    opener.allowed.set()
    await turn()
    assert len(opener.opened) == 1  # before anybody has asked
    assert await stream.open("other") is opener.opened[1]
    assert await stream.open("donor") is opener.opened[0]
    assert await stream.open("donor") is opener.opened[2]
    await stream.close()
    assert not any(one.closed for one in opener.opened)


async def test_one_that_the_donor_may_have_given_up_is_closed_and_replaced(opener):
    opener.allowed.set()
    stream = PreopenedStream(opener, "donor", -1.0, boot_clock)
    assert await stream.open("donor") is opener.opened[1]
    assert [one.closed for one in opener.opened] == [True, False]


async def test_one_that_failed_before_anybody_asked_is_tried_again(opener):
    stream = PreopenedStream(opener, "donor", STANDARD.preopened_kept_s, boot_clock)
    opener.error = StreamClosedError("donor", "cannot be reached")
    opener.allowed.set()
    await turn()
    with pytest.raises(StreamClosedError, match="cannot be reached"):
        await stream.open("donor")
    opener.error = None
    assert await stream.open("donor") is opener.opened[0]

    opener.error = StreamClosedError("donor", "cannot be reached")
    stream = PreopenedStream(opener, "donor", STANDARD.preopened_kept_s, boot_clock)
    await turn()
    opener.error = None
    assert await stream.open("donor") is opener.opened[1]


@pytest.mark.parametrize("when", ["opening", "open", "failed"])
async def test_what_nobody_took_is_closed(opener, when):
    stream = PreopenedStream(opener, "donor", STANDARD.preopened_kept_s, boot_clock)
    if when == "failed":
        opener.error = StreamClosedError("donor", "cannot be reached")
    if when != "opening":
        opener.allowed.set()
        await turn()
    await stream.close()
    assert all(one.closed for one in opener.opened)
    assert len(opener.opened) == (when == "open")


async def test_who_gives_up_while_it_opens_leaves_nothing_open(opener):
    stream = PreopenedStream(opener, "donor", STANDARD.preopened_kept_s, boot_clock)
    asking = asyncio.ensure_future(stream.open("donor"))
    await turn()
    asking.cancel()
    await asyncio.wait({asking})
    opener.allowed.set()
    await turn()
    assert asking.cancelled()
    assert opener.opened == []
