from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.data.batches import Batches, DataState, LanePlace, Resident, Segment, SourceState
from peer.data.packing import PackedTokens
from peer.data.problems import SourceBusy
from peer.errors import UserError


def packed_windows(count: int, length: int = 4, first: int = 0) -> PackedTokens:
    return PackedTokens(np.arange(first, first + count * length + 1, dtype=np.int32), length)


def resident(count: int) -> list[Resident]:
    return [Resident(packed_windows(count))]


def place(turn: int = 0, cursor: int = 0, position: int = 0) -> LanePlace:
    return LanePlace(turn=turn, cursor=cursor, position=position)


class Shards:
    """Segments of so many windows each, in shards, one shard after the other in each lane; tokens count up from
    `first`, so that a window tells where it comes from.
    """

    over = False

    @property
    def down(self) -> bool:
        return self.busy

    def __init__(self, shards: Sequence[Sequence[int]], lanes: int, weight: float = 1.0, first: int = 0) -> None:
        self.weight, self.lanes, self.busy = weight, lanes, False
        self._shards = []
        for shard in shards:
            segments = []
            for count in shard:
                segments.append(packed_windows(count, first=first))
                first += 4 * count
            self._shards.append(segments)

    def segment(self, lane: int, place: LanePlace, seed: int) -> Segment:
        if self.busy:
            raise SourceBusy("down")
        epoch, shard = divmod(place.turn * self.lanes + lane, len(self._shards))
        segments = self._shards[shard]
        ends = place.cursor + 1 == len(segments)
        after = LanePlace(turn=place.turn + ends, cursor=0 if ends else place.cursor + 1)
        return Segment(segments[place.cursor], (seed, epoch, shard, place.cursor), after)


