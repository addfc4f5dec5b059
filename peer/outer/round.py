"""One round on one page: match, exchange, commit, then install or abandon.

`run_round` decides the order and what a failure means; a `SwarmPort` performs the phases (over the network in
`peer.swarm`). Nothing of this peer's outer state changes before there is a certificate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from peer.errors import AtollError
from peer.outer.aggregate import Aggregator, Mean
from peer.outer.compress.base import Compressor, NonFiniteError, Payload, PayloadError, Read, check_length
from peer.outer.compress.sliced import Sliced
from peer.outer.gated import Gated
from peer.outer.record import Drop, Instead, RoundRecord
from peer.outer.state import OuterState, Update
from peer.protocol.lineage import Certificate, Link, Member
from peer.protocol.wire import JoinMessage

COSINE_SAMPLE = 1 << 16  # values of every range: an eighth of a large part tells the cosine to a few thousandths
Phase = Literal["match", "exchange", "commit"]


class RoundAborted(AtollError):
    """A round ended without a certificate.

    Args:
        phase: where it ended.
        reason: one line for a person.
        culprit: peer id of whom this peer could not go on with, if it knows.
        alone: True when there was simply nobody to average with.
        behind: True when others are ahead of this peer's lineage.
    """

    def __init__(
        self, phase: Phase, reason: str, culprit: str | None = None, *, alone: bool = False, behind: bool = False
    ) -> None:
        super().__init__(f"{phase}: {reason}")
        self.phase, self.reason, self.culprit, self.alone, self.behind = phase, reason, culprit, alone, behind

    @property
    def instead(self) -> Instead:
        """What a peer does after it."""
        return "wait" if self.alone else "catch_up" if self.behind else "retry"


@dataclass(frozen=True)
class Due:
    """A contribution that waits for a round: the snapshot it was taken from and its weight in tokens."""

    sequence: int
    tokens: int
    snapshot: Tensor


@dataclass(frozen=True)
class Group:
    """The roster of one round in its agreed order; `id` is equal on two members only if everything here is."""

    id: str
    join: JoinMessage
    members: tuple[Member, ...]
    index: int

    @property
    def me(self) -> str:
        return self.members[self.index].peer_id

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members if member.peer_id != self.me)


@dataclass(frozen=True)
class Exchanged:
    """What an exchange yields.

    Attributes:
        update: of all.
        cosine: the mean between the contributions that this peer reduced.
        dropped: whose contributions this peer's aggregator left out of what it reduced.
        state_digest: of the state after the update, where it was computed while that arrived.
    """

    update: Update
    cosine: float | None
    dropped: tuple[Drop, ...] = ()
    state_digest: str | None = None


class SwarmPort(Protocol):
    """The phases of a round; each raises `RoundAborted` when it cannot complete before its deadline."""

    async def match(self, due: Due) -> Group: ...
    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged: ...
    async def commit(self, group: Group, link: Link) -> Certificate: ...
    async def install(self, group: Group, update: Update, certificate: Certificate, due: Due) -> None: ...
    async def release(self, group: Group, abort: RoundAborted | None) -> None: ...


async def run_round(
    due: Due, state: OuterState, swarm: SwarmPort, clock: Callable[[], float] = time.monotonic
) -> RoundRecord:
    """Perform one round; a failure before the certificate changes nothing and comes back as an aborted record."""
    marks: dict[str, float] = {"start": clock()}
    group: Group | None = None
    try:
        group = await swarm.match(due)
        marks["match"] = clock()
        exchanged = await swarm.exchange(group, due, state)
        marks["exchange"] = clock()
        link = await link_of(group, exchanged, state)
        certificate = await swarm.commit(group, link)
    except RoundAborted as abort:
        if group is not None:
            await swarm.release(group, abort)
        return _record(state, group, _durations(marks, clock()), abort)
    marks["commit"] = clock()
    await swarm.install(group, exchanged.update, certificate, due)
    marks["install"] = clock()
    await swarm.release(group, None)
    return _record(state, group, _durations(marks, marks["install"])).model_copy(
        update={
            "cosine": exchanged.cosine,
            "dropped": exchanged.dropped,
            "update_digest": link.update_digest,
            "state_digest": link.state_digest,
        }
    )


async def link_of(group: Group, exchanged: Exchanged, state: OuterState) -> Link:
    """What this peer will sign; raises RoundAborted where the update would carry the state beyond fp32's range."""

    def digests() -> tuple[str, str]:
        return exchanged.state_digest or state.preview(exchanged.update), exchanged.update.digest()

    try:
        digest, update_digest = await asyncio.to_thread(digests)
    except NonFiniteError as error:
        raise RoundAborted("exchange", str(error)) from None
    return Link(
        run_id=group.join.run_id,
        fragment=group.join.fragment,
        round=state.round,
        parent=state.lineage_id,
        roster=group.members,
        update_digest=update_digest,
        state_digest=digest,
    )


def _durations(marks: dict[str, float], end: float) -> dict[str, float]:
    names = list(marks)
    durations = {name: marks[name] - marks[before] for before, name in pairwise(names)}
    durations["total"] = end - marks["start"]
    return durations


def _record(
    state: OuterState, group: Group | None, seconds: dict[str, float], abort: RoundAborted | None = None
) -> RoundRecord:
    return RoundRecord(
        status="aborted" if abort else "committed",
        round=state.round + 1 if abort else state.round,
        lineage_id=state.lineage_id,
        group_id=group.id if group else None,
        members=tuple(member.peer_id for member in group.members) if group else (),
        weights=tuple(member.tokens for member in group.members) if group else (),
        phase=abort.phase if abort else None,
        reason=abort.reason if abort else None,
        culprit=abort.culprit if abort else None,
        alone=abort.alone if abort else False,
        behind=abort.behind if abort else False,
        instead=abort.instead if abort else None,
        seconds=seconds,
    )


