"""Data trained on but not yet certified, and the interface to the trainer's data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from peer.link.messages import DataUse, Leased, LivePeers
from peer.protocol.ranges import Range, clipped, joined, write_ranges


class DataPort(Protocol):
    """The data of a trainer, as far as peers share it out."""

    @property
    def waits(self) -> bool:
        """Whether no lease is at hand."""

    def take_used(self) -> list[Range]:
        """Parts that were read entirely since the last call."""

    def hear(self, message: Leased | LivePeers) -> None:
        """What the agent says."""

    def report(self, pending: Sequence[Range], tokens_per_s: float) -> DataUse | None:
        """What the agent is to know; None where nothing is leased."""


class NothingShared:
    """The `DataPort` of a peer that reads everything in an order of its own."""

    waits = False

    def take_used(self) -> list[Range]:
        return []

    def hear(self, message: Leased | LivePeers) -> None: ...

    def report(self, pending: Sequence[Range], tokens_per_s: float) -> DataUse | None: ...


class UsedData:
    """Parts that were trained on, from then until a certificate holds them.

    Attributes:
        most_parts: that one contribution may claim; the others wait for the next one.
    """

    def __init__(self) -> None:
        self.most_parts = 0
        self._parts: list[Range] = []
        self._marked: list[Range] = []  # in the contribution
        self._claimed: list[Range] = []

    @property
    def pending(self) -> list[Range]:
        """All of them."""
        return joined([*self._marked, *self._parts])

    def add(self, parts: Iterable[Range]) -> None:
        self._parts += parts

    def mark(self) -> None:
        """The next contribution is of this moment."""
        self._marked, self._parts = joined([*self._marked, *self._parts]), []
        self._claimed = clipped(self._marked, self.most_parts)

    @property
    def claim(self) -> str:
        """What the marked contribution says it was trained on."""
        return write_ranges(self._claimed)

    def settle(self) -> None:
        """The marked contribution is in the chain."""
        self._marked, self._claimed = _without(self._marked, self._claimed), []

    def drop(self, *, marked: bool) -> None:
        """What was trained since the mark is lost; with `marked` all of it."""
        self._parts = []
        if marked:
            self._marked, self._claimed = [], []


def _without(ranges: Sequence[Range], claimed: Sequence[Range]) -> list[Range]:
    """What remains of ranges whose beginnings were claimed."""
    ends = {(one.epoch, one.first): one.end for one in claimed}
    left = [one._replace(first=ends.get((one.epoch, one.first), one.first)) for one in ranges]
    return [one for one in left if one.first < one.end]
