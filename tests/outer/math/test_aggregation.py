"""A shard is reduced to the encoded mean of what its contributions decode to, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.robust import CoordinateMedian
from peer.outer.compress.base import LARGEST_CONTRIBUTION, Compressor, MemberPayloadError
from peer.outer.compress.registry import COMPRESSORS
from peer.outer.math.aggregation import Aggregation
from peer.outer.numerics.tiles import TILE_ELEMENTS
from peer.outer.state.reduced_update import ReduceFormat, Update
from tests.outer.contributions import gaussian

N = 5 * 1024 + 77
WEIGHTS = [300, 100, 50]
SHARES = {
    "weights": [300 / 450, 100 / 450, 50 / 450],
    "contributors": [1 / 3] * 3,
    "members": [1 / 3] * 3,
}


def reduce(
    payloads: Sequence[bytes], weights: Sequence[int], codec: Compressor, aggregator: Aggregator = Mean(),
    elements: int = TILE_ELEMENTS,
) -> tuple[bytes, float | None]:  # fmt: skip
    """What the one reducer of N elements makes of these payloads, slice by slice; and the cosine."""
    wire, aggregation, reduced, position = ReduceFormat(N, codec, elements), Aggregation(aggregator, weights), b"", 0
    for (start, stop), size in zip(wire.slices(1, 0), wire.contributed_bytes(1, 0), strict=True):
        slices = [payload[position : position + size] for payload in payloads]
        reduced += wire.reduce(aggregation, slices, start, stop)
        position += size
    return reduced, aggregation.cosine


@pytest.mark.parametrize("normalise", SHARES)
@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_a_mean_is_the_sum_in_roster_order(codec: Compressor, normalise: str) -> None:
    slices = ReduceFormat(N, codec, 1024).slices(1, 0)

    def encode(x: Tensor) -> bytes:
        return b"".join(codec.encode(x[start:stop]) for start, stop in slices)

    payloads = [encode(contribution) for contribution in gaussian(0, 3, N)]
    expected = torch.zeros(N)
    for place, (payload, share) in enumerate(zip(payloads, SHARES[normalise], strict=True)):
        term = Update((payload,), N, codec, 1024).decode_range(0, N) * share
        expected = term if place == 0 else expected + term
    reduced, cosine = reduce(payloads, WEIGHTS, codec, Mean(normalise=normalise), 1024)
    assert reduced == encode(expected)
    assert cosine is not None
    assert 0.05 < cosine < 0.35


def test_one_contribution_is_reduced_to_itself() -> None:
    payload = COMPRESSORS["fp16"].encode(gaussian(0, 1, N)[0])
    assert reduce([payload], [7], COMPRESSORS["fp16"]) == (payload, None)


def test_what_cannot_be_averaged_is_refused() -> None:
    int8 = COMPRESSORS["int8"]
    good = int8.encode(gaussian(0, 1, N)[0])
    for place in range(3):
        payloads = [good] * 3
        payloads[place] = good[:-1] + b"\x80"
        for aggregator in (Mean(), CoordinateMedian()):
            with pytest.raises(MemberPayloadError, match="holds -128") as caught:
                reduce(payloads, [1, 1, 1], int8, aggregator)
            assert caught.value.place == place
    with pytest.raises(ValueError, match="finite and above 0"):
        reduce([good, good], [1, 0], int8)
    with pytest.raises(ValueError, match="2 contributions with 1 weights"):
        reduce([good, good], [1], int8)
    with pytest.raises(ValueError, match="must not be more"):
        Aggregation(Mean(normalise="members"), [1, 1], members=1).aggregate([lambda *_: torch.ones(3)] * 2, 3)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "fp32"])
def test_a_contribution_beyond_the_limit_is_refused_wherever_it_is_larger(name: str) -> None:
    """Scales that bound a range spare a look at its values; they round up, so the values decide near the limit."""
    codec = COMPRESSORS[name]
    for place in (0, 255, 256, N - 1):
        for value in (1.0, -1.0, 0.995):  # what int8 rounds up to the limit is within it
            x = torch.zeros(N)
            x[place] = value * LARGEST_CONTRIBUTION
            reached = codec.decode(codec.encode(x), N).abs().max().item()
            payloads = [codec.encode(torch.ones(N)), codec.encode(x)]
            if reached <= LARGEST_CONTRIBUTION:
                assert reduce(payloads, [1, 1], codec)[0]
            else:
                with pytest.raises(MemberPayloadError, match="is not applied"):
                    reduce(payloads, [1, 1], codec)
            with pytest.raises(MemberPayloadError, match=r"more than 1\.4e") as caught:
                reduce([payloads[0], codec.encode(x * 1.02)], [1, 1], codec)
            assert caught.value.place == 1


def test_contributions_are_only_read_and_those_that_were_dropped_are_counted() -> None:
    vectors = [torch.ones(100), torch.full((100,), torch.nan), torch.full((100,), 2.0)]
    before = [vector.clone() for vector in vectors]
    reads = [lambda start, stop, _, vector=vector: vector[start:stop] for vector in vectors]
    for aggregator, expected in ((Mean(normalise="contributors"), torch.nan), (Gated(), 1.5)):
        aggregation = Aggregation(aggregator, [1, 1, 1], stride=0)
        for _ in range(2):
            result = aggregation.aggregate(reads, 100)
        assert torch.equal(result, torch.full((100,), expected)) or bool(result.isnan().all()), aggregator
        assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(vectors, before, strict=True))
        found = [(drop.peer_id, drop.slices, drop.of) for drop in aggregation.drops("abc")]
        assert found == ([("b", 2, 2)] if aggregator == Gated() else [])
        assert aggregation.cosine is None


def test_a_round_decodes_into_the_memory_of_the_round_before() -> None:
    """Fresh pages, cleared one by one, made rounds of four members with a million parameters 6% longer."""
    n, rooms = TILE_ELEMENTS // 2, list[int]()

    def read(start: int, stop: int, room: Tensor | None) -> Tensor:
        assert room is not None
        rooms.append(room.data_ptr())
        return room.fill_(float(stop - start))

    for _ in range(2):
        Aggregation(CoordinateMedian(), [1.0] * 4).aggregate([read] * 4, n)
    assert len(set(rooms[:4])) == 4
    assert sorted(rooms[:4]) == sorted(rooms[4:])
