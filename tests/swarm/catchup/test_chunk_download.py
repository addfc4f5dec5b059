"""A snapshot from several donors at once: who serves what when one lies, dies, dawdles or is busy."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

import pytest

from peer.protocol.records import dump_json
from peer.protocol.wire import Kind
from peer.swarm.catchup import chunk_download
from peer.swarm.catchup.chunk_download import DonorStream, much_slower
from peer.swarm.catchup.partial_file import PartialFile
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.donor import CHUNKS, assert_same, committed_run, flip, newcomer, scripted_donors
from tests.swarm.gathering import until

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def run(tmp_path):
    return committed_run(tmp_path)


@pytest.fixture
async def donors(network, run):
    return await scripted_donors(network, run, 3)


@pytest.fixture
def joiner(network, tmp_path):
    return newcomer(network, tmp_path)


def asked(donors):
    return sorted(index for donor in donors for index in donor.chunks_asked)


def written(folder):
    """The chunks of a fetch that has begun."""
    return {int(line) for line in (folder / "incoming.index").read_bytes().split(b"\n")[1:-1]}


async def break_off(donor):
    raise StreamClosedError(donor.peer_id, "died")


async def test_every_chunk_is_asked_of_one_donor_and_all_donors_serve(run, donors, joiner):
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert asked(donors) == list(range(CHUNKS))
    assert how.chunks == {donor.peer_id: len(donor.chunks_asked) for donor in donors}
    assert min(how.chunks.values()) >= 2
    assert how.snapshot_round == 2
    assert joiner.accused == {}
    assert {path.name for path in joiner.folder.iterdir()} == {"chain.jsonl", "incoming.bin"}


LIES = {
    "a flipped bit": flip,
    "too short": lambda piece: piece[:-4],
    "too long": lambda piece: piece + bytes(4),
    "empty": lambda piece: b"",  # noqa: ARG005
    "another chunk": lambda piece: piece[::-1],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("byzantine", [0, 1])
async def test_a_byzantine_donor_is_found_out_and_its_chunks_come_from_elsewhere(run, donors, joiner, lie, byzantine):
    donors[byzantine].pieces = [LIES[lie](piece) for piece in donors[byzantine].pieces]
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert list(joiner.accused) == [donors[byzantine].peer_id]
    assert donors[byzantine].peer_id not in how.chunks
    assert sum(how.chunks.values()) == CHUNKS
    assert len(donors[byzantine].chunks_asked) <= chunk_download.WINDOW + 2
    honest = [donor for donor in donors if donor is not donors[byzantine]]
    assert asked(honest) == list(range(CHUNKS))  # each of the byzantine's once more, and none twice


async def test_a_donor_that_lies_once_serves_no_more(run, donors, joiner):
    for index in range(CHUNKS):
        donors[1].pieces[index] = one_bad_answer(donors[1], donors[1].pieces[index])
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert joiner.accused == {donors[1].peer_id: f"{donors[1].peer_id} sent a damaged chunk of its snapshot"}
    assert how.chunks[donors[1].peer_id] <= 3
    assert sum(how.chunks.values()) == CHUNKS


def one_bad_answer(donor, piece):
    async def answer():
        return flip(piece) if len(donor.chunks_asked) == 2 else piece

    return answer


async def test_who_lies_and_leaves_at_once_has_lied(run, donors, joiner):
    byzantine = donors[2]

    def first_a_lie(piece):
        async def answer():
            return flip(piece) if len(byzantine.chunks_asked) == 1 else await break_off(byzantine)

        return answer

    byzantine.pieces = [first_a_lie(piece) for piece in byzantine.pieces]
    await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert list(joiner.accused) == [byzantine.peer_id]


async def test_a_donor_that_dies_is_replaced_and_not_blamed(network, run, donors, joiner):
    dying = donors[0]

    def while_alive(piece):
        async def answer():
            if len(dying.chunks_asked) < 4:
                return piece
            network.hosts.pop(dying.peer_id, None)
            return await break_off(dying)

        return answer

    dying.pieces = [while_alive(piece) for piece in dying.pieces]
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert how.chunks[dying.peer_id] == 3
    assert sum(how.chunks.values()) == CHUNKS
    assert joiner.accused == {}


async def test_a_donor_without_the_snapshot_is_passed_over(run, donors, joiner):
    donors[1].pieces = [None] * CHUNKS
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert set(how.chunks) == {donors[0].peer_id, donors[2].peer_id}
    assert joiner.accused == {}


async def test_a_donor_that_hangs_gives_its_chunks_away(network, run, donors, joiner):
    network.retime(watch_period_s=0.01)
    network.retime(slow_floor_s=0.05)
    donors[1].pieces = [asyncio.Event().wait] * CHUNKS
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert len(donors[1].chunks_asked) == 1  # the second waits in its stream
    assert set(how.chunks) == {donors[0].peer_id, donors[2].peer_id}
    assert joiner.accused == {}


async def test_a_line_that_stands_makes_nobody_a_slow_donor(network, run, donors, joiner, monkeypatch):
    network.retime(slow_floor_s=0.1)
    network.retime(watch_period_s=0.005)
    looks, together, on = [], asyncio.Event(), asyncio.Event()

    def look(*arguments):
        looks.append(much_slower(*arguments))
        if len(looks) > len(donors) * 60:  # three times the floor
            on.set()
        return looks[-1]

    monkeypatch.setattr(chunk_download, "much_slower", look)

    def with_the_line(donor, piece):
        async def answer():
            if all(one.chunks_asked for one in donors):
                together.set()
            await together.wait()
            if len(donor.chunks_asked) > 3:
                await on.wait()
            return piece

        return answer

    for donor in donors:
        donor.pieces = [with_the_line(donor, piece) for piece in donor.pieces]
    how = await joiner.catch_up(*donors)
    assert_same(joiner, run)
    assert not any(looks)
    assert set(how.chunks) == {donor.peer_id for donor in donors}


async def test_busy_donors_are_left_to_others_and_asked_again(network, run, donors, joiner):
    network.retime(busy_retry_s=0.001)
    alone = donors[0]
    free = asyncio.Event()

    def when_free(piece):
        async def answer():
            if free.is_set():
                return piece
            if len(alone.chunks_asked) == 5:
                free.set()
            return Kind.BUSY

        return answer

    alone.pieces = [when_free(piece) for piece in alone.pieces]
    how = await joiner.catch_up(alone)
    assert_same(joiner, run)
    assert how.chunks == {alone.peer_id: CHUNKS}
    assert len(alone.chunks_asked) >= CHUNKS + 5


async def test_one_busy_donor_leaves_all_to_the_other(run, donors, joiner):
    donors[0].pieces = [Kind.BUSY] * CHUNKS
    how = await joiner.catch_up(*donors[:2])
    assert_same(joiner, run)
    assert how.chunks == {donors[1].peer_id: CHUNKS}


async def test_nobody_waits_for_busy_donors_for_ever(network, donors, joiner):
    network.retime(busy_patience_s=0.0)
    donors[0].pieces = [Kind.BUSY] * CHUNKS
    await joiner.refuses(donors[0], StreamClosedError, "has been busy for 0 s")


async def test_an_interrupted_fetch_goes_on_with_what_it_has(network, run, donors, joiner, tmp_path):
    pieces, donor = list(donors[0].pieces), donors[0]
    donor.pieces = [*pieces[:10], *[partial(break_off, donor)] * 6]
    await joiner.refuses(donor, StreamClosedError, "stream ended")
    assert PartialFile.begun(joiner.folder) == donor.meta

    donor.pieces, donor.chunks_asked = pieces, []
    damage(joiner.folder / "incoming.bin", 3 * 4096 + 17)
    again = newcomer(network, tmp_path)
    how = await again.catch_up(donor, donors[1])
    assert_same(again, run)
    assert asked(donors[:2]) == [3, *range(10, CHUNKS)]
    assert sum(how.chunks.values()) == 7
    assert PartialFile.begun(again.folder) is None


async def test_a_cancelled_fetch_goes_on_later(run, donors, joiner):
    pieces, donor = list(donors[0].pieces), donors[0]
    reached = asyncio.Event()

    async def hang():
        reached.set()
        await asyncio.Event().wait()

    donor.pieces = [*pieces[:6], hang, *pieces[7:]]
    fetching = asyncio.ensure_future(joiner.catch_up(donor))
    await asyncio.wait_for(reached.wait(), 5.0)
    await until(lambda: written(joiner.folder) >= set(range(6)))  # all that was sent before
    fetching.cancel()
    await asyncio.wait([fetching])
    assert fetching.cancelled()
    donor.pieces, donor.chunks_asked = pieces, []
    await joiner.catch_up(donor)
    assert_same(joiner, run)
    assert 6 in donor.chunks_asked
    assert not set(range(6)).intersection(donor.chunks_asked)


async def test_what_is_left_of_another_snapshot_is_not_mixed_in(run, donors, joiner):
    other = donors[0].meta.model_copy(update={"round": 1})
    part = PartialFile(joiner.folder, other, donors[0].digests)
    part.open()
    assert await part.put(0, memoryview(donors[0].pieces[0]))
    part.close()
    await joiner.catch_up(donors[0])
    assert_same(joiner, run)
    assert donors[0].chunks_asked == list(range(CHUNKS))


@pytest.mark.parametrize("index", [b"", b"\n", b"garbage\n1\n", b"\xff" * 100, b'{"round":1}\n0\n'])
async def test_a_damaged_index_counts_for_nothing(run, donors, joiner, index):
    (joiner.folder / "incoming.index").write_bytes(index)
    (joiner.folder / "incoming.bin").write_bytes(bytes(100_000))
    await joiner.catch_up(donors[0])
    assert_same(joiner, run)
    assert len(donors[0].chunks_asked) == CHUNKS


async def test_an_index_with_a_number_that_no_chunk_has_counts_for_what_is_right(run, donors, joiner):
    lines = [dump_json(donors[0].meta), b"0", b"9" * 5000, b"1", b""]
    (joiner.folder / "incoming.index").write_bytes(b"\n".join(lines))
    (joiner.folder / "incoming.bin").write_bytes(b"".join(donors[0].pieces[:2]))
    await joiner.catch_up(donors[0])
    assert_same(joiner, run)
    assert sorted(donors[0].chunks_asked) == list(range(2, CHUNKS))


def damage(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def lane(took, asked=(1,), since=0.0):
    return DonorStream("donor", deque(asked), since, deque(took))


SLOW = {  # the lane that is judged, the others, now, idle, is it much slower
    "as fast": (lane([0.1]), [lane([0.1])], 0.3, False, False),
    "within the floor": (lane([0.1]), [lane([0.1])], 2.0, False, False),
    "beyond the floor": (lane([0.1]), [lane([0.1], since=1.1)], 2.1, False, True),
    "all are slow": (lane([3.0]), [lane([3.0])], 12.0, False, False),
    "slower than slow ones": (lane([3.0]), [lane([3.0, 9.0]), lane([3.0], since=7.0)], 12.1, False, True),
    "asked for nothing": (lane([0.1], ()), [lane([0.1])], 99.0, True, False),
    "the others have done nothing": (lane([0.1]), [lane([])], 99.0, True, False),
    "alone": (lane([0.1]), [], 99.0, True, False),
    "still beginning": (lane([]), [lane([0.1])], 20.0, False, False),
    "still beginning when all else is done": (lane([]), [lane([0.1], ())], 2.1, True, True),
    "all are silent": (lane([0.1]), [lane([0.1]), lane([0.1], since=1.0)], 2.1, False, False),
    "all are silent, or begin": (lane([0.1]), [lane([0.1]), lane([], since=2.0)], 2.1, False, False),
    "all but one are silent": (lane([0.1]), [lane([0.1]), lane([0.1], since=1.1)], 2.1, False, True),
    "counted from its turn": (lane([0.1], since=50.0), [lane([0.1])], 51.0, False, False),
}


@pytest.mark.parametrize("case", SLOW)
def test_who_is_much_slower(case):
    judged, others, now, idle, expected = SLOW[case]
    assert much_slower(judged, [judged, *others], now, idle, STANDARD.slow_floor_s) is expected
