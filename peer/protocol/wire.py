"""Frames: 12 bytes of header, then the body. Limits are checked on the header, before a byte of body is read.

header = magic "ATL1" | kind u8 | three zero bytes | body length u32 big-endian
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, ClassVar, Literal

from pydantic import FailFast, Field, model_validator

from peer.errors import ProtocolError
from peer.protocol.manifest import MAX_ROUNDS, Digest, PeerIdText
from peer.protocol.ranges import RangesText
from peer.protocol.records import Count, Seconds, dump_json
from peer.protocol.spec import Message
from peer.protocol.word import HeardWord, Names, SignedWord

_HEADER = struct.Struct(">4sB3xI")
HEADER_BYTES = _HEADER.size
MAGIC = b"ATL1"
MAX_MESSAGE_BYTES = 64 * 1024
MAX_WORDS_BYTES = 480 * 1024  # of 64 members, each of which names all others twice
MAX_JOIN_BYTES = 816  # sealed
MAX_ROSTER_BYTES = 64 * (2 * MAX_JOIN_BYTES + 4)  # of joins in hexadecimal
MAX_PAYLOAD_BYTES = 2**31
MAX_CHUNKS = 2**24  # of a snapshot
MAX_INDEXES = 64  # of one request

StreamName = Annotated[str, Field(max_length=100)]
ChunkIndex = Annotated[int, Field(ge=0, lt=MAX_CHUNKS)]
FragmentSize = Annotated[int, Field(ge=1, lt=2**40)]


class Kind(IntEnum):
    """What a frame carries; everything but CONTRIBUTION, REDUCED, DATA and SPEED is a small message."""

    JOIN = 1
    ROSTER = 2
    REJECT = 3
    INVITE = 4
    STATUS = 5
    HELLO = 6
    CONTRIBUTION = 7
    REDUCED = 8
    VOTE = 9
    ABORT = 10
    REQUEST = 11
    META = 12
    DATA = 13
    END = 14
    BUSY = 15
    SEAL_SENT = 20
    SEAL_REDUCED = 21
    EVIDENCE = 22
    WORDS = 23
    REACH = 32
    DIRECT = 33
    MANIFEST = 34
    SPEED = 35
    PASS = 36


def pack_header(kind: Kind, length: int) -> bytes:
    """The header of a frame whose body has `length` bytes."""
    if length > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame body of {length} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(MAGIC, kind, length)


def unpack_header(header: bytes) -> tuple[Kind, int]:
    """-> (kind, body length); raises ProtocolError on another magic, an unknown kind or non-zero padding."""
    magic, kind, length = _HEADER.unpack(header)
    if magic != MAGIC or header[5:8] != b"\0\0\0":
        raise ProtocolError(f"not an Atoll frame: {header[:8].hex()}")
    if length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frame announces {length} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    try:
        return Kind(kind), length
    except ValueError:
        raise ProtocolError(f"unknown frame kind {kind}") from None


class JoinMessage(Message):
    """A member's signed wish to take part in one round, with the weight of its contribution.

    `group` is the id of the persistent group that it continues: an honest peer signs one join for each of its rounds.
    `nonce` is different each time, so that no two groups have the same id. `work` solves the puzzle of the identity.
    Where work is divided by speed: tokens/s that it trains, bytes/s that its line sends, 0 if unknown; and `seen`, of
    the lines of this group's members by their ids, as it saw them a round ago (see `peer.outer.policy.claims`).
    """

    run_id: Digest
    fragment: Annotated[int, Field(ge=0, lt=65536)] = 0
    round: Count
    parent: Digest
    tokens: Annotated[int, Field(ge=1, lt=2**40)]
    group: Digest | None = None
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")] = ""
    work: Count = 0
    speed: Count = 0
    up: Count = 0
    seen: Annotated[str, Field(pattern=r"^[0-9A-Za-z_.-]{0,64}$")] = ""
    ranges: RangesText = ""


class RejectMessage(Message):
    """Why a leader did not admit a member, and the leader's own position."""

    reason: Literal["behind", "follow", "excluded"]
    leader: PeerIdText | None = None
    round: Count = 0
    lineage_id: Digest | None = None
    weight: Count = 0


class InviteMessage(Message):
    """A leader tells an expected member that a round at `parent` gathers, and how long it will wait."""

    run_id: Digest
    round: Count
    parent: Digest
    weight: Count
    wait_s: Seconds


class StatusMessage(Message):
    """The answer to an invitation: whether the peer will join, its position, and which leader it follows. A leader also
    sends this each second to the members in its lobby.
    """

    coming: bool
    round: Count
    lineage_id: Digest
    weight: Count
    leader: PeerIdText


class ReachRequest(Message):
    """Ask a peer to dial the address that it sees this host at, on these TCP ports."""

    ports: Annotated[tuple[Annotated[int, Field(ge=1, lt=65536)], ...], Field(max_length=4), FailFast()]


class ReachMessage(Message):
    """Whether one of them answered; `tried` is False if the peer sees this host at no address."""

    reached: bool
    tried: bool


class DirectEndpoint(Message):
    """Where a peer accepts direct connections: `fingerprint` is the SHA-256 of its certificate, `token` identifies the
    receiver of this message when it connects, and no other peer has it.
    """

    port: Annotated[int, Field(ge=1024, lt=65536)]
    fingerprint: Digest
    token: Digest


class DirectRequest(Message):
    """Ask a peer for its endpoint; or, with `endpoint`, to dial the asker's: with this ticket, for a stream that the
    asker opens under `name`.
    """

    endpoint: DirectEndpoint | None = None
    name: StreamName = ""
    ticket: Digest | None = None


