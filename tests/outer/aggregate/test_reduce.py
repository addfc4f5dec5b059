"""A shard is reduced to the encoded mean of what its contributions decode to, bit for bit."""

from __future__ import annotations

import pytest
import torch

from peer.outer.aggregate.base import Mean
from peer.outer.aggregate.reduce import ReduceRule, reduce_range, reduce_shard
from peer.outer.aggregate.robust import CoordinateMedian
from peer.outer.compress.base import Compressor, MemberPayloadError
from peer.outer.compress.registry import COMPRESSORS
from peer.outer.compress.sliced import Sliced
from tests.outer.contributions import gaussian

N = 5 * 1024 + 77
WEIGHTS = [300, 100, 50]
SHARES = {
    "weights": [300 / 450, 100 / 450, 50 / 450],
    "contributors": [1 / 3] * 3,
    "members": [1 / 3] * 3,
}


@pytest.mark.parametrize("normalise", SHARES)
@pytest.mark.parametrize("codec", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_a_mean_is_the_sum_in_roster_order(codec: Compressor, normalise: str) -> None:
    sliced = Sliced(codec, 1024)
    payloads = [sliced.encode(contribution) for contribution in gaussian(0, 3, N)]
    expected = torch.zeros(N)
    for place, (payload, share) in enumerate(zip(payloads, SHARES[normalise], strict=True)):
        term = sliced.decode(payload, N) * share
        expected = term if place == 0 else expected + term
    reduced, cosine = reduce_shard(payloads, WEIGHTS, N, sliced, Mean(normalise=normalise))
    assert reduced == sliced.encode(expected)
    assert cosine is not None
    assert 0.05 < cosine < 0.35


def test_one_contribution_is_reduced_to_itself() -> None:
    payload = COMPRESSORS["fp16"].encode(gaussian(0, 1, N)[0])
    assert reduce_shard([payload], [7], N, COMPRESSORS["fp16"]) == (payload, None)


def test_what_cannot_be_averaged_is_refused() -> None:
    int8 = COMPRESSORS["int8"]
    good = int8.encode(gaussian(0, 1, N)[0])
    for place in range(3):
        payloads = [good] * 3
        payloads[place] = good[:-1] + b"\x80"
        for aggregator in (Mean(), CoordinateMedian()):
            with pytest.raises(MemberPayloadError, match="holds -128") as caught:
                reduce_shard(payloads, [1, 1, 1], N, int8, aggregator)
            assert caught.value.place == place
    with pytest.raises(ValueError, match="finite and above 0"):
        reduce_shard([good, good], [1, 0], N, int8)
    with pytest.raises(ValueError, match="2 contributions with 1 weights"):
        reduce_shard([good, good], [1], N, int8)
    rule = ReduceRule(compressor=int8, aggregator=Mean(normalise="members", members=1))
    with pytest.raises(ValueError, match="must not be more"):
        reduce_range([good, good], [1, 1], N, rule, torch.zeros(2, 2))