def reduce_part(
    payloads: Sequence[Payload],
    weights: Sequence[int],
    numel: int,
    compressor: Compressor,
    aggregator: Aggregator = Mean(),
    encode: Callable[[int, Read], bytes] | None = None,
) -> tuple[bytes, float | None]:
    """Aggregate one part of all contributions in roster order and encode the result once.

    Args:
        payloads: one encoded part of `numel` elements per member, in roster order.
        weights: tokens per member.
        compressor: where it writes a part in slices, each is aggregated by itself.
        encode: (numel, read) -> payload in place of `compressor.encode_ranges`, where error feedback takes part.

    Returns:
        the encoded aggregate, and the mean pairwise cosine of the contributions (None for fewer than two, or zeros).

    Raises:
        PayloadError: a payload is malformed, and the aggregator does not drop such.
    """
    gram = torch.zeros(len(payloads), len(payloads), dtype=torch.float64)
    own = bound(aggregator, len(payloads))
    if not isinstance(compressor, Sliced) or encode is not None:
        return reduce_range(payloads, weights, numel, compressor, own, gram, encode), mean_cosine(gram)
    for payload in payloads:
        check_length(payload, compressor.wire_bytes(numel), compressor.name, numel)
    reduced, position = [], 0
    for start, stop in compressor.slices(0, numel) or [(0, 0)]:
        size = compressor.base.wire_bytes(stop - start)
        pieces = [memoryview(payload)[position : position + size] for payload in payloads]
        reduced.append(reduce_range(pieces, weights, stop - start, compressor.base, own, gram))
        position += size
    return b"".join(reduced), mean_cosine(gram)


def bound(aggregator: Aggregator, members: int) -> Aggregator:
    """The aggregator for a round of so many members."""
    return aggregator.bind(members) if isinstance(aggregator, Mean) else aggregator


def reduce_range(
    payloads: Sequence[Payload],
    weights: Sequence[int],
    numel: int,
    compressor: Compressor,
    aggregator: Aggregator,
    gram: Tensor,
    encode: Callable[[int, Read], bytes] | None = None,
    dropped: dict[int, str] | None = None,
) -> bytes:
    """`reduce_part` of one slice: a function of its arguments alone, the same bits on every machine.

    Args:
        aggregator: `bound` to the members already.
        gram: fp64 [members, members]; the inner products of the contributions are added, for `mean_cosine`.
        dropped: takes the reason for each contribution that the aggregator dropped, by its place.

    Raises:
        ValueError: not one weight per payload; see `Aggregator.aggregate`.
    """
    if len(payloads) != len(weights):
        raise ValueError(f"{len(payloads)} contributions with {len(weights)} weights: must be equal")

    def combine(pieces: list[Tensor]) -> Tensor:
        if not isinstance(aggregator, Gated):
            return aggregator.aggregate(pieces, weights)
        result, reasons = aggregator.judged(pieces, weights)
        if dropped is not None:
            dropped.update(reasons)
        return result

    def aggregate(start: int, stop: int) -> Tensor:
        sample = torch.empty(len(payloads), min(COSINE_SAMPLE, stop - start))

        def decoded(index: int, out: Tensor | None = None) -> Tensor:
            piece = _decoded(payloads[index], numel, start, stop, compressor, aggregator, out)
            sample[index] = piece[:COSINE_SAMPLE]
            return piece

        if isinstance(aggregator, Mean):
            result = _mean(decoded, aggregator.factors(weights))
        else:
            result = combine([decoded(index) for index in range(len(payloads))])
        gram.add_((sample @ sample.T).double())
        return result

    read = aggregate if aggregator.separable else _slices_of(aggregate(0, numel))
    return (encode or compressor.encode_ranges)(numel, read)


def _mean(decoded: Callable[[int, Tensor | None], Tensor], factors: Sequence[float]) -> Tensor:
    """`scaled_sum` of contributions that are decoded one at a time: two vectors, however many there are."""
    result = decoded(0, None).mul_(factors[0])
    scratch = torch.empty_like(result)
    for index in range(1, len(factors)):
        result.add_(decoded(index, scratch).mul_(factors[index]))
    return result


def _decoded(
    payload: Payload, numel: int, start: int, stop: int, compressor: Compressor, aggregator: Aggregator,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Where gates decide, what is malformed is theirs to drop: one sender must not end the round for all."""
    try:
        return compressor.decode_range(payload, numel, start, stop, out)
    except PayloadError:
        if not isinstance(aggregator, Gated):
            raise
        return torch.full((stop - start,), torch.nan)


def _slices_of(whole: Tensor) -> Read:
    return lambda start, stop: whole[start:stop]


def mean_cosine(gram: Tensor) -> float | None:
    """Mean of the pairwise cosines, from the inner products fp64 [n, n]; None for fewer than two, or zeros."""
    members = gram.shape[0]
    norms = gram.diagonal().clamp_min(0.0).sqrt()
    if members < 2 or bool((norms == 0).any()):
        return None
    cosines = gram / torch.outer(norms, norms)
    mean = float((cosines.sum() - members) / (members * (members - 1)))
    return min(1.0, max(-1.0, mean)) if mean == mean else None