def starts(batches: Batches, count: int) -> list[int]:
    return [int(row[0]) // 4 for batch, _ in islice(batches, count) for row in batch]


def test_an_epoch_visits_every_window_once_in_a_new_order():
    batches = Batches(resident(12), 3, seed=5)
    epochs = [[batch for batch, _ in islice(batches, 4)] for _ in range(2)]
    firsts = [torch.cat(epoch)[:, 0].tolist() for epoch in epochs]
    assert sorted(firsts[0]) == sorted(firsts[1]) == [4 * i for i in range(12)]
    assert firsts[0] != firsts[1]
    assert epochs[0][0].shape == (3, 5)
    assert epochs[0][0].dtype == torch.int64
    assert batches.state == DataState(seed=5, sources=(SourceState(lanes=(place(1, 0, 12),)),))


def test_a_last_short_batch_waits_for_the_next_epoch():
    states = [state.sources[0].lanes[0] for _, state in islice(Batches(resident(7), 3, seed=1), 3)]
    assert [(state.turn, state.position) for state in states] == [(0, 3), (0, 6), (1, 3)]


def test_the_order_is_the_documented_one_and_differs_between_seeds():
    first = starts(Batches(resident(10), 10, seed=3), 1)
    assert first == np.random.default_rng([3, 0]).permutation(10).tolist()
    assert first != starts(Batches(resident(10), 10, seed=4), 1)


def test_lanes_take_turns_and_every_window_of_an_epoch_comes_once():
    source = Shards([[4, 4], [8], [2, 6], [8]], lanes=4)
    batches = Batches([source], 4, seed=0)
    found = [starts(batches, 1) for _ in range(8)]
    for rows in found:
        assert sorted(start // 8 for start in rows) == [0, 1, 2, 3]  # one of each lane, whose shards have 8 windows
    assert sorted(itertools.chain.from_iterable(found)) == list(range(32))
    assert all(lane.turn == 0 for lane in batches.state.sources[0].lanes)
    assert sorted(starts(batches, 8)) == list(range(32))
    assert all(lane.turn == 1 for lane in batches.state.sources[0].lanes)


def test_a_segment_of_less_than_a_share_gives_all_that_it_has():
    assert sorted(starts(Batches([Shards([[2, 3, 1, 4]], lanes=1)], 5, seed=0), 2)) == list(range(10))


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=5), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_sources_give_windows_by_their_weights(weights, batch):
    sources = [Shards([[40]], 1, weight, first=1000 * number) for number, weight in enumerate(weights)]
    count = -(-200 // batch)
    found = starts(Batches(sources, batch, seed=0), count)
    for number, weight in enumerate(weights):
        got = sum(250 * number <= start < 250 * (number + 1) for start in found)
        assert abs(got - len(found) * weight / sum(weights)) < len(weights)


def test_while_a_source_is_down_the_others_give_its_share_and_no_debt_grows_afterwards():
    down, up = Shards([[40]], 1), Shards([[40]], 1, first=1000)
    batches = Batches([down, up], 4, seed=0)
    down.busy = True
    assert all(start >= 250 for start in starts(batches, 20))
    down.busy = False
    assert [sum(start < 250 for start in starts(batches, 1)) for _ in range(3)] == [2, 2, 2]


def test_training_waits_while_all_are_down_and_ends_if_it_is_told_to(caplog):
    source, waits = Shards([[40]], 1), []
    source.busy = True

    def waiting(seconds: float) -> bool:
        waits.append(seconds)
        source.busy = len(waits) < 3
        return len(waits) > 4

    batches = Batches([source], 4, seed=0, waiting=waiting)
    assert len(starts(batches, 1)) == 4
    assert len(waits) == 3
    source.busy, source.over = False, True
    with pytest.raises(UserError, match="no source has text to train on any more"):
        next(Batches([source], 4, seed=0))
    over = Batches([source], 4, seed=0)
    source.over = False
    assert len(starts(over, 1)) == 4
    source.over = True
    assert list(over) == []
    assert "no source has text to train on any more: training ends" in caplog.text
    source.over = False
    again = Batches([source], 4, seed=0, waiting=lambda _: True)
    source.busy = True
    assert list(again) == []


mixes = st.lists(
    st.tuples(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 4),
              st.floats(0.1, 5.0)),
    min_size=1, max_size=3,
)  # fmt: skip


@given(mixes, st.integers(1, 6), st.integers(0, 2**31), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_resuming_from_any_state_continues_bit_for_bit(mix, batch, seed, stop):
    def sources() -> list[Shards]:
        return [Shards([*shards, [batch]], min(lanes, len(shards)), weight) for shards, lanes, weight in mix]

    whole = Batches(sources(), batch, seed)
    for _ in range(stop):
        next(whole)
    saved = DataState.from_dict(json.loads(json.dumps(whole.state.to_dict())))
    resumed = Batches(sources(), batch, seed=99, state=saved)
    for (expected, expected_state), (batch_bt, state) in islice(zip(whole, resumed, strict=True), 12):
        assert torch.equal(expected, batch_bt)
        assert expected_state == state


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UserError, match="batch size 4: must be between 1 and the 3 sequences"):
        Batches(resident(3), 4, seed=0)
    with pytest.raises(UserError, match="batch size 0"):
        Batches(resident(3), 0, seed=0)


def test_a_state_of_other_sources_is_refused():
    state = Batches(resident(9), 2, seed=0).state
    with pytest.raises(UserError, match="the state of 1 sources; the data has 2"):
        Batches([*resident(9), *resident(9)], 2, seed=0, state=state)
    with pytest.raises(UserError, match="the state of 1 lanes; the source has 2"):
        Batches([Shards([[9], [9]], 2)], 2, seed=0, state=state)


LANE = {"turn": 0, "cursor": 0, "position": 0}


@pytest.mark.parametrize("document", [
    {}, {"seed": -1}, {"seed": True}, {"seed": 1.0}, {"seed": 1, "extra": 1}, {"seed": 1, "sources": [{}]},
    {"seed": 1, "sources": [{"lanes": [{**LANE, "position": -1}]}]},
    {"seed": 1, "sources": [{"lanes": [{**LANE, "cursor": 2**63}]}]},
    {"seed": 1, "sources": [{"lanes": [{**LANE, "turn": 1.5}]}]}, {"seed": 1, "sources": [{"lanes": [LANE] * 65}]},
])
def test_a_malformed_state_is_refused(document):
    with pytest.raises(UserError, match="does not say where to continue"):
        DataState.from_dict(document)
