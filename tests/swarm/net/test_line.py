"""The limits of a line, by a clock of the test: rates over every stretch, a month's traffic, hours of rest."""

from __future__ import annotations

import asyncio
import calendar
import json

import pytest

from peer.protocol.line_limits import LineLimits
from peer.protocol.wire import HEADER_BYTES, Kind
from peer.swarm.net.line import AT_ONCE, HEADERS, PIECE_BYTES, Line
from peer.swarm.net.stream import FrameStream, StreamClosedError, Traffic
from tests.swarm.network import stream_pair

FIRST = calendar.timegm((2026, 11, 1, 0, 0, 0))
DAY = 86_400.0


class World:
    """A clock that advances when a limit makes a sender wait."""

    def __init__(self, folder, **limits):
        self.now, self.passed = 0.0, []
        self.folder, self.limits = folder, LineLimits(**limits)
        self.line = self.again()

    def again(self):
        return Line(self.limits, self.folder, lambda: self.now, lambda: FIRST + self.now, self._sleep)

    async def _sleep(self, seconds):
        self.now += seconds

    async def send(self, count):
        await self.line.sending(count)
        self.passed.append((self.now, HEADERS * count))

    def most(self, window_s):
        """Bytes a second in the fullest stretch of so many seconds."""
        most = within = first = 0
        for at, count in self.passed:
            within += count
            while self.passed[first][0] <= at - window_s:
                within -= self.passed[first][1]
                first += 1
            most = max(most, within)
        return most / window_s


@pytest.mark.parametrize("mbit", [1.0, 5.0, 100.0])
async def test_a_rate_is_kept_to_a_twentieth_over_every_half_minute(tmp_path, mbit):
    world = World(tmp_path, up_mbit=mbit)
    bytes_s, sizes = mbit * 125_000, [12, 300, PIECE_BYTES // 2, PIECE_BYTES]
    for _ in range(2):
        began = world.now
        while world.now < began + 40.0:
            await world.send(sizes[len(world.passed) % 4])
        world.now += 100.0  # what was not used in a pause is not caught up
    assert 0.95 * bytes_s <= world.most(30.0) <= 1.05 * bytes_s


async def test_a_vote_does_not_wait_behind_a_contribution_and_is_counted(tmp_path):
    world = World(tmp_path, up_mbit=1.0)
    contribution = asyncio.ensure_future(world.line.sending(1_000_000))
    await world.line.sending(300)
    assert world.now == 0.0
    await contribution
    await world.line.sending(PIECE_BYTES)
    assert world.now == pytest.approx(HEADERS * (1_000_300 + PIECE_BYTES) / 125_000, rel=0.05)


async def test_both_directions_have_limits_of_their_own(tmp_path):
    world = World(tmp_path, up_mbit=8.0, down_mbit=80.0)
    await world.line.received(10_000_000)
    assert world.now == pytest.approx(HEADERS, rel=0.01)
    await world.line.sending(1_000_000)
    assert world.now == pytest.approx(2 * HEADERS, rel=0.1)


async def test_streams_wait_in_both_directions(tmp_path):
    sending, receiving = World(tmp_path, up_mbit=8.0), World(tmp_path, down_mbit=4.0)
    ours, theirs = await stream_pair()
    ours = FrameStream("right", ours._pipe, Traffic(), sending.line)
    theirs = FrameStream("left", theirs._pipe, Traffic(), receiving.line)
    body = bytes(range(256)) * 8192
    _, (kind, received) = await asyncio.gather(
        ours.send(Kind.DATA, body), theirs.receive({Kind.DATA: len(body)}, timeout_s=30.0)
    )
    assert (kind, received) == (Kind.DATA, body)
    seconds = HEADERS * (len(body) + HEADER_BYTES) / 1e6
    assert sending.now == pytest.approx(seconds, rel=0.05)
    assert receiving.now == pytest.approx(2 * seconds, rel=0.05)
    ours.close()
    theirs.close()


async def test_what_a_node_serves_and_asks_for_is_limited(network, tmp_path):
    world = World(tmp_path, up_mbit=8.0, down_mbit=8.0)
    donor, newcomer = network.node(), network.node()
    donor.line = world.line

    async def answer(stream):
        await stream.receive({Kind.REQUEST: 10})
        await stream.send(Kind.DATA, bytes(1_000_000))

    await donor.serve("state", "history", answer)
    stream = await newcomer.open(donor.peer_id, "state", "history")
    await stream.send(Kind.REQUEST, b"please")
    await stream.receive({Kind.DATA: 1_000_000}, timeout_s=30.0)
    assert world.now == pytest.approx(HEADERS, rel=0.05)
    stream.close()


async def test_a_month_has_a_tenth_at_once_and_the_rest_in_proportion(tmp_path):
    world = World(tmp_path, monthly_gb=300.0)
    await world.send(int(300e9 * AT_ONCE / HEADERS))
    assert world.now == pytest.approx(0.0, abs=1.0)
    await world.send(int(9e9 / HEADERS))  # a thirtieth of the rest takes a day
    assert world.now == pytest.approx(DAY, rel=0.04)
    while world.now < 29.9 * DAY:
        await world.send(int(3e9 / HEADERS))
    assert 0.95 * 300e9 <= sum(count for _, count in world.passed) <= 1.01 * 300e9
    world.now = 30.5 * DAY  # December
    before = world.now
    await world.send(int(300e9 * AT_ONCE / HEADERS))
    assert world.now == before


async def test_a_months_traffic_outlives_the_process(tmp_path):
    world = World(tmp_path, monthly_gb=10.0)
    await world.send(500_000_000)
    world.line.close()
    assert json.loads((tmp_path / "traffic.json").read_text()) == {"month": "2026-11", "bytes": 515_000_000}
    assert world.again().month.used == 515_000_000
    (tmp_path / "traffic.json").write_text("half a wor")
    assert world.again().month.used == 0


async def test_a_peer_that_rests_opens_and_serves_no_stream(network, tmp_path, monkeypatch):
    monkeypatch.setattr("time.localtime", __import__("time").gmtime)
    world = World(tmp_path, hours="22-8")
    sleeper, other = network.node(), network.node()
    sleeper.line = world.line

    async def answer(stream):
        await stream.send(Kind.DATA, b"here")

    for node in (sleeper, other):
        await node.serve("state", "history", answer)

    async def answers(asker, asked):
        try:
            stream = await asker.open(asked.peer_id, "state", "history")
            return (await stream.receive({Kind.DATA: 4}, timeout_s=5.0))[1] == b"here"
        except StreamClosedError:
            return False

    assert not sleeper.resting  # it is midnight
    assert await answers(sleeper, other)
    assert await answers(other, sleeper)
    world.now = 9 * 3600.0
    assert sleeper.resting
    assert not await answers(sleeper, other)
    assert not await answers(other, sleeper)
    world.now = 22 * 3600.0
    assert await answers(other, sleeper)
