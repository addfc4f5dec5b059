"""Batches in a seeded order that resumes exactly: every batch comes with the state to continue after it.

A source gives windows in *lanes*, each of which reads its own shards, segment by segment, and the windows of a segment
in an order of their own. So there is no shuffle buffer, and a state is a few integers for each lane. A text that fits
into memory is one lane with one segment: each epoch is a permutation of all its windows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from peer.data.packing import PackedTokens
from peer.data.problems import SourceBusy
from peer.data.shared import SharedWindows
from peer.errors import UserError
from peer.protocol.ranges import Range

log = logging.getLogger(__name__)
WEIGHT_UNITS = 1_000_000
WAIT_S = 0.05  # between two looks at sources that have nothing now
Count = Annotated[int, Field(ge=0, lt=2**63)]
_LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # JSON has no tuples

Piece = Annotated[tuple[Count, Count, Count], _LISTED]  # see `peer.protocol.ranges.Range`


class _Numbers(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LanePlace(_Numbers):
    """Where a lane is: shards begun before, the cursor of its segment, windows of that segment used up."""

    turn: Count = 0
    cursor: Count = 0
    position: Count = 0


class SourceState(_Numbers):
    """Where a source is: its lanes, which of them is next, and by how much it is behind its share of windows.

    Attributes:
        pieces: that this peer leases of it, and has not read.
    """

    lanes: Annotated[tuple[LanePlace, ...], _LISTED, Field(max_length=64)]
    next_lane: Count = 0
    credit: int = 0
    pieces: Annotated[tuple[Piece, ...], _LISTED, Field(max_length=64)] = ()


class DataState(_Numbers):
    """Where a peer is in its data."""

    seed: Count
    sources: Annotated[tuple[SourceState, ...], _LISTED, Field(max_length=64)] = ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON document that `from_dict` reads."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DataState:
        """The inverse of `to_dict`.

        Raises:
            UserError: missing or unknown keys, or a value that is no integer >= 0.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise UserError(
                f"the state of the data does not say where to continue: {where}: {first['msg']}",
                "resume from another checkpoint",
            ) from None


class Segment(NamedTuple):
    """A part of one shard.

    Attributes:
        key: seeds the order of the windows.
        next: the place after it.
    """

    windows: PackedTokens
    key: tuple[int, ...]
    next: LanePlace


class WindowSource(Protocol):
    """Where windows come from."""

    weight: float
    lanes: int

    def segment(self, lane: int, place: LanePlace, seed: int) -> Segment:
        """The segment at a place, whatever its position.

        Raises:
            SourceBusy: it is not there yet; ask again.
        """

    @property
    def down(self) -> bool:
        """It cannot be read for the moment: others give its share."""

    @property
    def over(self) -> bool:
        """Nothing will ever come again."""


class Resident:
    """Windows in memory: one lane, one shard, one segment."""

    lanes = 1
    over = down = False

    def __init__(self, windows: PackedTokens, weight: float = 1.0) -> None:
        self.windows, self.weight = windows, weight

    def segment(self, lane: int, place: LanePlace, seed: int) -> Segment:  # noqa: ARG002
        """See `WindowSource.segment`; the key of epoch e is (seed, e)."""
        return Segment(self.windows, (seed, place.turn), LanePlace(turn=place.turn + 1))


class _Shared:
    """A source that peers share out. It continues where a checkpoint was, unless others have read that meanwhile."""

    def __init__(self, source: SharedWindows, state: SourceState | None) -> None:
        self.source, self.units, self.credit = source, _units(source.weight), 0
        if state is not None and state.lanes:
            self.credit = state.credit
            source.resume([Range(*piece) for piece in state.pieces], state.lanes[0].position)

    @property
    def state(self) -> SourceState:
        epoch, shard, window = self.source.place
        return SourceState(
            lanes=(LanePlace(turn=epoch, cursor=shard, position=window),), credit=self.credit,
            pieces=tuple(self.source.left),
        )  # fmt: skip

    def take(self, count: int, until: Callable[[], bool]) -> list[torch.Tensor]:
        """So many windows; fewer if the source goes down or the caller gives up."""
        rows = self.source.take(count)
        while len(rows) < count and not (self.source.down or self.source.over or until()):
            rows += self.source.take(count - len(rows))
        return rows


def _units(weight: float) -> int:
    return max(1, round(weight * WEIGHT_UNITS))


