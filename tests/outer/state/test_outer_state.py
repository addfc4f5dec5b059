"""The outer state: digests, contributions, which updates are taken, and the step that they make."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import pytest
import torch
from blake3 import blake3

from peer.errors import ProtocolError
from peer.outer.compress.base import LARGEST_VALUE, Compressor, NonFiniteError, Payload, is_finite
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.registry import COMPRESSORS
from peer.outer.numerics.kernels import Coded
from peer.outer.numerics.tiles import TILE_ELEMENTS
from peer.outer.optim.optimizers import Nesterov, OuterOptimizer, Vectors
from peer.outer.state import outer_state as state_module
from peer.outer.state.flat_layout import shards_of
from peer.outer.state.outer_state import CHUNK, OuterState, digest_of, state_digest
from peer.outer.state.reduced_update import SLICE, ReduceFormat, Update
from tests.outer.optim.test_optimizers import ALL, AVERAGED

NESTEROV = Nesterov(lr=0.7, momentum=0.9)
LARGE = 2 * CHUNK + 77


def make_state(numel: int, codec: Compressor, optimizer: OuterOptimizer = NESTEROV) -> OuterState:
    generator = torch.Generator().manual_seed(5)
    buffers = [torch.rand(numel, generator=generator) for _ in range(optimizer.num_buffers)]
    return OuterState(torch.randn(numel, generator=generator), buffers, optimizer, ReduceFormat(numel, codec))


def make_update(numel: int, num_shards: int, codec: Compressor, seed: int = 0, elements: int = SLICE) -> Update:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    wire, shards = ReduceFormat(numel, codec, elements), range(num_shards)
    payloads = [b"".join(codec.encode(x[a:b]) for a, b in wire.slices(num_shards, place)) for place in shards]
    return wire.update(payloads, [1] * num_shards, 0)


class Spy(BlockInt8):
    """Notes the largest range that was decoded at a time, and counts the values that were checked."""

    largest = 0
    checked = 0

    def _check(self, view: memoryview, n: int, start: int, rows: int, width: int) -> None:
        type(self).checked += rows * width
        super()._check(view, n, start, rows, width)

    def decode_range(
        self, payload: Payload, n: int, start: int, stop: int, out: torch.Tensor | None = None, *, checked: bool = False
    ) -> torch.Tensor:
        type(self).largest = max(self.largest, stop - start)
        return super().decode_range(payload, n, start, stop, out, checked=checked)

    def coded(self, payload: Payload, n: int, start: int, stop: int) -> Sequence[Coded] | None:
        type(self).largest = max(self.largest, stop - start)
        return super().coded(payload, n, start, stop)


def test_digest_is_as_specified() -> None:
    state = make_state(3, Fp32())
    anchor, buffer = (
        blake3(struct.pack("<3f", *t.tolist())).digest() for t in (state.anchor, state.buffers[0])
    )
    expected = hashlib.sha256(b"atoll-state-2" + struct.pack("<QB", 3, 1) + anchor + buffer).hexdigest()
    assert state.chunk_digests() == [anchor, buffer]
    assert state.digest() == expected == state_digest([anchor, buffer], [3], 1)


def test_chunks_are_the_anchors_then_the_buffers() -> None:
    state = make_state(LARGE, Fp32())
    digests = state.chunk_digests()
    assert len(digests) == 6
    assert digests[2] == blake3(state.anchor[2 * CHUNK :].numpy().tobytes()).digest()
    assert digests[3] == blake3(state.buffers[0][:CHUNK].numpy().tobytes()).digest()


def test_any_single_bit_changes_the_digest() -> None:
    state = make_state(1000, Fp32())
    before = state.digest()
    for tensor in (state.anchor, state.buffers[0]):
        tensor.view(torch.int32)[999] ^= 1
        assert state.digest() != before
        tensor.view(torch.int32)[999] ^= 1
    assert state.digest() == before


@pytest.mark.parametrize("digests", [[], [bytes(32)], [bytes(32)] * 3, [bytes(32), bytes(31)]])
def test_a_list_of_chunk_digests_that_does_not_fit_is_refused(digests: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="must be 2 of 32 bytes"):
        state_digest(digests, [1000], 1)


def test_contribution_is_the_pseudo_gradient_in_shards() -> None:
    state = make_state(1000, Fp32())
    local = state.anchor + 0.25
    payloads = [state.source(local).encode(Fp32(), *shard) for shard in shards_of(1000, 3, 1)]
    received = torch.cat([Fp32().decode(p, b - a) for p, (a, b) in zip(payloads, shards_of(1000, 3, 1), strict=True)])
    assert torch.equal(received, state.anchor - local)
    assert torch.equal(state.source(local).read(10, 20), received[10:20])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("codec", [Fp32(), BlockInt8()], ids=["fp32", "int8"])
def test_a_diverged_trainer_contributes_nothing(codec: Compressor, bad: float) -> None:
    state = make_state(1000, codec)
    local = state.anchor.clone()
    local[600] = bad
    with pytest.raises(NonFiniteError, match=r"local parameters \[512, 1000\) hold NaN or infinity"):
        state.source(local).encode(codec, 512, 1000)


@pytest.mark.parametrize("codec", [Fp32(), BlockInt8(), COMPRESSORS["int4"]], ids=["fp32", "int8", "int4"])
@pytest.mark.parametrize("optimizer", [*ALL, *AVERAGED], ids=repr)
def test_a_check_changes_nothing_and_apply_works_in_place(codec: Compressor, optimizer: OuterOptimizer) -> None:
    state, update = make_state(LARGE, codec, optimizer), make_update(LARGE, 3, codec)
    state.round, state.lineage_id = 4, "parent"
    before, addresses = state.digest(), [t.data_ptr() for t in (state.anchor, *state.buffers)]
    anchor, buffers = state.anchor.clone(), [buffer.clone() for buffer in state.buffers]
    state.check(update)
    assert (state.digest(), state.round, state.lineage_id) == (before, 4, "parent")
    state.apply(update, 5, "child")
    optimizer.step_(anchor, buffers, update.decode_range(0, LARGE), round=4)
    assert (state.digest(), state.round, state.lineage_id) == (digest_of((anchor, *buffers)), 5, "child")
    assert [t.data_ptr() for t in (state.anchor, *state.buffers)] == addresses


@pytest.mark.parametrize("name", COMPRESSORS)
def test_apply_is_the_optimizer_on_the_decoded_update(name: str) -> None:
    codec = COMPRESSORS[name]
    state, update = make_state(1000, codec), make_update(1000, 3, codec, elements=8 * codec.block)
    anchor, buffer = state.anchor.clone(), state.buffers[0].clone()
    NESTEROV.step_(anchor, [buffer], update.decode_range(0, 1000))
    state.apply(update, 1, "child")
    assert torch.equal(state.anchor, anchor)
    assert torch.equal(state.buffers[0], buffer)


@pytest.mark.parametrize("threads", [1, 2])
def test_neither_chunk_boundaries_nor_threads_matter(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    torch.set_num_threads(threads)
    whole, chunked = make_state(100_003, BlockInt8()), make_state(100_003, BlockInt8())
    update = make_update(100_003, 3, BlockInt8())
    whole.apply(update, 1, "")
    expected = whole.digest()
    with monkeypatch.context() as patch:
        patch.setattr(state_module, "CHUNK", 512)
        chunked.apply(update, 1, "")
        assert chunked.digest() != expected  # of other chunks
    assert chunked.digest() == expected


def test_check_and_apply_decode_a_tile_at_a_time() -> None:
    state, update = make_state(LARGE, Spy()), make_update(LARGE, 2, Spy())
    Spy.largest = 0
    state.check(update)
    state.apply(update, 1, "")
    assert Spy.largest == TILE_ELEMENTS


def test_an_update_is_checked_once() -> None:
    Spy.checked = 0
    state, update = make_state(LARGE, Spy()), make_update(LARGE, 2, Spy())
    assert Spy.checked == LARGE
    state.check(update)
    state.apply(update, 1, "")
    assert Spy.checked == LARGE


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_an_update_that_could_lead_beyond_fp32_is_refused_and_changes_nothing(name: str, sign: float) -> None:
    codec, x = COMPRESSORS[name], torch.zeros(1000)
    state = make_state(1000, codec)
    before = state.digest()
    for value, allowed in ((LARGEST_VALUE / 4, True), (4 * LARGEST_VALUE, False)):
        x[999] = sign * value
        if name == "fp16" or (name, allowed) == ("sign", False):
            x[992:] = sign * min(value, 6e4)  # the most that fp16 holds; a sign's scale is the mean of its block
        update = Update((codec.encode(x),), 1000, codec)
        if allowed or float(update.decode_range(0, 1000).abs().max()) <= LARGEST_VALUE:
            state.check(update)
        else:
            with pytest.raises(NonFiniteError, match=r"values \[0, 1000\) of the update may reach .*: more than 2\.8"):
                state.check(update)
    assert state.digest() == before


@pytest.mark.parametrize("optimizer", [*ALL, *AVERAGED], ids=repr)
@pytest.mark.parametrize("pattern", [(1.0,), (1.0, -1.0), (1.0, 1.0, 0.0)], ids=str)
def test_no_outer_optimizer_leaves_fp32_with_the_largest_updates(
    optimizer: OuterOptimizer, pattern: Sequence[float]
) -> None:
    state = make_state(8, Fp32(), optimizer)
    for round in range(300):
        value = pattern[round % len(pattern)] * LARGEST_VALUE
        state.apply(Update((Fp32().encode(torch.full((8,), value)),), 8, Fp32()), round + 1, "")
    assert all(is_finite(tensor) for tensor in (state.anchor, *state.buffers))
    assert all(float(tensor.abs().max()) < 2.0**112 for tensor in (state.anchor, *state.buffers))  # of 2^128


def test_an_update_of_another_size_is_refused() -> None:
    state, update = make_state(1000, Fp32()), make_update(999, 1, Fp32())
    with pytest.raises(AssertionError, match="update of 999 values on a fragment of 1000"):
        state.check(update)
    with pytest.raises(AssertionError, match="update of 999 values on a fragment of 1000"):
        state.apply(update, 1, "")


def test_tensors_that_cannot_hold_a_state_are_refused() -> None:
    with pytest.raises(AssertionError, match="0 buffers; need 1"):
        OuterState(torch.zeros(4), [], NESTEROV, ReduceFormat(4, Fp32()))
    with pytest.raises(AssertionError, match=r"shape \(3,\); need \(4,\)"):
        OuterState(torch.zeros(4), [torch.zeros(3)], NESTEROV, ReduceFormat(4, Fp32()))
    with pytest.raises(AssertionError, match=r"torch\.float64"):
        OuterState(torch.zeros(4, dtype=torch.float64), [torch.zeros(4)], NESTEROV, ReduceFormat(4, Fp32()))
    with pytest.raises(AssertionError, match="contiguous"):
        OuterState(torch.zeros(8)[::2], [torch.zeros(4)], NESTEROV, ReduceFormat(4, Fp32()))
    with pytest.raises(AssertionError, match="whole blocks of 3"):
        ReduceFormat(4, BlockInt8(block=3))
    with pytest.raises(AssertionError, match="payloads of 5 values; anchor of 4"):
        OuterState(torch.zeros(4), [torch.zeros(4)], NESTEROV, ReduceFormat(5, Fp32()))


@pytest.mark.parametrize("optimizer", [*ALL, AVERAGED[1]], ids=repr)
def test_columns_of_a_copy_are_carried_on_as_the_state_is(optimizer: OuterOptimizer) -> None:
    def rate(round: int) -> float:
        return 0.5 + round

    state = make_state(LARGE, BlockInt8(), optimizer)
    state.rate = rate
    for buffer in state.buffers:
        buffer.abs_()
    columns = [(start, min(start + CHUNK, LARGE)) for start in range(0, LARGE, CHUNK)]
    copies = [[tensor[a:b].clone() for tensor in (state.anchor, *state.buffers)] for a, b in columns]
    for round, shards in ((0, 3), (1, 2)):
        update = make_update(LARGE, shards, BlockInt8(), seed=round)
        state.apply(update, round + 1, "")
        for (start, stop), (anchor, *buffers) in zip(columns, copies, strict=True):
            state.carry_on(Vectors(anchor, buffers), update, start, stop, round)
    for (start, stop), copy in zip(columns, copies, strict=True):
        assert all(map(torch.equal, copy, [tensor[start:stop] for tensor in (state.anchor, *state.buffers)]))
