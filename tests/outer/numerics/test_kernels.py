"""The compiled loops yield the bits that the tensor operations yield, which are what the tests of codecs describe."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.aggregate.gram import inner_products, largest_magnitude
from peer.outer.compress.base import Compressor, NonFiniteError, PayloadError, encode_difference, is_finite
from peer.outer.compress.blockwise import Blockwise
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.registry import VALUES, compressor
from peer.outer.numerics import kernels as module
from peer.outer.numerics.kernels import Coded, add_scaled, compiled, kernels_for
from peer.outer.optim.optimizers import Nesterov, Vectors

# Zero of both signs, the smallest and largest subnormals, what rounds to halves, what almost overflows.
SPECIAL = [0.0, -0.0, 1e-45, -1.1754942e-38, 1.1754944e-38, 0.5, -1.5, 126.5, 127.0, 1e30, -3.4028235e38, 3.4e38]


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Fp32 [n] of several blocks and a piece, normal values among special ones, at any scale."""
    n = draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = np.float32(10.0) ** np.float32(draw(st.integers(-42, 30)))
    values = (rng.standard_normal(n).astype(np.float32) * scale).astype(np.float32)
    special = rng.random(n) < draw(st.sampled_from([0.0, 0.05, 1.0]))
    values[special] = rng.choice(np.array(SPECIAL, np.float32), int(special.sum()))
    return torch.from_numpy(values)


def without(work: Callable[[], Any]) -> Any:
    """What it yields by tensor operations alone."""
    with mock.patch.object(module, "compiled", return_value=None):
        return work()


def bits(x: Tensor) -> bytes:
    """Zeros have signs."""
    return x.numpy().tobytes()


def test_this_environment_has_them() -> None:
    assert compiled() is not None, "built by `make env`, with a C compiler; every test below compares with them"
    assert kernels_for(torch.zeros(2), torch.zeros(3)) is compiled()


@pytest.mark.parametrize(
    "other", [torch.zeros(2, dtype=torch.float64), torch.zeros(4)[::2], torch.zeros(2, device="meta")]
)
def test_other_memory_than_contiguous_fp32_on_the_cpu_is_not_theirs(other: Tensor) -> None:
    assert kernels_for(torch.zeros(2), other) is None


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@given(x=vectors())
def test_payloads_and_what_they_decode_to_are_the_same(name: str, x: Tensor) -> None:
    codec = compressor(name)
    payload = codec.encode(x)
    assert payload == without(lambda: codec.encode(x))
    moved = memoryview(b"\0" + payload)[1:]  # scales at an odd address
    decoded = codec.decode(moved, x.numel())
    assert bits(decoded) == without(lambda: bits(codec.decode(payload, x.numel())))


# Of a scale: subnormal, negative, infinite, NaN; of a code: the most negative, in either half of a byte.
HOSTILE = [0x00, 0x01, 0x08, 0x10, 0x7F, 0x80, 0x88, 0x8F, 0xF8, 0xFF]


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@given(x=vectors(), places=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(HOSTILE)), min_size=1, max_size=3))
def test_the_same_payloads_are_refused_for_the_same_reason(
    name: str, x: Tensor, places: list[tuple[int, int]]
) -> None:
    codec, payload = compressor(name), bytearray(b"\0" + compressor(name).encode(x))
    for place, byte in places:
        payload[1 + place % (len(payload) - 1)] = byte
    view = memoryview(payload)[1:]

    def refusal() -> str | None:
        try:
            codec.check(view, x.numel())
        except PayloadError as error:
            return str(error)
        return None

    assert refusal() == without(refusal)


