"""What members sign in an exchange: what they sent to each reducer, and what a reducer computed from its inputs.

Contributions and reduced shards are cut into slices. A tree of digests covers the slices of each, so that one slice can
be shown and checked without the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import FailFast, Field, model_validator

from peer.errors import ProtocolError
from peer.protocol.hashing import digest
from peer.protocol.identity import SIGNATURE_BYTES, Identity, verify
from peer.protocol.lineage import Member
from peer.protocol.manifest import Digest, Spec
from peer.protocol.records import Count, dump_json

SENT_DOMAIN, REDUCED_DOMAIN = "sent", "reduced"
DIGEST_BYTES = 32
SEAL_BYTES = DIGEST_BYTES + SIGNATURE_BYTES
REDUCED_SEAL_BYTES = DIGEST_BYTES + SEAL_BYTES
_LEAF, _NODE, _EMPTY = b"\0", b"\1", b"\2"


class Sitting(Spec):
    """One exchange of one group: all signatures of it name its id. No honest peer takes part in the same one twice."""

    run_id: Digest
    round: Count
    parent: Digest
    group: Digest
    members: Annotated[tuple[Member, ...], Field(min_length=2, max_length=64), FailFast()]

    @model_validator(mode="after")
    def _distinct_members(self) -> Sitting:
        if len({member.peer_id for member in self.members}) != len(self.members):
            raise ValueError("a sitting names a peer twice")
        return self

    @cached_property
    def id(self) -> bytes:
        """32 bytes that stand for all of it."""
        return hashlib.sha256(b"atoll-sitting-1" + dump_json(self)).digest()

    def place(self, peer_id: str) -> int:
        """The index of this member in the roster; raises ProtocolError if it is not there."""
        for place, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return place
        raise ProtocolError(f"{peer_id} is not a member of that exchange")


class Leaves:
    """The digests of slices that arrive one by one."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def add(self, content: bytes | bytearray | memoryview) -> None:
        """The next one."""
        self.digests.append(leaf_of(content))


def leaf_of(content: bytes | bytearray | memoryview) -> bytes:
    """The digest of one slice."""
    return digest(_LEAF, content)


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The digest over slices, of which there may be none."""
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0] if level else hashlib.sha256(_EMPTY).digest()


def path_of(leaves: Sequence[bytes], first: int, stop: int) -> list[bytes]:
    """The digests that, with the slices [first, stop), at least one, yield the root, from the bottom up."""
    level, path = list(leaves), []
    while len(level) > 1:
        if first % 2:
            path.append(level[first - 1])
        if stop % 2 and stop < len(level):
            path.append(level[stop])
        level, first, stop = _above(level), first // 2, (stop + 1) // 2
    return path


def climb(leaves: Sequence[bytes], first: int, count: int, path: Iterable[bytes]) -> bytes:
    """The root over `count` slices, given the digests of the slices from `first` on, at least one.

    Raises:
        ProtocolError: a path of another length than `path_of` yields.
    """
    steps, level = iter(path), list(leaves)
    while count > 1:
        stop = first + len(level)
        if first % 2:
            level.insert(0, _step(steps))
        if stop % 2 and stop < count:
            level.append(_step(steps))
        level, first, count = _above(level), first // 2, (count + 1) // 2
    if next(steps, None) is not None:
        raise ProtocolError("a path that leads beyond the root")
    return level[0]


def _step(steps: Iterator[bytes]) -> bytes:
    node = next(steps, None)
    if node is None:
        raise ProtocolError("a path that ends below the root")
    return node


def _above(level: list[bytes]) -> list[bytes]:
    pairs = [_node(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
    return pairs + level[len(level) & ~1 :]


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


class Seal(NamedTuple):
    """A frame of SEAL_BYTES, after a contribution: the sitting's id and a signature."""

    digest: bytes
    signature: bytes

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> Seal:
        """`body` has SEAL_BYTES."""
        return cls(bytes(body[:DIGEST_BYTES]), bytes(body[DIGEST_BYTES:]))

    @property
    def body(self) -> bytes:
        """What `parse` reads."""
        return self.digest + self.signature


class ReducedSeal(NamedTuple):
    """A frame of REDUCED_SEAL_BYTES, after a reduced shard.

    Attributes:
        inputs: the digest of the reducer's inputs.
        residual: `residual_of` the loss of the reducer's encoding; `NO_RESIDUAL` without error feedback.
        signature: over these and the root of the shard.
    """

    inputs: bytes
    residual: bytes
    signature: bytes

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> ReducedSeal:
        """`body` has REDUCED_SEAL_BYTES."""
        first, second = DIGEST_BYTES, 2 * DIGEST_BYTES
        return cls(bytes(body[:first]), bytes(body[first:second]), bytes(body[second:]))

    @property
    def body(self) -> bytes:
        """What `parse` reads."""
        return self.inputs + self.residual + self.signature


def seal_sent(identity: Identity, sitting: Sitting, reducer: str, root: bytes) -> Seal:
    """Sign what this member sent to `reducer`."""
    return Seal(sitting.id, identity.sign(SENT_DOMAIN, _sent(sitting, reducer, root)))


def has_sent(sitting: Sitting, member: str, reducer: str, root: bytes, signature: bytes) -> bool:
    """True if `member` signed that it sent slices with this root to `reducer`."""
    return verify(member, SENT_DOMAIN, _sent(sitting, reducer, root), signature)


def inputs_of(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The digest over a reducer's inputs: (root, signature) in roster order; its own signature is empty."""
    hasher = hashlib.sha256(b"atoll-inputs-1")
    for root, signature in entries:
        hasher.update(root + len(signature).to_bytes(1, "big") + signature)
    return hasher.digest()


def residual_of(since: int, shard: tuple[int, int], root: bytes) -> bytes:
    """The digest of a reducer's residual of its shard after a round.

    Args:
        since: the round before which the residual was zero: the reducer had none, or could not keep it.
        shard: its first element, and the one after its last.
        root: over its cells.
    """
    numbers = b"".join(number.to_bytes(8, "big") for number in (since, *shard))
    return hashlib.sha256(b"atoll-residual-1" + numbers + root).digest()


NO_RESIDUAL = residual_of(0, (0, 0), root_of(()))


def seal_reduced(
    identity: Identity, sitting: Sitting, inputs: bytes, outputs: bytes, residual: bytes = NO_RESIDUAL
) -> ReducedSeal:
    """Sign that this reducer computed outputs with this root from these inputs, and that this is its residual now."""
    return ReducedSeal(inputs, residual, identity.sign(REDUCED_DOMAIN, sitting.id + inputs + outputs + residual))


def has_reduced(sitting: Sitting, reducer: str, outputs: bytes, seal: ReducedSeal) -> bool:
    """True if `reducer` signed outputs with this root for the inputs and the residual of `seal`."""
    return verify(reducer, REDUCED_DOMAIN, sitting.id + seal.inputs + outputs + seal.residual, seal.signature)


def _sent(sitting: Sitting, reducer: str, root: bytes) -> bytes:
    return sitting.id + sitting.place(reducer).to_bytes(1, "big") + root
