"""What is kept of every round: one structured record, committed or not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.protocol.identity import MAX_PEER_ID_CHARS
from peer.protocol.manifest import Digest, Spec
from peer.protocol.records import Count, Seconds

MAX_DROPS = 16
MAX_REASON_CHARS = 120
PeerId = Annotated[str, Field(max_length=MAX_PEER_ID_CHARS)]
Instead = Literal["retry", "wait", "catch_up"]


class Drop(Spec):
    """A member whose contribution was left out of what a peer reduced: in `slices` of its `of` slices, and why in the
    first of them.
    """

    peer_id: PeerId
    slices: Count
    of: Count
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARS)]


class RoundRecord(Spec):
    """One structured record per round, committed or not; and one for each peer that is `banned`, as the `culprit`.

    `round` counts from 1, the first after genesis.

    The group: `members` in roster order with their `weights` in tokens, `stood` when the persistent group of the
    previous round continued without matchmaking, `regrouped` with the reason when it could not. The failure: `phase`,
    `reason`, `culprit`. What the peer does `instead`: it contributes again after a pause, waits until a peer is found,
    or catches up. How it caught up: from which `donor`, by `replayed` updates or by the state of `snapshot_round`.
    `dropped`: members that this peer's aggregator left out, the most often dropped first.
    In a gossip round, `drawn` are the members that the topology drew, as this peer saw it, and `members` those that
    averaged: the peer alone when the others did not join (`reason`); `lineage_id` is the digest of its own state.
    `state_digest` is that of the state that the update carried on, in a gossip round that of the state after it.
    What it audited since the last round, in words: `audits`.
    `seconds` holds the phases that ended and the `total`. `ended_at` (unix seconds), `peer_id` (whose record this is)
    and `nicknames` (chosen by the peers) are added by the recorder.
    """

    status: Literal["committed", "aborted", "caught_up", "banned"]
    round: Count
    lineage_id: Digest
    group_id: Digest | None = None
    drawn: Annotated[tuple[PeerId, ...], Field(max_length=64)] = ()
    members: Annotated[tuple[PeerId, ...], Field(max_length=64)] = ()
    weights: Annotated[tuple[Count, ...], Field(max_length=64)] = ()
    stood: bool = False
    regrouped: str | None = None
    phase: str | None = None
    reason: str | None = None
    culprit: PeerId | None = None
    alone: bool = False
    behind: bool = False
    instead: Instead | None = None
    donor: PeerId | None = None
    replayed: Count | None = None
    snapshot_round: Count | None = None
    bytes_sent: Count = 0
    bytes_received: Count = 0
    seconds: dict[str, Seconds] = Field(default_factory=dict)
    cosine: float | None = None
    dropped: Annotated[tuple[Drop, ...], Field(max_length=MAX_DROPS)] = ()
    update_digest: Digest | None = None
    state_digest: Digest | None = None
    audits: tuple[str, ...] = ()
    ended_at: Seconds | None = None
    peer_id: PeerId | None = None
    nicknames: dict[str, str] = Field(default_factory=dict)