@pytest.mark.parametrize(("name", "place", "byte"), [
    ("int8", 3, 0x80), ("int8", 3, 0x7F), ("int8", 4 * 3, 0x80), ("int4", 1, 0x80), ("int4", 1, 0x7F),
    ("int4", 2 * 5, 0x88), ("int4", 2 * 5, 0x08), ("int4", 2 * 5, 0x80), ("int4", -1, 0x10),
])  # fmt: skip
def test_no_loop_lets_pass_what_no_encoder_writes(name: str, place: int, byte: int) -> None:
    codec, x = compressor(name), torch.ones(513)  # a row of one element: half of its byte is padding
    payload = bytearray(codec.encode(x))
    codec.check(payload, x.numel())
    payload[place] = byte
    with pytest.raises(PayloadError, match=name if place >= 0 else "padded with bits that are not zero"):
        codec.check(payload, x.numel())


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@given(x=vectors(), bad=st.sampled_from(NOT_FINITE), places=st.sets(st.integers(0, 699)))
def test_what_is_not_finite_is_found_wherever_it_is(x: Tensor, bad: float, places: set[int]) -> None:
    within = [place for place in places if place < x.numel()]
    x[within] = bad
    assert is_finite(x) is without(lambda: is_finite(x)) is (not within)


WRITTEN = [
    *(BlockInt8(block) for block in (8, 256, 2048, 4096)),
    *(Blockwise(VALUES[name], block) for name in ("int4", "int2", "fp4") for block in (8, 256, 1024, 4096)),
    compressor("fp32"),
]  # fmt: skip


@pytest.mark.parametrize("plain", WRITTEN, ids=lambda codec: f"{codec.name} in {codec.block}")
@given(x=vectors(), seed=st.integers(0, 1000))
def test_a_difference_is_encoded_as_it_is_when_it_was_taken_before(plain: Compressor, x: Tensor, seed: int) -> None:
    minus = x * torch.rand(x.numel(), generator=torch.Generator().manual_seed(seed))
    expected = plain.encode(x - minus)
    assert bytes(encode_difference(plain, x, minus)) == expected
    assert bytes(without(partial(encode_difference, plain, x, minus))) == expected


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_a_difference_beyond_what_fp32_holds_is_refused(name: str) -> None:
    x = torch.full((600,), 3e38)
    for minus in (-x, torch.full((600,), math.nan)):
        with pytest.raises(NonFiniteError, match="some are NaN or infinite"):
            encode_difference(compressor(name), x, minus)


def test_a_difference_is_written_in_one_pass() -> None:
    with mock.patch.object(BlockInt8, "encode_ranges") as encode_ranges:
        encode_difference(compressor("int8"), torch.ones(600), torch.zeros(600))
    assert not encode_ranges.called


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("place", [0, 255, 256, 599])
@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_what_is_not_finite_is_refused_alike(name: str, place: int, value: float) -> None:
    x = torch.ones(600)
    x[place] = value

    def encode() -> str:
        with pytest.raises(NonFiniteError) as caught:
            compressor(name).encode(x)
        return str(caught.value)

    assert encode().startswith("cannot encode ")
    assert without(encode).startswith("cannot encode ")


@pytest.mark.parametrize("width", [1, 5, 1023, 1024, 1025, 2000])
def test_rows_of_any_width_become_the_same_levels(width: int) -> None:
    """A sparse codec's rows are as wide as what it keeps of them; beyond 1024 the tensor operations do the work."""
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(width)) ** 3
    scales, codes = VALUES["int2"].quantize(rows)
    expected = without(lambda: VALUES["int2"].quantize(rows))
    assert (scales.tolist(), codes.tolist()) == tuple(part.tolist() for part in expected)


@given(x=vectors(), factor=st.floats(1e-3, 1.0, width=64), seed=st.integers(0, 1000))
def test_scaled_sums_round_twice(x: Tensor, factor: float, seed: int) -> None:
    total = torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed))
    by_tensors = total.clone()
    add_scaled(total, x, factor)
    without(lambda: add_scaled(by_tensors, x, factor))
    assert bits(total) == bits(by_tensors)


