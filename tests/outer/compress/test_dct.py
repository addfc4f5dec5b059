"""The cosine transform: orthonormal, inverted to 1e-6, the same bits whatever order sums are taken in."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.outer.compress.base import NonFiniteError, PayloadError
from peer.outer.compress.dct import MAX_SIDE, Cosine, _entries, _exact_matrix
from peer.outer.compress.layout import numel_of
from peer.outer.compress.registry import codec
from tests.outer.compress.vectors import gaussian, student_t3

SHAPES = [(128, 192), (64,), (70, 100), (5, 3), (9001,), (67, 131)]


def coefficients(tiles: Tensor) -> Tensor:
    return Cosine().rows(Cosine().columns(tiles))


@pytest.mark.parametrize("size", [1, 2, 3, 17, 43, 64])
def test_the_matrix_is_orthonormal(size: int) -> None:
    matrix = torch.tensor(_entries(size), dtype=torch.float64)
    assert (matrix @ matrix.T - torch.eye(size, dtype=torch.float64)).abs().max() < 1e-13


def test_coefficients_by_hand() -> None:
    wave = torch.tensor([math.cos(math.pi * (2 * i + 1) * 3 / 16) for i in range(8)])
    tile = torch.outer(wave, torch.ones(8))
    expected = torch.zeros(8, 8)
    expected[3, 0] = 2.0 * math.sqrt(8)  # |wave| = 2, |ones| = sqrt(8)
    assert torch.allclose(coefficients(tile.unsqueeze(0))[0], expected, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (43, 64), (1, 64), (7, 1), (1, 1), (31, 5)])
def test_the_inverse_is_the_identity_to_one_in_a_million(rows: int, columns: int) -> None:
    tiles = gaussian(6 * rows * columns).view(6, rows, columns)
    out = torch.empty(2, rows, 3, columns)
    Cosine().inverse(None, coefficients(tiles).flatten(1), out)
    back = out.transpose(1, 2).reshape(tiles.shape)
    assert ((back - tiles).flatten(1).norm(dim=1) / tiles.flatten(1).norm(dim=1)).max() < 1e-6


def test_the_norm_is_kept() -> None:
    tiles = student_t3(4 * 4096).view(4, 64, 64)
    assert torch.allclose(coefficients(tiles).flatten(1).norm(dim=1), tiles.flatten(1).norm(dim=1), rtol=1e-5)


@pytest.mark.parametrize("name", ["dct64+top4096/4096+fp32", "dct64+top64/64+fp32", "dct16+top256/256+fp32"])
def test_all_coefficients_in_fp32_give_the_vector_back(name: str) -> None:
    x = gaussian(numel_of(SHAPES))
    parts = codec(name).bind(SHAPES)
    decoded = parts.decode(parts.encode(x), x.numel())
    assert (decoded - x).norm() / x.norm() < 1e-6


def test_few_and_many_coefficients_are_added_to_the_same_bits() -> None:
    """The sum of cosines and the matrix product agree exactly: no partial sum is ever rounded."""
    places = torch.rand(3, 4096).argsort(dim=1)[:, :64].sort(dim=1).values
    values = student_t3(3 * 64).view(3, 64)
    dense = torch.zeros(3, 4096).scatter_(1, places, values)
    sparse_out, dense_out = torch.empty(1, 64, 3, 64), torch.empty(1, 64, 3, 64)
    Cosine().inverse(places, values, sparse_out)
    Cosine().inverse(None, dense, dense_out)
    assert torch.equal(sparse_out, dense_out)


def test_the_inverse_is_exact_integer_arithmetic() -> None:
    """Against Python's integers, in an order of its own."""
    values = student_t3(64).view(1, 64)
    out = torch.empty(1, 1, 1, 64)
    Cosine().inverse(None, values, out)
    norm = math.sqrt(sum(math.ceil(math.ldexp(abs(v), 40)) ** 2 for v in values[0].tolist())) / 2**40
    exponent = math.frexp(norm)[1]
    integers = [round(math.ldexp(v, 28 - exponent)) for v in values[0].tolist()]
    matrix = [[int(entry * 2**24) for entry in row] for row in _exact_matrix(64).tolist()]
    for i in range(64):
        total = sum(integers[k] * matrix[k][i] for k in reversed(range(64)))
        rounded = round(Fraction(total, 2**24))  # half to even, as in torch
        assert out[0, 0, 0, i].item() == np.float32(math.ldexp(rounded, exponent - 28))


def test_no_entry_is_so_close_to_a_tie_that_a_machine_could_round_it_the_other_way() -> None:
    for size in range(1, MAX_SIDE + 1):
        scaled = torch.tensor(_entries(size), dtype=torch.float64) * 2.0**24
        assert ((scaled - scaled.floor() - 0.5).abs() > 1e-6).all()
        assert _exact_matrix(size).norm(dim=0).max() < 1 + 1e-6


def test_rank_one_waves_survive_compression() -> None:
    wave = torch.cos(torch.arange(64) * math.pi * 5 / 64 + math.pi * 5 / 128)
    x = torch.outer(wave, wave).flatten()
    parts = codec("dct64+top1/4096+fp32").bind([(64, 64)])
    payload = parts.encode(x)
    assert len(payload) == 2 + 4
    assert (parts.decode(payload, 4096) - x).norm() / x.norm() < 1e-6


def test_blocks_with_a_norm_below_two_to_the_minus_74_are_zero() -> None:
    parts = codec("dct64+top64/64+fp32")
    assert not parts.decode(parts.encode(torch.full((64,), 2.0**-78)), 64).any()
    assert parts.decode(parts.encode(torch.full((64,), 2.0**-70)), 64).all()


def test_numbers_near_the_end_of_fp32() -> None:
    parts = codec("dct64+top64/64+fp32")
    x = gaussian(64) * 1e37
    assert (parts.decode(parts.encode(x), 64) - x).double().norm() / x.double().norm() < 1e-6
    with pytest.raises(NonFiniteError):
        parts.encode(torch.full((64,), 3e38))
    with pytest.raises(PayloadError, match="beyond fp32's range"):
        parts.decode(torch.full((64,), 3e38).numpy().tobytes(), 64)
