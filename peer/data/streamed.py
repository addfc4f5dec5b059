"""A source that is read while it is trained on: its segments are made ahead in other processes."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from peer.data.batches import LanePlace, Segment
from peer.data.packing import PackedTokens
from peer.data.problems import SourceBusy
from peer.data.seeded import SeededSegments
from peer.data.segments import SegmentCache, SegmentHeader, SegmentRule, read_segment, segment_path
from peer.data.shards import Shard
from peer.data.worker import Order
from peer.data.workers import WorkerFailed, Workers
from peer.errors import UserError
from peer.system.clock import Clock, awake_clock

log = logging.getLogger(__name__)
LANES = 4
_HELD_OUT_LANE = LANES
_NO_TOKENS = np.empty(0, dtype=np.uint16)
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
PATIENCE_S = 30.0
MAX_STRETCH_BYTES = 256 << 20  # of text: what is beyond is not read
MAX_LOOKED_THROUGH = 256 << 20  # bytes of text, for validation: a manifest must not keep a peer from its first step
_numbers = itertools.count()


class Reading(NamedTuple):
    """What all sources share: the processes, the cache, and the encoder's id."""

    workers: Workers
    cache: SegmentCache
    encoder_id: str
    sequence_length: int
    clock: Clock = awake_clock


class StreamedSource:
    """The windows of the shards of one source.

    Args:
        name: for messages.
        number: of the source in the run; sources read their shards in orders of their own.

    Attributes:
        counts: rows left out, documents, text bytes and tokens of the segments so far.
        seeded: what falls to this peer, where peers share out the segments; None: all of it.
    """

    def __init__(
        self, reading: Reading, name: str, number: int, shards: Sequence[Shard], rule: SegmentRule, weight: float
    ) -> None:
        self.name, self.weight, self.lanes = name, weight, min(LANES, len(shards))
        self.over = False
        self.counts: Counter[str] = Counter()
        self._reading, self._number, self._shards, self._rule = reading, number, shards, rule
        self._ordered: dict[Path, Future[SegmentHeader]] = {}
        self._awaited: dict[Path, float] = {}  # since when
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._refused: set[Shard] = set()
        self._told: set[str] = set()
        self._barren = 0  # segments in a row without a window
        self.seeded: SeededSegments | None = None
        self._rules: dict[tuple[int, ...], SegmentRule | None] = {}  # of segments that are under way

    @property
    def num_files(self) -> int:
        """Shards of files: that a stream is read by, or cut into stretches."""
        return len(self._shards)

    def segment(self, lane: int, place: LanePlace, seed: int) -> Segment:
        """See `WindowSource.segment`."""
        self._check_up()
        shard, key = self._shard(lane, place, seed)
        if shard in self._refused:
            return self._checked(_NO_TOKENS, key, LanePlace(turn=place.turn + 1))
        rule = self._rule_at(key)
        if rule is None:
            del self._rules[key]
            return Segment(self._windows(_NO_TOKENS), key, LanePlace(turn=place.turn + 1))
        header, tokens = self._made(lane, shard, place.cursor, rule)
        ends = header.next is None
        after = LanePlace(turn=place.turn + ends, cursor=header.next or 0)
        self._order(lane, after, seed)
        self._rules.pop(key, None)
        return Segment(self._windows(tokens), key, after) if rule.passed_over else self._checked(tokens, key, after)

    def _rule_at(self, key: tuple[int, ...]) -> SegmentRule | None:
        """What is made of the segment with this key; None: all of its file is another peer's. That stays as it is once
        the segment is ordered, whichever peers appear meanwhile.
        """
        if key not in self._rules:
            self._rules[key] = self._rule
            _, epoch, chosen, cursor, *_ = key
            if self.seeded is not None and self.seeded.whole_files(len(self._shards)):
                self._rules[key] = self._rule if self.seeded.mine(epoch, chosen, 0) else None
            elif self.seeded is not None and not self.seeded.mine(epoch, chosen, cursor):
                self._rules[key] = self._rule.model_copy(update={"passed_over": True})
        return self._rules[key]

    def stretch(self, file: int, stretch: tuple[int, int]) -> PackedTokens:
        """The windows of a stretch (index, of) of a file.

        Raises:
            SourceBusy: they are not there yet; ask again.
        """
        self._check_up()
        shard, tokens = self._shards[file], _NO_TOKENS
        if shard not in self._refused:
            _, tokens = self._made(0, shard, 0, self._rule_of(stretch))
        return self._checked(tokens, (file, *stretch), LanePlace(), segments=stretch[1] * len(self._shards)).windows

    def prepare(self, file: int, stretch: tuple[int, int]) -> None:
        """Have a stretch made before it is needed."""
        self._order_file(0, self._shards[file], 0, self._rule_of(stretch))

    def _rule_of(self, stretch: tuple[int, int]) -> SegmentRule:
        return self._rule.model_copy(update={"stretch": stretch, "limit_bytes": MAX_STRETCH_BYTES})

    def _check_up(self) -> None:
        if self.down:
            raise SourceBusy(f"{self.name} is tried again later")

    @property
    def down(self) -> bool:
        """It could not be read a moment ago."""
        return self.over or self._reading.clock() < self._retry_at

    def _checked(self, tokens: np.ndarray, key: tuple[int, ...], after: LanePlace, segments: int = 0) -> Segment:
        """`segments`: of the source; 0: as many as it has shards, at least."""
        windows = self._windows(tokens)
        self._barren = 0 if len(windows) else self._barren + 1
        if self._barren > 2 * (segments or len(self._shards)) and after.cursor == 0:
            self.over = True
            raise self._nothing()
        return Segment(windows, key, after)

    def _windows(self, tokens: np.ndarray) -> PackedTokens:
        return PackedTokens(tokens, self._reading.sequence_length)

    def held_out(self, tokens: int, until: Callable[[], bool]) -> list[np.ndarray]:
        """The first documents for validation in the order of the shards, the same on every peer, until there are so
        many tokens; fewer where the source has fewer in its first MAX_LOOKED_THROUGH bytes, or the caller gives up.
        """
        found: list[np.ndarray] = []
        read = 0
        for shard in self._shards:
            cursor: int | None = 0
            while cursor is not None:
                missing, left = tokens - sum(map(len, found)), MAX_LOOKED_THROUGH - read
                if missing <= 0 or left <= 0:
                    return found
                if (made := self._held_out_of(shard, cursor, (missing, left), until)) is None:
                    return found
                header, held_out = made
                found.append(held_out)
                read, cursor = read + header.read_bytes, header.next
        return found

    def _held_out_of(
        self, shard: Shard, cursor: int, limits: tuple[int, int], until: Callable[[], bool]
    ) -> tuple[SegmentHeader, np.ndarray] | None:
        rule = self._rule.model_copy(update={
            "validation": True, "limit_tokens": limits[0], "limit_read_bytes": limits[1],
        })
        while True:
            try:
                if not self.down:
                    return self._made(_HELD_OUT_LANE, shard, cursor, rule)
            except SourceBusy:
                pass
            if until():
                return None

    def _nothing(self) -> SourceBusy:
        log.error("%s has no text to train on: %s", self.name, _in_words(self.counts))
        return SourceBusy(f"{self.name} has no text")

    def _shard(self, lane: int, place: LanePlace, seed: int) -> tuple[Shard, tuple[int, ...]]:
        """The shard of a lane's turn, and the seed of the order in its segment: each epoch has another order of all."""
        epoch, index = divmod(place.turn * self.lanes + lane, len(self._shards))
        own = (self._number,) if self._number else ()
        chosen = int(np.random.default_rng([seed, epoch, *own]).permutation(len(self._shards))[index])
        return self._shards[chosen], (seed, epoch, chosen, place.cursor, *own)

    def _path(self, shard: Shard, cursor: int, rule: SegmentRule) -> Path:
        return segment_path(self._reading.cache.folder, shard, rule, self._reading.encoder_id, cursor)

    def _made(
        self, lane: int, shard: Shard, cursor: int, rule: SegmentRule
    ) -> tuple[SegmentHeader, np.ndarray]:
        path = self._path(shard, cursor, rule)
        future = self._ordered.get(path)
        if future is None and (found := read_segment(path)) is not None:
            return found
        if future is None:
            future = self._give(lane, path, shard, cursor, rule)
        if not future.done():
            self._wait_for(path)
            raise SourceBusy(f"{self.name} is being read")
        del self._ordered[path]
        self._awaited.pop(path, None)
        try:
            header = future.result()
        except SourceBusy as error:
            log.warning("%s cannot be read now; trying again in %.0f s: %s", self.name, self._retry_s, error)
            self._retry_at = self._reading.clock() + self._retry_s
            self._retry_s = min(LONGEST_RETRY_S, 2.0 * self._retry_s)
            raise
        except WorkerFailed as error:
            raise UserError(f"{self.name} cannot be read: {error}", "see the message; free space on the disk helps") \
                from None
        self._retry_s = RETRY_S
        self._note(header, counts=not rule.validation)
        if header.refused:
            self._refused.add(shard)
        self._reading.cache.trim()
        found = read_segment(path)
        if found is None:
            raise SourceBusy(f"{path} was removed")
        return found

    def _wait_for(self, path: Path) -> None:
        """The next segment is not there: after a while the others give this source's share, and a line says so."""
        now = self._reading.clock()
        since = self._awaited.setdefault(path, now)
        if now - since > PATIENCE_S:
            log.warning("%s gives no text for %.0f s; still waiting", self.name, now - since)
            self._retry_at = now + PATIENCE_S

    def _order(self, lane: int, place: LanePlace, seed: int) -> None:
        """Have the segment at a place made before it is needed."""
        shard, key = self._shard(lane, place, seed)
        if (rule := self._rule_at(key)) is not None:
            self._order_file(lane, shard, place.cursor, rule)

    def _order_file(self, lane: int, shard: Shard, cursor: int, rule: SegmentRule) -> None:
        path = self._path(shard, cursor, rule)
        if path not in self._ordered and not path.exists():
            self._give(lane, path, shard, cursor, rule)

    def _give(self, lane: int, path: Path, shard: Shard, cursor: int, rule: SegmentRule) -> Future[SegmentHeader]:
        order = Order(
            number=next(_numbers), lane=(1 + LANES) * self._number + lane, path=str(path), shard=shard, rule=rule,
            cursor=cursor,
        )  # fmt: skip
        future = self._ordered[path] = self._reading.workers.order(order)
        return future

    def _note(self, header: SegmentHeader, *, counts: bool) -> None:
        for problem in header.problems:
            if problem not in self._told:
                log.warning("%s", problem)
            self._told.add(problem)
        if not counts:
            return
        self.counts.update({f"left out: {reason}": count for reason, count in header.left_out.items()})
        self.counts.update(
            documents=header.documents, text_bytes=header.text_bytes, tokens=header.tokens, held_out=header.held_out
        )


def _in_words(counts: Counter[str]) -> str:
    left_out = [f"{count:,} rows {key.removeprefix('left out: ')}" for key, count in counts.items() if "left" in key]
    return f"{counts['documents']:,} documents, {counts['tokens']:,} tokens" + ("; left out: " if left_out else "") + \
        ", ".join(left_out)