@given(x=vectors(), count=st.integers(1, 5), scale=st.sampled_from([1e-38, 1e-3, 1.0, 1e4]))
def test_inner_products_are_the_same_sums_of_integers(x: Tensor, count: int, scale: float) -> None:
    """Of long vectors too, whose last strip is cut, with halves, which are rounded to even."""
    long = torch.cat([x.clamp(-1e30, 1e30), torch.arange(-999, 1000) / 2.0]).repeat(2)
    found = [long.roll(7 * k) * scale * (k + 1) / 5.0 for k in range(count)]
    magnitudes = [largest_magnitude(one) for one in found]
    assert magnitudes == without(lambda: [largest_magnitude(one) for one in found])
    assert inner_products(found, magnitudes) == without(lambda: inner_products(found, magnitudes))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_the_largest_magnitude_of_what_is_not_finite_is_not_either(value: float) -> None:
    x = torch.ones(1000)
    x[317] = value
    assert not math.isfinite(largest_magnitude(x))
    assert largest_magnitude(torch.zeros(0)) == 0.0


@given(x=vectors(), beta=st.floats(0.0, 0.999), lr=st.floats(1e-3, 2.0), in_place=st.booleans())
def test_the_nesterov_step_is_the_same_in_place_and_beside(x: Tensor, beta: float, lr: float, in_place: bool) -> None:
    optimizer, generator = Nesterov(lr=lr, momentum=beta), torch.Generator().manual_seed(x.numel())

    def step() -> tuple[bytes, bytes, bytes, bytes]:
        generator.manual_seed(x.numel())
        anchor, momentum = torch.randn(2, x.numel(), generator=generator)
        old = Vectors(anchor, [momentum])
        new = old if in_place else Vectors(torch.empty(x.numel()), [torch.empty(x.numel())])
        optimizer.step(old, x, new)
        return bits(new.anchor), bits(new.buffers[0]), bits(old.anchor), bits(old.buffers[0])

    assert step() == without(step)


@given(
    x=vectors(), name=st.sampled_from(["int8", "int4", "int2"]), beta=st.floats(0.0, 0.999), lr=st.floats(1e-3, 2.0),
    in_place=st.booleans(), far=st.booleans(),
)  # fmt: skip
def test_the_step_of_a_coded_update_is_that_of_the_decoded_one(
    x: Tensor, name: str, beta: float, lr: float, in_place: bool, far: bool
) -> None:
    """And what it says of its results is so, where the update carries them beyond fp32's range as well."""
    codec, optimizer = compressor(name), Nesterov(lr=lr, momentum=beta)
    payload = codec.encode(x)

    def step(coded: bool) -> tuple[bytes, bytes, bool]:
        generator = torch.Generator().manual_seed(x.numel())
        anchor, momentum = torch.randn(2, x.numel(), generator=generator) * (3e38 if far else 1.0)
        old = Vectors(anchor.nan_to_num(), [momentum.nan_to_num()])
        new = old if in_place else Vectors(torch.empty(x.numel()), [torch.empty(x.numel())])
        if coded:
            pieces = codec.coded(payload, x.numel(), 0, x.numel())
            assert pieces is not None
            done = optimizer.step_coded(old, pieces, new, lr_scale=0.5)
        else:
            optimizer.step(old, codec.decode(payload, x.numel()), new, lr_scale=0.5)
            done = True
        return bits(new.anchor), bits(new.buffers[0]), done

    assert step(coded=True) == step(coded=False)
    assert without(lambda: step(coded=True))[2] is False


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_nothing_behind_the_end_of_a_vector_or_a_payload_is_touched(bits: int) -> None:
    loops, rows = compiled(), torch.zeros(3, 256)
    assert loops is not None
    wide = {8: (12, 768), 4: (6, 384), 2: (12, 192)}[bits]
    loops.dequantize(bits, memoryview(bytes(wide[0])), memoryview(bytes(wide[1])), rows)
    for scales, codes in ((wide[0] - 1, wide[1]), (wide[0], wide[1] - 1)):
        says = rf"sizes \({scales}, {codes}\) do not fit: must be \({wide[0]}, {wide[1]}\)"
        with pytest.raises(ValueError, match=says):
            loops.dequantize(bits, memoryview(bytes(scales)), memoryview(bytes(codes)), rows)
        if bits > 2:
            with pytest.raises(ValueError, match=says):
                loops.fits(bits, memoryview(bytes(scales)), memoryview(bytes(codes)), (3, 256), (1, 2))
        buffers = [torch.zeros(size, dtype=torch.uint8) for size in (scales, codes)]
        with pytest.raises(ValueError, match="do not fit"):
            loops.quantize(bits, rows, 1e-30, 1e30, *buffers)
    assert bits == 2 or loops.fits(bits, memoryview(bytes(wide[0])), memoryview(b""), (3, 0), (1, 2)) is False
    with pytest.raises(ValueError, match="do not fit"):
        loops.add_scaled(torch.zeros(3), torch.zeros(2), 1.0)
    for others, factors in (([torch.zeros(2)], [1.0, 1.0]), ([], [1.0, 1.0])):
        with pytest.raises(ValueError, match="do not fit"):
            loops.inner_products([torch.zeros(3), *others], factors)
    two, three = (torch.zeros(2), torch.zeros(2)), (torch.zeros(3), torch.zeros(3))
    for old, new in ((two, three), (three, two)):
        with pytest.raises(ValueError, match="do not fit"):
            loops.nesterov(old, torch.zeros(3), 0.9, 0.7, new)


