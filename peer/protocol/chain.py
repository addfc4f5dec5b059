"""Chains of links: who was in them, and those that are too long to be held in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from peer.protocol.lineage import Certificate


class ChainTally:
    """Who was in how many of some links, with how many tokens together.

    Attributes:
        links: how many.
        rounds, tokens: by peer id; who was in none is not there.
        weight: tokens of all.
    """

    def __init__(self) -> None:
        self.links, self.weight, self.rounds, self.tokens = 0, 0, Counter[str](), Counter[str]()

    def add(self, links: Iterable[Certificate]) -> ChainTally:
        for certificate in links:
            self.links, self.weight = self.links + 1, self.weight + certificate.link.weight
            for member in certificate.link.roster:
                self.rounds[member.peer_id] += 1
                self.tokens[member.peer_id] += member.tokens
        return self

    def remove(self, links: Iterable[Certificate]) -> ChainTally:
        """The opposite of `add`."""
        for certificate in links:
            self.links, self.weight = self.links - 1, self.weight - certificate.link.weight
            for member in certificate.link.roster:
                self.rounds[member.peer_id] -= 1
                self.tokens[member.peer_id] -= member.tokens
                if not self.rounds[member.peer_id]:
                    del self.rounds[member.peer_id], self.tokens[member.peer_id]
        return self

    def copy(self) -> ChainTally:
        other = ChainTally()
        other.links, other.weight = self.links, self.weight
        other.rounds, other.tokens = self.rounds.copy(), self.tokens.copy()
        return other


class LinkFile(Protocol):
    """Holds the links of a chain from genesis on, outside of memory; those that it has had once stay as they are."""

    def read(self, place: int) -> Certificate:
        """The link of that round."""

    def id(self, place: int) -> str:
        """The lineage id that it leads to."""

    def tally_up_to(self, length: int) -> ChainTally:
        """Of the first links; the caller may change it."""


class Chain(Sequence[Certificate]):
    """Part of a chain: links that a file holds, which are read when asked for, then some in memory. It never changes.

    Args:
        start, stop: which links of the file.
        tail: those that follow.
    """

    def __init__(self, file: LinkFile, start: int, stop: int, tail: Sequence[Certificate] = ()) -> None:
        self.file, self.start, self.stop, self.tail = file, start, stop, tail

    def __len__(self) -> int:
        return self.stop - self.start + len(self.tail)

    @overload
    def __getitem__(self, place: int) -> Certificate: ...
    @overload
    def __getitem__(self, place: slice) -> Chain: ...
    def __getitem__(self, place: int | slice) -> Certificate | Chain:
        held = self.stop - self.start
        if isinstance(place, slice):
            first, last, step = place.indices(len(self))
            assert step == 1, "a chain is read forwards"
            last = max(first, last)
            tail = self.tail[max(0, first - held) : max(0, last - held)]
            return Chain(self.file, self.start + min(first, held), self.start + min(last, held), tail)
        index = place + len(self) if place < 0 else place
        if not 0 <= index < len(self):
            raise IndexError(place)
        return self.file.read(self.start + index) if index < held else self.tail[index - held]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    def id(self, place: int) -> str:
        """The lineage id that a link leads to; one that the file holds is not read."""
        held = self.stop - self.start
        return self.file.id(self.start + place) if place < held else self.tail[place - held].link.id

    __hash__ = None  # type: ignore[assignment]

    def tally(self) -> ChainTally:
        """Of all of its links."""
        if self.start:
            return ChainTally().add(self)
        return self.file.tally_up_to(self.stop).add(self.tail)


def tally_of(links: Sequence[Certificate]) -> ChainTally:
    """The tally of some links; of a `Chain` from genesis without reading it. The caller may change it."""
    return links.tally() if isinstance(links, Chain) else ChainTally().add(links)


def id_of(links: Sequence[Certificate], place: int) -> str:
    """The lineage id that a link of a chain leads to."""
    return links.id(place) if isinstance(links, Chain) else links[place].link.id


def extended(links: Sequence[Certificate], more: Sequence[Certificate]) -> Sequence[Certificate]:
    """A chain and what follows it."""
    if isinstance(links, Chain):
        return Chain(links.file, links.start, links.stop, [*links.tail, *more])
    return [*links, *more]


def shared_links(one: Sequence[Certificate], two: Sequence[Certificate]) -> int:
    """How many links two chains from genesis have in common."""
    low, high = 0, min(len(one), len(two))
    if isinstance(one, Chain) and isinstance(two, Chain) and one.file is two.file and one.start == two.start:
        low = min(high, one.stop - one.start, two.stop - two.start)
    while low < high:  # links name their parents, so equal ids mean equal chains up to there
        middle = (low + high + 1) // 2
        if id_of(one, middle - 1) == id_of(two, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """What one chain holds and another does not: what a peer that changes over from the first gives up.

    Attributes:
        from_round: the first of these rounds, counted from 1; 0 if there are none.
        rounds, tokens: of all their members.
        own_tokens: of the peer that changes over.
    """

    from_round: int
    rounds: int
    tokens: int
    own_tokens: int

    def __str__(self) -> str:
        return f"{self.rounds} rounds from {self.from_round} on, {self.tokens} tokens ({self.own_tokens} ours)"


def given_up(before: Sequence[Certificate], after: Sequence[Certificate], peer_id: str) -> GivenUp:
    """Compare a peer's chain before and after it changed its lineage."""
    shared = shared_links(before, after)
    lost = [certificate.link for certificate in before[shared:]]
    own = sum(member.tokens for link in lost for member in link.roster if member.peer_id == peer_id)
    return GivenUp(
        from_round=shared + 1 if lost else 0, rounds=len(lost), tokens=sum(link.weight for link in lost), own_tokens=own
    )
