"""Random coordinates: agreed without a byte, distinct, and fair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peer.outer.compress.base import NonFiniteError, PayloadError
from peer.outer.compress.randomk import RandomK
from peer.outer.compress.registry import codec
from tests.outer.compress.vectors import gaussian


def random(name: str) -> RandomK:
    parts = codec(name)
    assert isinstance(parts, RandomK)
    return parts


@pytest.mark.parametrize("name", ["random0.3+fp32", "randomblock0.3+fp32", "random0.001+fp32", "random0.9+fp32"])
@pytest.mark.parametrize("n", [1, 2, 10, 1000, 300_001])
def test_the_chosen_values_survive_and_the_rest_is_zero(name: str, n: int) -> None:
    x, parts = gaussian(n), random(name).seeded(5)
    k = int(np.ceil(parts.ratio * n))
    places = parts.positions(n, 0, k)
    assert len(set(places.tolist())) == k
    assert 0 <= places.min() <= places.max() < n
    payload = parts.encode(x)
    decoded = random(name).seeded(5).decode(payload, n)
    assert len(payload) == parts.wire_bytes(n) == 4 * k
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.from_numpy(places)] = True
    assert torch.equal(decoded, torch.where(mask, x, 0.0))


@pytest.mark.parametrize("name", ["random0.3+fp32", "random0.7+fp32", "randomblock0.3+fp32"])
def test_every_coordinate_is_chosen_as_often_as_any_other(name: str) -> None:
    n, rounds = 50, 4000
    counts = np.zeros(n)
    for seed in range(rounds):
        parts = random(name).seeded(seed)
        counts[parts.positions(n, 0, int(np.ceil(parts.ratio * n)))] += 1
    expected = parts.ratio * rounds
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def split_mix(state: int) -> int:
    """The reference generator (Steele, Lea and Flood 2014) in Python's integers."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_the_generator_is_part_of_the_protocol() -> None:
    assert split_mix(0) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    seed, n, k = 2024, 1003, 11
    draws = [split_mix((split_mix(seed) + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(k + 1)]
    turn, edges = draws[0] % n, [i * 91 + min(i, 2) for i in range(k + 1)]  # 1003 = 2 * 92 + 9 * 91
    expected = [(edges[i] + draws[i + 1] % (edges[i + 1] - edges[i]) + turn) % n for i in range(k)]
    assert random("random0.01+fp32").seeded(seed).positions(n, 0, k).tolist() == expected
    block = random("randomblock0.01+fp32").seeded(seed).positions(n, 0, k)
    assert block.tolist() == [(i + turn) % n for i in range(k)]


def test_positions_by_ranges_are_slices_of_the_whole() -> None:
    parts = random("random0.3+int8").seeded(9)
    whole = parts.positions(10_007, 0, 3003)
    assert np.array_equal(np.concatenate([parts.positions(10_007, a, a + 1001) for a in (0, 1001, 2002)]), whole)


def test_a_ratio_of_one_is_dense_and_a_block_is_contiguous() -> None:
    x = gaussian(1001)
    for name in ("random1+fp32", "randomblock1+fp32"):
        parts = random(name).seeded(3)
        assert torch.equal(parts.decode(parts.encode(x), 1001), x)
    places = random("randomblock0.1+fp32").seeded(8).positions(1001, 0, 101)
    assert set(np.diff(places).tolist()) <= {1, -1000}


def test_seeds_choose_and_their_absence_is_a_bug() -> None:
    x, parts = gaussian(1000), random("random0.01+fp32")
    assert parts.seeded(1).encode(x) != parts.seeded(2).encode(x)
    assert parts.seeded(1).encode(x) == parts.seeded(1 + (1 << 64)).encode(x)
    assert parts.seeded(-1).seed == (1 << 64) - 1
    with pytest.raises(AssertionError, match="needs a seed"):
        parts.encode(x)


def test_nothing_and_non_finite_vectors() -> None:
    parts = random("random0.01+int8").seeded(1)
    assert parts.encode(torch.empty(0)) == b""
    assert parts.decode(b"", 0).shape == (0,)
    x = gaussian(1000)
    x[-1] = float("nan")
    with pytest.raises(NonFiniteError):
        parts.encode(x)
    with pytest.raises(PayloadError, match="it must be 14"):
        parts.decode(bytes(15), 1000)
