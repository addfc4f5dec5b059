"""A snapshot from a donor that serves alone: over two of libp2p's streams, or one connection of its own."""

from __future__ import annotations

import asyncio

import pytest

from peer.protocol.wire import Kind
from peer.swarm.catchup import chunk_download
from peer.swarm.net.stream import FrameStream
from tests.swarm.donor import CHUNKS, assert_same, committed_run, flip, newcomer, scripted_donors

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def run(tmp_path):
    return committed_run(tmp_path)


@pytest.fixture
async def donors(network, run):
    return await scripted_donors(network, run, 2)


@pytest.fixture
def joiner(network, tmp_path):
    return newcomer(network, tmp_path)


async def test_a_donor_that_is_left_alone_is_asked_over_two_streams(run, donors, joiner):
    donors[1].pieces = [None] * CHUNKS
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert donors[0].asked.count("chunks") == 2
    assert how.chunks == {donors[0].peer_id: CHUNKS}


async def test_a_lone_donor_is_asked_over_two_streams_from_the_first_chunk(run, donors, joiner):
    donor, serving, both = donors[0], set(), asyncio.Event()

    def once_both_have_asked(piece):
        async def answer():
            serving.add(asyncio.current_task())
            if len(serving) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 5.0)
            return piece

        return answer

    donor.pieces = [once_both_have_asked(piece) for piece in donor.pieces]
    how = await joiner.catch_up(donor)
    assert_same(joiner, run)
    assert donor.asked.count("chunks") == 2
    assert sorted(donor.chunks_asked) == list(range(CHUNKS))
    assert how.chunks == {donor.peer_id: CHUNKS}


async def test_a_lone_donor_with_a_connection_of_its_own_is_asked_over_that_alone(run, donors, joiner, monkeypatch):
    monkeypatch.setattr(FrameStream, "direct", True)
    await joiner.catch_up(donors[0])
    assert_same(joiner, run)
    assert donors[0].asked.count("chunks") == 1


async def test_a_second_stream_that_finds_no_place_is_left(run, donors, joiner):
    donor = donors[0]

    def unless_second(piece):
        async def answer():
            first.append(asyncio.current_task())
            return piece if first[0] is first[-1] else Kind.BUSY

        return answer

    first = []  # the tasks that serve, the first stream's first of all
    donor.pieces = [unless_second(piece) for piece in donor.pieces]
    await joiner.catch_up(donor)
    assert_same(joiner, run)
    assert donor.asked.count("chunks") == 2
    assert len(donor.chunks_asked) <= CHUNKS + chunk_download.WINDOW


async def test_a_lone_donor_that_turns_byzantine_on_both_streams_is_blamed_once(donors, joiner):
    donor, blamed = donors[0], []
    joiner.fetcher._distrust = lambda peer_id, how: blamed.append((peer_id, how))
    donor.pieces = [piece if index < 6 else flip(piece) for index, piece in enumerate(donor.pieces)]
    await joiner.refuses(donor, chunk_download.CatchUpError, "damaged chunk")
    assert blamed == [(donor.peer_id, f"{donor.peer_id} sent a damaged chunk of its snapshot")]
