"""What members sign of an exchange: what they sent to whom, and what a reducer made of it.

Contributions and reduced parts are cut into units, the slices of the exchange. A tree of digests stands over the units
of each, so that one unit can be shown and checked without the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from peer.errors import ProtocolError
from peer.protocol.hashing import digest
from peer.protocol.identity import SIGNATURE_BYTES, Identity, verify
from peer.protocol.lineage import Member
from peer.protocol.manifest import Digest, Spec
from peer.protocol.records import Count, dump_json

SENT_DOMAIN, REDUCED_DOMAIN = "sent", "reduced"
DIGEST_BYTES = 32
SEAL_BYTES = DIGEST_BYTES + SIGNATURE_BYTES
_LEAF, _NODE, _EMPTY = b"\0", b"\1", b"\2"


class Sitting(Spec):
    """One exchange of one group: all signatures of it name its id. No honest peer takes part in the same one twice."""

    run_id: Digest
    round: Count
    parent: Digest
    group: Digest
    members: Annotated[tuple[Member, ...], Field(min_length=2, max_length=64)]

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
        """Where this member stands in the roster; raises ProtocolError if it does not."""
        for place, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return place
        raise ProtocolError(f"{peer_id} has no seat in that exchange")


class Leaves:
    """The digests of units that come one by one."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def add(self, unit: bytes | bytearray | memoryview) -> None:
        """The next one."""
        self.digests.append(leaf_of(unit))


def leaf_of(unit: bytes | bytearray | memoryview) -> bytes:
    """The digest of one unit."""
    return digest(_LEAF, unit)


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The digest over units; of none, too."""
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0] if level else hashlib.sha256(_EMPTY).digest()


def path_of(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """What must be known besides unit `index` to arrive at the root, from the bottom up."""
    level, path = list(leaves), []
    while len(level) > 1:
        if index ^ 1 < len(level):
            path.append(level[index ^ 1])
        level, index = _above(level), index // 2
    return path


def climb(leaf: bytes, index: int, count: int, path: Iterable[bytes]) -> bytes:
    """The root over `count` units, `leaf` being that of `index`; raises ProtocolError for a path of another length."""
    steps, node = iter(path), leaf
    while count > 1:
        if index ^ 1 < count:
            sibling = next(steps, None)
            if sibling is None:
                raise ProtocolError("a path that ends below the root")
            node = _node(sibling, node) if index % 2 else _node(node, sibling)
        count, index = (count + 1) // 2, index // 2
    if next(steps, None) is not None:
        raise ProtocolError("a path that leads beyond the root")
    return node


def _above(level: list[bytes]) -> list[bytes]:
    pairs = [_node(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
    return pairs + level[len(level) & ~1 :]


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


class Seal(NamedTuple):
    """A frame of SEAL_BYTES: a digest and a signature.

    After a contribution the digest is the sitting's id, after a reduced part it is that of the inputs.
    """

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


def seal_sent(identity: Identity, sitting: Sitting, reducer: str, root: bytes) -> Seal:
    """Sign what this member sent to `reducer`."""
    return Seal(sitting.id, identity.sign(SENT_DOMAIN, _sent(sitting, reducer, root)))


def has_sent(sitting: Sitting, member: str, reducer: str, root: bytes, signature: bytes) -> bool:
    """True if `member` signed that it sent units with this root to `reducer`."""
    return verify(member, SENT_DOMAIN, _sent(sitting, reducer, root), signature)


def inputs_of(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The digest over what a reducer was sent: (root, signature) in roster order; its own signature is empty."""
    hasher = hashlib.sha256(b"atoll-inputs-1")
    for root, signature in entries:
        hasher.update(root + len(signature).to_bytes(1, "big") + signature)
    return hasher.digest()


def seal_reduced(identity: Identity, sitting: Sitting, inputs: bytes, outputs: bytes) -> Seal:
    """Sign that of these inputs this reducer made outputs with this root."""
    return Seal(inputs, identity.sign(REDUCED_DOMAIN, sitting.id + inputs + outputs))


def has_reduced(sitting: Sitting, reducer: str, inputs: bytes, outputs: bytes, signature: bytes) -> bool:
    """True if `reducer` signed that of these inputs it made outputs with this root."""
    return verify(reducer, REDUCED_DOMAIN, sitting.id + inputs + outputs, signature)


def _sent(sitting: Sitting, reducer: str, root: bytes) -> bytes:
    return sitting.id + sitting.place(reducer).to_bytes(1, "big") + root