@pytest.mark.parametrize(("scales", "codes", "rows", "width"), [(2, 5, 1, 3), (1, 2, 1, 3), (2, 2, 1, 4), (4, 2, 2, 1)])
def test_a_step_reads_nothing_behind_the_end_of_what_is_coded(scales: int, codes: int, rows: int, width: int) -> None:
    loops, three = compiled(), (torch.zeros(3), torch.zeros(3))
    assert loops is not None
    coded = Coded(4, memoryview(bytes(scales)), memoryview(bytes(codes)), rows, width, (1e-30, 1e30))
    with pytest.raises(ValueError, match="do not fit"):
        loops.nesterov_coded(three, [coded], 0.9, 0.7, three)
    with pytest.raises(ValueError, match="do not fit"):
        loops.quantize_difference(*three, [coded])
    for width in (0, 2049):
        vectors = (torch.zeros(width), torch.zeros(width))
        coded = Coded(8, memoryview(bytes(4)), memoryview(bytes(width)), 1, width, (1e-30, 1e30))
        with pytest.raises(ValueError, match=f"rows of {width} values: must be 1 to 2048"):
            loops.nesterov_coded(vectors, [coded], 0.9, 0.7, vectors)


# -- where there are none ----------------------------------------------------------------------------------------------


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation of its own, whose library is looked for again."""
    assert compiled() is not None
    library = next(module.SOURCE.parent.glob("_kernels*.so"))
    shutil.copy(module.SOURCE, tmp_path)
    shutil.copy(library, tmp_path)
    monkeypatch.setattr(module, "SOURCE", tmp_path / module.SOURCE.name)
    compiled.cache_clear()
    yield tmp_path
    compiled.cache_clear()


def test_a_library_beside_its_source_is_used(anew: Path) -> None:
    assert compiled() is not None
    (anew / "kernels.c").unlink()  # nobody knows of what it was built
    compiled.cache_clear()
    assert compiled() is None


def test_a_library_of_another_source_is_not_used(anew: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (anew / "kernels.c").open("a") as source:
        source.write("/* changed */\n")
    assert compiled() is None
    assert "was built from another kernels.c and is not used; reinstall Atoll" in caplog.text


def test_without_a_library_rounds_are_made_all_the_same(anew: Path, caplog: pytest.LogCaptureFixture) -> None:
    next(anew.glob("_kernels*.so")).unlink()
    with caplog.at_level(logging.INFO):
        payload = compressor("int8").encode(torch.arange(300.0))
    assert "no compiled loops: rounds take more CPU time" in caplog.text
    compiled.cache_clear()
    assert payload == compressor("int8").encode(torch.arange(300.0))


def test_what_is_no_library_of_ours_is_not_used(anew: Path) -> None:
    path = next(anew.glob("_kernels*.so"))
    path.unlink()
    path.write_bytes(b"\x7fELF but no more")
    assert compiled() is None
