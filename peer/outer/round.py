"""One round on one page: match, exchange, commit, then install or abandon.

`run_round` decides the order and what a failure means; a `SwarmPort` performs the phases (over the network in
`peer.swarm`). Nothing of this peer's outer state changes before there is a certificate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from torch import Tensor

from peer.errors import AtollError
from peer.outer.compress.base import LARGEST_VALUE, NonFiniteError
from peer.outer.numerics.offload import run_offloaded
from peer.outer.record import Drop, Instead, RoundRecord
from peer.outer.state.outer_state import OuterState, bound_of
from peer.outer.state.wire_format import AnyUpdate
from peer.printable import printable
from peer.protocol.lineage import Certificate, Link, Member, shares_of
from peer.protocol.wire import JoinMessage
from peer.protocol.word import Stage

Phase = Literal["match", "exchange", "commit"]


class RoundAborted(AtollError):
    """A round ended without a certificate.

    Args:
        reason: one line for a person.
        culprit: id of the peer through which the round failed, if known.
        alone: True when there was simply no peer to average with.
        behind: True when others are ahead of this peer's lineage.
        useless: the stage of which what the culprit sent is of no use, as if it had not come.
    """

    def __init__(
        self, phase: Phase, reason: str, culprit: str | None = None, *, alone: bool = False, behind: bool = False,
        useless: Stage | None = None,
    ) -> None:  # fmt: skip
        reason = printable(reason)  # it may be another peer's
        super().__init__(f"{phase}: {reason}")
        self.phase, self.reason, self.culprit, self.alone, self.behind = phase, reason, culprit, alone, behind
        self.useless = useless

    @property
    def instead(self) -> Instead:
        """What a peer does after it."""
        return "wait" if self.alone else "catch_up" if self.behind else "retry"


@dataclass(frozen=True)
class Due:
    """A contribution that waits for a round: the snapshot it was taken from, its weight in tokens, and the ranges of
    the run's data that it was trained on (see `peer.protocol.ranges`).
    """

    sequence: int
    tokens: int
    snapshot: Tensor
    ranges: str = ""


@dataclass(frozen=True)
class Group:
    """The roster of one round in its agreed order; `id` is equal on two members only if everything here is.

    Attributes:
        join: this peer's own.
        joins: of all members, in roster order.
        leader: whose roster it is; empty in the later rounds of a group that stays.
    """

    id: str
    join: JoinMessage
    members: tuple[Member, ...]
    index: int
    joins: tuple[JoinMessage, ...] = ()
    leader: str = ""

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
        cosine: the mean between the contributions that this peer reduced.
        dropped: whose contributions this peer's aggregator left out of what it reduced.
        residuals: what each reducer has signed of its residual, in roster order; none without error feedback.
    """

    update: AnyUpdate
    cosine: float | None
    dropped: tuple[Drop, ...] = ()
    residuals: tuple[str, ...] = ()


class SwarmPort(Protocol):
    """The phases of a round; each raises `RoundAborted` when it cannot complete before its deadline."""

    async def match(self, due: Due) -> Group: ...
    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged: ...
    async def digest(self) -> str: ...  # of the state that the round starts from
    async def commit(self, group: Group, link: Link) -> Certificate: ...
    async def install(self, group: Group, update: AnyUpdate, certificate: Certificate, due: Due) -> None: ...
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
        link = await link_of(group, exchanged, state, await swarm.digest())
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


async def link_of(group: Group, exchanged: Exchanged, state: OuterState, digest: str) -> Link:
    """What this peer will sign.

    Args:
        digest: of the state, which the update will carry on.

    Raises:
        RoundAborted: the update could carry the state beyond fp32's range.
    """

    def look() -> str:
        state.check(exchanged.update)
        return exchanged.update.digest()

    try:
        update_digest = await run_offloaded(state.numel, look)
    except NonFiniteError as error:
        culprit = _reducer_of(group, exchanged, state)
        raise RoundAborted("exchange", str(error), culprit, useless="reduced") from None
    return Link(
        run_id=group.join.run_id,
        fragment=group.join.fragment,
        round=state.round,
        parent=state.lineage_id,
        roster=group.members,
        update_digest=update_digest,
        state_digest=digest,
        residuals=exchanged.residuals,
    )


def _reducer_of(group: Group, exchanged: Exchanged, state: OuterState) -> str | None:
    """Whose shard is too large; None in a round without reducers."""
    shards = state.wire.among(shares_of(group.members)).bounds(len(group.members))
    for member, (start, stop) in zip(group.members, shards, strict=True):
        if start < stop and not bound_of(exchanged.update, start, stop) <= LARGEST_VALUE:
            return member.peer_id
    return None


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
