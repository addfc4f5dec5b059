"""Ranges of a corpus that peers share out: their text in joins and records, and how much a member may claim.

The corpus is cut into shards, each of them into PARTS_PER_SHARD parts. A range is `epoch:first-end`; in a join it
counts parts of all shards in a row, in a peer record whole shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from peer.errors import ProtocolError
from peer.protocol.data_spec import PARTS_PER_SHARD, SharedData

MAX_RANGES = 8  # of one join, and of one record
MAX_LEASED = 16  # shards of one record that others believe
_RANGE = "(0|[1-9][0-9]{0,5}):(0|[1-9][0-9]{0,6})-([1-9][0-9]{0,6})"
RangesText = Annotated[str, Field(pattern=f"^({_RANGE}(,{_RANGE}){{0,{MAX_RANGES - 1}}})?$", max_length=192)]


class Range(NamedTuple):
    """[first, end) in one epoch."""

    epoch: int
    first: int
    end: int

    @property
    def shard(self) -> int:
        """The one that its first part is of."""
        return self.first // PARTS_PER_SHARD

    def shifted(self, by: int) -> Range:
        """As many places further on."""
        return Range(self.epoch, self.first + by, self.end + by)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same in ascending order, and as few as possible."""
    found: list[Range] = []
    for one in sorted(ranges):
        if found and found[-1].epoch == one.epoch and found[-1].end >= one.first:
            found[-1] = found[-1]._replace(end=max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def within(ranges: Iterable[Range], start: int, stop: int) -> list[Range]:
    """What of these ranges lies in [start, stop), counted from `start`."""
    return [
        Range(one.epoch, max(one.first, start), min(one.end, stop)).shifted(-start)
        for one in ranges if one.first < stop and one.end > start
    ]  # fmt: skip


def write_ranges(ranges: Iterable[Range]) -> str:
    """The text of the first MAX_RANGES of them, once they are joined."""
    return ",".join(f"{one.epoch}:{one.first}-{one.end}" for one in joined(ranges)[:MAX_RANGES])


def read_ranges(text: str, limit: int) -> list[Range]:
    """The inverse of `write_ranges`.

    Args:
        text: of the pattern of `RangesText`.
        limit: the end of the last range that there can be.

    Raises:
        ProtocolError: an empty range, one beyond the limit, or another order than that of `write_ranges`.
    """
    ranges = []
    for item in text.split(",") if text else ():
        epoch, _, places = item.partition(":")
        first, _, end = places.partition("-")
        ranges.append(Range(int(epoch), int(first), int(end)))
    if any(one.first >= one.end or one.end > limit for one in ranges) or joined(ranges) != ranges:
        raise ProtocolError(f"ranges {text!r} are not in order, or reach beyond {limit}")
    return ranges


def size_of(ranges: Iterable[Range]) -> int:
    """Parts, or shards, of all of them."""
    return sum(one.end - one.first for one in ranges)


def clipped(ranges: Sequence[Range], most: int) -> list[Range]:
    """The first of them, of so many parts together."""
    found: list[Range] = []
    for one in joined(ranges)[:MAX_RANGES]:
        end = min(one.end, one.first + most)
        if end > one.first:
            found.append(one._replace(end=end))
        most -= end - one.first
    return found


@dataclass(frozen=True)
class ClaimRule:
    """What members may claim to have trained on.

    Attributes:
        shards: of each source.
        most_parts: of one contribution: twice those that its tokens are of, and two that were begun before; no more
            than a peer may lease.
    """

    shards: tuple[int, ...] = ()
    most_parts: int = 0

    @classmethod
    def of(cls, data: SharedData | None, nominal_tokens: int) -> ClaimRule:
        """The rule of a run; without shared data no member claims anything."""
        if data is None:
            return cls()
        most = 2 + 2 * -(-nominal_tokens * PARTS_PER_SHARD // data.shard_tokens)
        return cls(data.shards, min(most, MAX_LEASED * PARTS_PER_SHARD))

    def check(self, who: str, text: str, fragment: int) -> None:
        """Raise ProtocolError if a member claims what it cannot have trained; only of fragment 0 it claims anything."""
        if not text:
            return
        ranges = read_ranges(text, PARTS_PER_SHARD * sum(self.shards))
        if fragment or size_of(ranges) > self.most_parts:
            raise ProtocolError(f"{who} claims {size_of(ranges)} parts of the data; at most {self.most_parts}")