class DirectMessage(Message):
    """The answer: the endpoint if there is one, which there need not be, or whether this peer has dialled the other's.
    """

    endpoint: DirectEndpoint | None = None
    came: bool = False


class EntryMessage(Message):
    """First frame of a direct connection: the listener's token; and the stream's name, or the ticket of a dial-back."""

    token: Digest
    name: StreamName = ""
    ticket: Digest | None = None


class HelloMessage(Message):
    """First frame of an exchange stream: which group it belongs to."""

    group_id: Digest


class VoteMessage(Message):
    """A member's signature over the link that it computed. `late_contributions`, `late_shards`: of the members that
    made the round long for it; `delayed_by`: who delayed this member itself; claims, as in an abort.
    """

    link_id: Digest
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    late_contributions: Names = ()
    late_shards: Names = ()
    delayed_by: Names = ()


class AbortMessage(Message):
    """A member aborts the round; `culprit` is the member through which the round failed, for a person. `word`: what
    this member lacks; `heard`: the word of the member for which it gave up.
    """

    reason: Annotated[str, Field(max_length=300)]
    culprit: PeerIdText | None = None
    word: SignedWord | None = None
    heard: HeardWord | None = None


class HeardWords(Message):
    """The words of members of a group in which a round has failed, as this member has heard them."""

    most_items: ClassVar[int] = 1 << 14

    group: Digest
    words: Annotated[tuple[HeardWord, ...], Field(max_length=64), FailFast()]


class HistoryRequest(Message):
    """Ask a donor for what it holds.

    state: the digest, as 32 bytes, of its state of round `from_round`, at lineage id `digest`. chain: certificates from
    `from_round` on. update: the one of that digest. file: one of the tokenizer's, of that digest. snapshot: what a
    snapshot is, with the digests of its chunks: the one of lineage id `digest` if the donor has it, else its newest, of
    `from_round` or later if it has come that far. chunks: those of these indexes, in this order, of the snapshot of
    lineage id `digest`; more such requests may follow on the stream.
    """

    what: Literal["state", "chain", "update", "file", "snapshot", "chunks"]
    run_id: Digest
    from_round: Count = 0
    digest: Digest | None = None
    indexes: Annotated[tuple[ChunkIndex, ...], Field(max_length=MAX_INDEXES), FailFast()] = ()

    @model_validator(mode="after")
    def _chunks_have_indexes(self) -> HistoryRequest:
        if (self.what == "chunks") != bool(self.indexes):
            raise ValueError("a request for chunks names at least one, and no other request does")
        if self.what in ("chunks", "state", "file") and self.digest is None:
            raise ValueError(f"a request for {self.what} names a digest")
        return self


class AuditRequest(Message):
    """Ask a member what it can show of its last exchange.

    slice: of its own shard, in the sitting of id `of`: a `Reduction`, then the payload of each member. signed: what
    each reducer of that sitting signed, as this member received it. joins: the sealed joins of round `round` of the
    persistent group `of`, as a roster.
    """

    what: Literal["slice", "signed", "joins"]
    of: Digest
    slice_index: Annotated[int, Field(ge=0, lt=2**20)] = 0
    round: Count = 0


class SnapshotMeta(Message):
    """What a snapshot is before its chunks come: checked against the certificate, then each chunk against this.

    `fragments`: elements of each.
    """

    most_items: ClassVar[int] = 2048

    round: Count
    lineage_id: Digest
    fragments: Annotated[tuple[FragmentSize, ...], Field(min_length=1, max_length=1024), FailFast()]
    num_buffers: Annotated[int, Field(ge=0, le=4)]
    num_chunks: Annotated[int, Field(ge=1, lt=MAX_CHUNKS)]


class GossipJoin(Message):
    """A member joins a gossip round: the roster that the topology draws from the records this member sees, ascending,
    and the weight of its contribution. Members with different rosters do not average.
    """

    run_id: Digest
    round: Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
    roster: Annotated[tuple[PeerIdText, ...], Field(min_length=2, max_length=64), FailFast()]
    digest: Digest
    tokens: Annotated[int, Field(ge=1, lt=2**40)]

    @model_validator(mode="after")
    def _names_its_roster(self) -> GossipJoin:
        if self.digest != roster_digest(self.run_id, self.round, self.roster):
            raise ValueError("a join's digest is not that of its roster")
        if len(set(self.roster)) != len(self.roster):
            raise ValueError("a roster names a peer twice")
        return self


class GossipRoster(Message):
    """The members whose joins one member received, and with which it continues, in the roster's order."""

    members: Annotated[tuple[PeerIdText, ...], Field(min_length=2, max_length=64), FailFast()]


class GossipState(Message):
    """A peer's own state in a gossip run, signed by it: no other peer can vouch for that state."""

    run_id: Digest
    round: Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
    state_digest: Digest


def roster_digest(run_id: str, round: int, roster: Sequence[str]) -> str:
    """What two members of a gossip round must agree on."""
    text = f"atoll-gossip-1 {run_id} {round} {' '.join(roster)}"
    return hashlib.sha256(text.encode()).hexdigest()


def group_id(joins: list[JoinMessage], peer_ids: list[str]) -> str:
    """Digest of a roster: equal on two members only if they hold the same joins in the same order."""
    digest = hashlib.sha256(b"atoll-group-1")
    for peer_id, join in zip(peer_ids, joins, strict=True):
        digest.update(peer_id.encode() + b"\0" + dump_json(join) + b"\0")
    return digest.hexdigest()
