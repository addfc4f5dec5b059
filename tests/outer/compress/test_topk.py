"""Top-k of blocks: which values are sent, how large a record is, where the blocks lie."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError, PayloadError
from peer.outer.compress.layout import numel_of, tiled_sections
from peer.outer.compress.registry import VALUES, codec
from peer.outer.compress.select import largest_places
from peer.outer.compress.topk import TopK
from tests.outer.compress.vectors import BOUNDS, MAKERS, Make, gaussian, mostly_zeros, student_t3

NAMES = [f"top{k}/{b}+{v}" for v in VALUES for k, b in ((1, 7), (5, 16), (64, 4096), (30, 300), (3, 65536))]


def kept_by_hand(x: Tensor, k: int, block: int) -> Tensor:
    """The k largest magnitudes of every block, the rest zero; x without ties."""
    pieces = []
    for piece in torch.split(x, block):
        cut = piece.abs().topk(min(k, piece.numel())).values[-1]
        pieces.append(torch.where(piece.abs() >= cut, piece, 0.0))
    return torch.cat(pieces)


@pytest.mark.parametrize("k", [1, 4, 63, 64])
@pytest.mark.parametrize("n", [1, 5, 64, 65, 1000, 70_001])
def test_fp32_values_of_the_largest_survive_bit_for_bit(n: int, k: int) -> None:
    x, parts = student_t3(n), codec(f"top{k}/64+fp32")
    assert torch.equal(parts.decode(parts.encode(x), n), kept_by_hand(x, k, 64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", MAKERS)
def test_the_error_is_no_longer_than_the_vector_and_the_size_is_exact(name: str, make: Make) -> None:
    parts = codec(name)
    for n in (0, 1, 300, 9001):
        x = make(n)
        payload = parts.encode(x)
        decoded = parts.decode(payload, n)
        assert len(payload) == parts.wire_bytes(n)
        assert torch.isfinite(decoded).all()
        assert (decoded.double() - x.double()).norm() <= (1 + 2.0**-7) * x.double().norm() + 1e-30


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("make", [gaussian, student_t3])
def test_kept_values_are_as_exact_as_stated(values: str, make: Make) -> None:
    x = make(50_000)
    exact, coarse = codec("top64/4096+fp32"), codec(f"top64/4096+{values}")
    kept, decoded = exact.decode(exact.encode(x), 50_000), coarse.decode(coarse.encode(x), 50_000)
    for group, back in zip(torch.split(kept.double(), 4096), torch.split(decoded.double(), 4096), strict=True):
        chosen = group != 0
        assert ((group - back).abs() <= BOUNDS[values](group, group.abs().max()))[chosen].all()
        assert not back[~chosen].any()


def test_record_by_hand() -> None:
    x = torch.zeros(300)
    x[[2, 270, 299]] = torch.tensor([1.0, -2.0, 3.0])
    payload = codec("top3/300+fp16").encode(x)
    assert payload == bytes.fromhex("02e010" + "2b01" + "003c" + "00c0" + "0042")  # 2 | 270 << 12, 299, then the values


def test_bits_a_value() -> None:
    bits = {name: 8 * codec(name).wire_bytes(1 << 20) / (1 << 20) for name in ("top64/4096+int2", "top32/4096+int8")}
    assert bits["top64/4096+int2"] == 64 * 14 / 4096 + 32 / 4096  # .2266: 14 bits for each kept value, two scales
    assert bits["top32/4096+int8"] == (32 * 20 + 16) / 4096


@pytest.mark.parametrize(("block", "bits"), [(256, 8), (257, 12), (4096, 12), (4097, 16), (65536, 16)])
def test_positions_take_the_bits_that_the_block_needs(block: int, bits: int) -> None:
    assert codec(f"top2/{block}+fp32").wire_bytes(block) == 2 * bits // 8 + 8
    assert codec(f"top{block}/{block}+fp32").wire_bytes(block) == 4 * block


def test_all_values_in_fp32_are_lossless() -> None:
    x = student_t3(10_000)
    for name in ("top64/64+fp32", "top4096/4096+fp32", "top4096/64x64+fp32"):
        parts = codec(name).bind([(100, 90), (1000,)])
        assert torch.equal(parts.decode(parts.encode(x), 10_000), x)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("width", "k"), [(4096, 64), (4096, 1), (1000, 7), (64, 4), (64, 63)])
def test_the_places_are_those_of_the_largest(make: Make, width: int, k: int) -> None:
    rows = make(20 * width).view(20, width)
    places = largest_places(rows, k)
    assert (places.diff(dim=1) > 0).all()
    chosen = rows.abs().gather(1, places).sort(dim=1).values
    assert torch.equal(chosen, rows.abs().topk(k, dim=1).values.sort(dim=1).values)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -3.0, 1e-40]), min_size=64, max_size=64), st.integers(1, 8))
def test_ties_are_no_problem(values: list[float], k: int) -> None:
    rows = torch.tensor([values])
    chosen = rows.abs().gather(1, largest_places(rows, k)).sort(dim=1).values
    assert torch.equal(chosen, rows.abs().topk(k, dim=1).values.sort(dim=1).values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["top64/4096+int2", "top4/64+fp32", "dct64+top32/4096+int8", "top2/64x64+sign"])
def test_non_finite_input_is_refused_wherever_it_is(name: str, bad: float) -> None:
    for index in (0, 4095, 5000, 8999):
        for make in (gaussian, mostly_zeros):
            x = make(9000)
            x[index] = bad
            with pytest.raises(NonFiniteError):
                codec(name).encode(x)


@pytest.mark.parametrize("positions", [(5, 5), (6, 5), (5, 200), (200, 201)])
def test_positions_that_do_not_increase_within_the_block_are_refused(positions: tuple[int, int]) -> None:
    parts = codec("top2/200+fp16")
    payload = bytes(positions) + bytes(4)
    with pytest.raises(PayloadError, match="must increase and be below 200"):
        parts.decode(payload, 200)


def test_padding_of_twelve_bit_positions_must_be_zero() -> None:
    payload = bytearray(codec("top1/300+fp16").encode(torch.ones(300)))
    payload[1] |= 0x10
    with pytest.raises(PayloadError, match="padded"):
        codec("top1/300+fp16").decode(payload, 300)


SHAPES = [(128, 192), (64,), (70, 100), (5, 3), (9000,), (2, 3, 4), (), (0, 7), (67, 131)]


def test_tiles_of_matrices_are_the_blocks() -> None:
    parts = codec("top1/64x64+fp32").bind([(128, 192), (5000,)])
    x = gaussian(128 * 192 + 5000)
    decoded = parts.decode(parts.encode(x), x.numel())
    matrix, kept = x[: 128 * 192].view(128, 192), decoded[: 128 * 192].view(128, 192)
    for i in range(0, 128, 64):
        for j in range(0, 192, 64):
            tile = matrix[i : i + 64, j : j + 64].flatten()
            expected = torch.zeros(4096)
            expected[tile.abs().argmax()] = tile[tile.abs().argmax()]
            assert torch.equal(kept[i : i + 64, j : j + 64].flatten(), expected)
    assert torch.equal(decoded[128 * 192 :], kept_by_hand(x[128 * 192 :], 1, 4096))


def test_every_element_lies_in_exactly_one_tile() -> None:
    n = numel_of(SHAPES)
    seen, places = torch.zeros(n, dtype=torch.int64), torch.arange(n, dtype=torch.float32)
    for section in tiled_sections(tuple(SHAPES), 64, 4096):
        for first, last in section.bands(500):
            bands = section.rectangle(places, first, last)
            assert torch.equal(section.untiled(section.tiles(bands)).reshape(bands.shape), bands)
            seen[bands.flatten().long()] += 1
        assert section.tile_rows <= 64
        assert section.block <= 4096
    assert (seen == 1).all()


def test_sides_are_the_largest_divisors_or_64_where_those_are_small() -> None:
    sides = [(s.tile_rows, s.tile_columns) for s in tiled_sections(((344, 768), (50257, 96), (67, 100)), 64, 64)]
    assert sides == [(43, 64), (64, 48), (17, 48), (64, 50), (3, 50)]


def test_binding_matters_only_where_shapes_do() -> None:
    flat, tiled = codec("top64/4096+int2"), codec("top64/64x64+int2")
    assert flat.bind([(64, 64)]) is flat
    bound = tiled.bind([(64, 64)])
    assert bound != tiled
    assert bound.name == tiled.name
    assert bound.seeded(1) is bound
    with pytest.raises(AssertionError, match="bound to 4096 values"):
        bound.encode(torch.zeros(4095))
    x = gaussian(5000)
    assert codec("top64/64x64+int2").encode(x) == flat.encode(x)  # unbound: one 1-D tensor


@pytest.mark.parametrize("name", ["top64/4096+int2", "top4/64x64+int4", "dct64+top32/4096+int8", "dct64+top4/64+sign"])
def test_threads_alignment_and_repetition_do_not_change_the_bits(name: str) -> None:
    shapes = [(640, 704), (1000, 1001), (70_001,)]
    parts, x = codec(name).bind(shapes), student_t3(numel_of(shapes))
    payload = parts.encode(x)
    decoded = parts.decode(payload, x.numel())
    assert parts.encode(x) == payload
    torch.set_num_threads(2)
    assert torch.equal(parts.decode(memoryview(b"?" + payload)[1:], x.numel()), decoded)


def test_a_view_into_a_larger_vector_is_encoded_in_place() -> None:
    x = gaussian(10_000)
    for name in ("top64/64x64+int2", "dct64+top32/4096+int8"):
        parts = codec(name).bind([(64, 100), (77,)])
        assert parts.encode(x[123 : 123 + 6477]) == parts.encode(x[123 : 123 + 6477].clone())


def test_sparse_codecs_are_not_for_ranges() -> None:
    assert not isinstance(codec("top64/4096+int2"), Compressor)
    assert isinstance(codec("top64/4096+int2"), TopK)
