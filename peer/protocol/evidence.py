"""Evidence that any peer can verify: a small document in which the offender's own signatures convict it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import FailFast, Field

from peer.protocol.lineage import SignatureHex
from peer.protocol.manifest import Digest, PeerIdText, Spec
from peer.protocol.records import MAX_RECORD_BYTES, Count
from peer.protocol.spec import Message
from peer.protocol.statements import Sitting
from peer.protocol.word import SignedWord

MAX_EVIDENCE_BYTES = 256 * 1024
MAX_SLICES = 2**20
MAX_PATH = 20
Path = Annotated[tuple[Digest, ...], Field(max_length=2 * MAX_PATH), FailFast()]
SealedHex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * MAX_RECORD_BYTES)]


class TwoJoins(Spec):
    """Equivocation of a member of a persistent group: two different joins for the same round, sent to two members."""

    kind: Literal["two joins"] = "two joins"
    first: SealedHex
    second: SealedHex


class TwoWords(Spec):
    """Equivocation of a member that gave a round up: two different words for the same group, said to two members."""

    kind: Literal["two words"] = "two words"
    run_id: Digest
    group: Digest
    member: PeerIdText
    first: SignedWord
    second: SignedWord


class SignedRoots(Spec):
    """What a reducer signed: the digest of its inputs, the root over its outputs, the digest of its residual."""

    inputs: Digest
    outputs: Digest
    residual: Digest
    signature: SignatureHex


class TwoReductions(Spec):
    """Equivocation of a reducer: two different results, or sets of inputs, sent to two members."""

    kind: Literal["two reductions"] = "two reductions"
    sitting: Sitting
    reducer: PeerIdText
    first: SignedRoots
    second: SignedRoots


class SignedSlice(Spec):
    """One slice of a contribution or of a reduced shard: its digest, and the path to the root that was signed.

    `signature` is null for what the reducer sent to itself.
    """

    leaf: Digest
    path: Annotated[tuple[Digest, ...], Field(max_length=MAX_PATH), FailFast()]
    signature: SignatureHex | None


class Residue(Spec):
    """What a reducer signed of its residual, for one slice of its shard.

    Attributes:
        since, root: what `peer.protocol.statements.residual_of` digests, in addition to the bounds of the shard.
        path: from the slice's cells, after the round, to that root.
        carried: for each earlier round after which it held the residual of some of the slice's cells, in the order of
            these: the path from them to what it signed then.
    """

    since: Count
    root: Digest
    path: Path
    carried: Annotated[tuple[Path, ...], Field(max_length=128), FailFast()]


class Reduction(Spec):
    """What a reducer signed about one slice of its shard: its inputs, in roster order, and its output.

    A peer that has the payloads of the inputs can verify the output; with error feedback, it also needs the chain of
    certificates and the residual of before the round.
    """

    kind: Literal["reduction"] = "reduction"
    sitting: Sitting
    reducer: PeerIdText
    slice_index: Annotated[int, Field(ge=0, lt=MAX_SLICES)]
    inputs: Annotated[tuple[SignedSlice, ...], Field(min_length=2, max_length=64), FailFast()]
    output: SignedSlice
    residue: Residue | None = None


class Evidence(Message):
    """One finding; the offender follows from it."""

    most_items: ClassVar[int] = 1 << 14

    finding: Annotated[TwoJoins | TwoWords | TwoReductions | Reduction, Field(discriminator="kind")]
