"""Evidence that anybody can verify: a small document in which the culprit's own signatures convict it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.protocol.lineage import PeerIdText, SignatureHex
from peer.protocol.manifest import Digest, Spec
from peer.protocol.records import MAX_RECORD_BYTES, Count
from peer.protocol.statements import Sitting

MAX_EVIDENCE_BYTES = 256 * 1024
MAX_UNITS = 2**20
MAX_PATH = 20
SealedHex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * MAX_RECORD_BYTES)]


class TwoJoins(Spec):
    """A member of a standing group told two members two different joins for the same round."""

    kind: Literal["two joins"] = "two joins"
    first: SealedHex
    second: SealedHex


class SignedRoots(Spec):
    """What a reducer signed: the digest of its inputs, the root over its outputs, the digest of its residual."""

    inputs: Digest
    outputs: Digest
    residual: Digest
    signature: SignatureHex


class TwoReductions(Spec):
    """A reducer told two members two different results, or that it made them of different inputs."""

    kind: Literal["two reductions"] = "two reductions"
    sitting: Sitting
    reducer: PeerIdText
    first: SignedRoots
    second: SignedRoots


class Unit(Spec):
    """One unit of a contribution or of a reduced part: its digest, and the way to the root that was signed.

    `signature` is null for what the reducer sent to itself.
    """

    leaf: Digest
    path: Annotated[tuple[Digest, ...], Field(max_length=MAX_PATH)]
    signature: SignatureHex | None


class Residue(Spec):
    """What a reducer signed of its residual, about one unit of its part.

    Attributes:
        since, root: what `peer.protocol.statements.residual_of` digests, besides the bounds of the part.
        path: from the unit's cells, after the round, to that root.
        carried: for each earlier round that had left it with some of the unit's cells, in the order of these: the path
            from them to what it signed then.
    """

    since: Count
    root: Digest
    path: Annotated[tuple[Digest, ...], Field(max_length=2 * MAX_PATH)]
    carried: Annotated[tuple[Annotated[tuple[Digest, ...], Field(max_length=2 * MAX_PATH)], ...], Field(max_length=128)]


class Reduction(Spec):
    """What a reducer signed about one unit of its part: what it was sent, in roster order, and what it made of that.

    With the payloads of the inputs at hand, anybody can compute whether that is so; with error feedback, whoever has
    the chain of certificates and the residual of before it, too.
    """

    kind: Literal["reduction"] = "reduction"
    sitting: Sitting
    reducer: PeerIdText
    unit: Annotated[int, Field(ge=0, lt=MAX_UNITS)]
    inputs: Annotated[tuple[Unit, ...], Field(min_length=2, max_length=64)]
    output: Unit
    residue: Residue | None = None


class Evidence(Spec):
    """One finding; who is guilty follows from it."""

    finding: Annotated[TwoJoins | TwoReductions | Reduction, Field(discriminator="kind")]