class Batches:
    """An iterator of (batch int64 [B, T + 1], the state after it), which ends where no source has text any more.

    Windows that do not fill the share of a batch at the end of a segment are passed over. Resuming needs the same
    sources and the same batch size.

    Args:
        sources: each gives windows in proportion to its weight.
        batch_sequences: B.
        seed: of the order, integer >= 0; a resumed state brings its own.
        state: where to continue; None starts at the beginning.
        waiting: called with seconds to wait while no source has anything; true ends the iteration.

    Attributes:
        waited_s: seconds that no source had anything.

    Raises:
        UserError: fewer windows in memory than one batch; at the first batch, no text in any source.
    """

    def __init__(
        self, sources: Sequence[WindowSource | SharedWindows], batch_sequences: int, seed: int,
        state: DataState | None = None, waiting: Callable[[float], bool] | None = None,
    ) -> None:
        alone = sources[0] if len(sources) == 1 else None
        available = batch_sequences
        if isinstance(alone, Resident | SharedWindows):
            available = len(alone.windows) if isinstance(alone, Resident) else alone.blocks.available
        if batch_sequences < 1 or available < batch_sequences:
            raise UserError(
                f"batch size {batch_sequences}: must be between 1 and the {available} sequences of the data",
                "lower the batch size, or add text",
            )
        self._batch_sequences, self._waiting = batch_sequences, waiting or _sleep
        self.waited_s, self._stopped, self._begun = 0.0, False, False
        seed = seed if state is None else state.seed
        before = state.sources if state is not None and state.sources else [None] * len(sources)
        if len(before) != len(sources):
            raise UserError(
                f"the checkpoint has the state of {len(before)} sources; the data has {len(sources)}",
                "resume with the data of then, or start fresh",
            )
        self._mixed = [
            _Shared(source, at) if isinstance(source, SharedWindows) else _Mixed(source, seed, at)
            for source, at in zip(sources, before, strict=True)
        ]
        self._seed = seed

    @property
    def state(self) -> DataState:
        """Where the next batch begins."""
        return DataState(seed=self._seed, sources=tuple(mixed.state for mixed in self._mixed))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, DataState]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, DataState]:
        rows: list[torch.Tensor] = []
        while len(rows) < self._batch_sequences:  # once, but for a source that gave less than its share
            for mixed, count in self._shares(self._batch_sequences - len(rows)):
                rows += mixed.take(count, self._until)
            if self._stopped:
                raise StopIteration
        self._begun = True
        return torch.stack(rows), self.state

    def _shares(self, windows: int) -> list[tuple[_Mixed | _Shared, int]]:
        """How many windows each source gives: whichever is most behind its share gives the next."""
        if len(self._mixed) == 1:
            return [(mixed, windows) for mixed in self._able()]
        counts = dict.fromkeys(self._mixed, 0)
        for _ in range(windows):
            able = self._able()
            if not able:
                return []
            for mixed in able:
                mixed.credit += mixed.units
            chosen = max(able, key=lambda mixed: mixed.credit)
            chosen.credit -= sum(mixed.units for mixed in able)
            counts[chosen] += 1
        return [(mixed, count) for mixed, count in counts.items() if count]

    def _able(self) -> list[_Mixed | _Shared]:
        """The sources that are not down; waits for one."""
        while True:
            left = [mixed for mixed in self._mixed if not mixed.source.over]
            if not left:
                what, hint = "no source has text to train on any more", "see the messages above, or set train_files"
                if not self._begun:
                    raise UserError(what, hint)
                log.error("%s: training ends; %s", what, hint)
                self._stopped = True
                return []
            able = [mixed for mixed in left if not mixed.source.down]
            if able or self._until():
                return able

    def _until(self) -> bool:
        """Wait a moment; whether to give up."""
        began = time.perf_counter()
        self._stopped = self._waiting(WAIT_S)
        self.waited_s += time.perf_counter() - began
        return self._stopped


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class _Mixed:
    """One source, its lanes, and its share."""

    def __init__(self, source: WindowSource, seed: int, state: SourceState | None) -> None:
        before = state if state is not None else SourceState(lanes=(LanePlace(),) * source.lanes)
        if len(before.lanes) != source.lanes:
            raise UserError(
                f"the checkpoint has the state of {len(before.lanes)} lanes; the source has {source.lanes}",
                "resume with the data of then, or start fresh",
            )
        self.source, self.units = source, _units(source.weight)
        self.lanes = [_Lane(source, number, seed, place) for number, place in enumerate(before.lanes)]
        self.next_lane, self.credit = before.next_lane % source.lanes, before.credit

    @property
    def state(self) -> SourceState:
        return SourceState(
            lanes=tuple(lane.place for lane in self.lanes), next_lane=self.next_lane, credit=self.credit
        )

    def take(self, count: int, until: Callable[[], bool]) -> list[torch.Tensor]:
        """So many windows, in turn from all lanes; fewer if the source goes down or the caller gives up."""
        turns = [(self.next_lane + index) % len(self.lanes) for index in range(min(count, len(self.lanes)))]
        rows: list[torch.Tensor] = []
        for index, lane in enumerate(turns):
            share = len(range(index, count, len(self.lanes)))
            taken = self.lanes[lane].take(share, until)
            rows += taken
            if len(taken) < share:
                return rows
        self.next_lane = (self.next_lane + count) % len(self.lanes)
        return rows


class _Lane:
    """One reader of a source."""

    def __init__(self, source: WindowSource, number: int, seed: int, place: LanePlace) -> None:
        self._source, self._number, self._seed = source, number, seed
        self.place = place
        self._segment: Segment | None = None
        self._order: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, dtype=np.int64)

    def _ready(self) -> bool:
        if self._segment is None:
            try:
                self._segment = self._source.segment(self._number, self.place, self._seed)
            except SourceBusy:
                return False
            windows = len(self._segment.windows)
            self._order = np.random.default_rng(list(self._segment.key)).permutation(windows)
        return True

    def take(self, count: int, until: Callable[[], bool]) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = []
        while len(rows) < count:
            while not self._ready():
                if self._source.down or until():
                    return rows
            assert self._segment is not None
            wanted, position = count - len(rows), self.place.position
            left = len(self._order) - position
            if left >= wanted or 0 < left == len(self._order):  # a segment of less than a share gives all it has
                end = position + min(wanted, left)
                rows += [self._segment.windows.window(int(index)) for index in self._order[position:end]]
                self.place = self.place.model_copy(update={"position": end})
            else:
                self.place, self._segment = self._segment.next, None
        return rows
