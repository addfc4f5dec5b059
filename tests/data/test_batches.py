from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.data.batches import Batches, DataState
from peer.data.packing import PackedTokens
from peer.errors import UserError


def packed_windows(count: int, length: int = 4) -> PackedTokens:
    return PackedTokens(np.arange(count * length + 1, dtype=np.int32), length)


def test_an_epoch_visits_every_window_once_in_a_new_order():
    batches = Batches(packed_windows(12), 3, seed=5)
    epochs = [[batch for batch, _ in islice(batches, 4)] for _ in range(2)]
    firsts = [torch.cat(epoch)[:, 0].tolist() for epoch in epochs]
    assert sorted(firsts[0]) == sorted(firsts[1]) == [4 * i for i in range(12)]
    assert firsts[0] != firsts[1]
    assert epochs[0][0].shape == (3, 5)
    assert epochs[0][0].dtype == torch.int64
    assert batches.state == DataState(seed=5, epoch=1, position=12)


def test_a_last_short_batch_waits_for_the_next_epoch():
    states = [state for _, state in islice(Batches(packed_windows(7), 3, seed=1), 3)]
    assert [(state.epoch, state.position) for state in states] == [(0, 3), (0, 6), (1, 3)]


def test_the_order_is_the_documented_one_and_differs_between_seeds():
    first = next(Batches(packed_windows(10), 10, seed=3))[0][:, 0] // 4
    assert first.tolist() == np.random.default_rng([3, 0]).permutation(10).tolist()
    other = next(Batches(packed_windows(10), 10, seed=4))[0][:, 0] // 4
    assert first.tolist() != other.tolist()


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 2**31), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_resuming_from_any_state_continues_bit_for_bit(windows, batch, seed, stop):
    packed = packed_windows(windows + batch)
    whole = Batches(packed, batch, seed)
    for _ in range(stop):
        next(whole)
    saved = DataState.from_dict(json.loads(json.dumps(whole.state.to_dict())))
    resumed = Batches(packed, batch, seed=99, state=saved)
    for (expected, expected_state), (batch_bt, state) in islice(zip(whole, resumed, strict=True), 12):
        assert torch.equal(expected, batch_bt)
        assert expected_state == state


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UserError, match="batch size 4: must be between 1 and the 3 sequences"):
        Batches(packed_windows(3), 4, seed=0)
    with pytest.raises(UserError, match="batch size 0"):
        Batches(packed_windows(3), 0, seed=0)


@pytest.mark.parametrize("document", [
    {}, {"seed": 1, "epoch": 0}, {"seed": 1, "epoch": 0, "position": -1}, {"seed": 1, "epoch": 0, "position": 1.0},
    {"seed": True, "epoch": 0, "position": 0}, {"seed": 1, "epoch": 0, "position": 0, "extra": 1},
])
def test_a_malformed_state_is_refused(document):
    with pytest.raises(UserError, match="seed, epoch and position"):
        DataState.from_dict(document)
