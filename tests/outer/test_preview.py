from __future__ import annotations

import random

import pytest
import torch

from peer.outer.compress.base import NonFiniteError
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.sliced import Sliced
from peer.outer.fragments import parts_of
from peer.outer.optimizer import Nesterov, OuterOptimizer, Sgd
from peer.outer.preview import Preview
from peer.outer.state import CHUNK
from tests.outer.test_state import LARGE, make_state, make_update

INT8, FP32 = Sliced(BlockInt8()), Sliced(Fp32())
NESTEROV, SGD = Nesterov(lr=0.7, momentum=0.9), Sgd(lr=1.0)


class Arrival:
    """An update whose parts come slice by slice, those of each part in order."""

    def __init__(self, codec: Sliced, update_parts: tuple[bytes, ...], numel: int) -> None:
        self.bounds = parts_of(numel, len(update_parts), codec.block)
        self.parts = [bytearray(b"\xff" * len(part)) for part in update_parts]  # not a value of it until it has come
        self._codec, self._sent = codec, update_parts
        self._slices = [codec.slices(*bounds) for bounds in self.bounds]
        self._known = [0] * len(self.parts)

    def places(self) -> list[int]:
        """The part of each slice that will come."""
        return [index for index, slices in enumerate(self._slices) for _ in slices]

    def come(self, index: int) -> int:
        """The next slice of that part; -> the element up to which it is there."""
        start, stop = self._slices[index][self._known[index]]
        first = self._codec.wire_bytes(start - self.bounds[index][0]) if start > self.bounds[index][0] else 0
        last = first + self._codec.base.wire_bytes(stop - start)
        self.parts[index][first:last] = self._sent[index][first:last]
        self._known[index] += 1
        return stop


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("codec", "optimizer"), [(INT8, NESTEROV), (FP32, SGD)], ids=["int8", "fp32"])
@pytest.mark.parametrize(("numel", "parts"), [(LARGE, 3), (CHUNK, 2), (1000, 4), (10, 4)])
def test_it_is_the_preview_of_the_whole_in_whatever_order_the_slices_come(
    codec: Sliced, optimizer: OuterOptimizer, numel: int, parts: int, seed: int
) -> None:
    state, update = make_state(numel, codec, optimizer), make_update(numel, parts, codec)
    arrival, rng = Arrival(codec, tuple(map(bytes, update.parts)), numel), random.Random(seed)
    preview, order = Preview(state, arrival.bounds), arrival.places()
    rng.shuffle(order)
    for place in order:
        assert not preview.complete
        preview.reach(place, arrival.come(place))
        while preview.ready and rng.random() < 0.7:
            preview.step(arrival.parts)
    while preview.ready:
        preview.step(arrival.parts)
    assert preview.complete
    assert preview.digest() == state.preview(update)


def test_a_chunk_is_hashed_as_soon_as_it_is_whole() -> None:
    codec = INT8
    state, update = make_state(LARGE, codec), make_update(LARGE, 1, codec)
    arrival = Arrival(codec, tuple(map(bytes, update.parts)), LARGE)
    preview, hashed = Preview(state, arrival.bounds), []
    for place in arrival.places():
        preview.reach(place, arrival.come(place))
        hashed.append(preview.ready)
        if preview.ready:
            preview.step(arrival.parts)
    assert hashed == [False, True, False, True, True]  # two slices a chunk; the last chunk has 77 elements


def test_a_state_beyond_fp32_is_told_when_its_chunk_is_there() -> None:
    state = make_state(1000, FP32)
    preview = Preview(state, [(0, 1000)])
    preview.reach(0, 1000)
    with pytest.raises(NonFiniteError, match="of the state infinite"):
        preview.step([FP32.encode(torch.full((1000,), 3e38))])
