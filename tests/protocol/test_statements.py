from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.lineage import Member
from peer.protocol.statements import (
    NO_RESIDUAL,
    REDUCED_SEAL_BYTES,
    SEAL_BYTES,
    Leaves,
    ReducedSeal,
    Seal,
    Sitting,
    climb,
    has_reduced,
    has_sent,
    leaf_of,
    path_of,
    residual_of,
    root_of,
    seal_reduced,
    seal_sent,
)

ONE, OTHER = Identity.generate(), Identity.generate()


def leaves_of(count: int) -> list[bytes]:
    return [leaf_of(str(number).encode()) for number in range(count)]


def sitting(**changes: object) -> Sitting:
    members = tuple(Member(peer_id=identity.peer_id, tokens=5) for identity in (ONE, OTHER))
    digest = hashlib.sha256(b"x").hexdigest()
    values = {"run_id": digest, "round": 3, "parent": digest, "group": digest, "members": members}
    return Sitting.model_validate({**values, **changes})


@given(count=st.integers(1, 70), data=st.data())
def test_neighbouring_slices_lead_to_the_root_by_their_own_path_alone(count: int, data: st.DataObject) -> None:
    leaves = leaves_of(count)
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, count))
    own, path = leaves[first:stop], path_of(leaves, first, stop)
    assert climb(own, first, count, path) == root_of(leaves)
    assert len(path) <= (7 if stop == first + 1 else 12)
    altered = data.draw(st.integers(0, len(own) - 1))
    assert climb([*own[:altered], leaf_of(b"another"), *own[altered + 1 :]], first, count, path) != root_of(leaves)
    with pytest.raises(ProtocolError, match="beyond"):
        climb(own, first, count, [*path, leaves[0]])
    if path:
        with pytest.raises(ProtocolError, match="below"):
            climb(own, first, count, path[:-1])


def test_a_node_is_no_slice_and_a_slice_no_node() -> None:
    leaves = leaves_of(4)
    assert leaf_of(leaves[0] + leaves[1]) not in (root_of(leaves[:2]), root_of(leaves))
    assert len({root_of(leaves_of(count)) for count in range(9)}) == 9


def test_every_slice_is_a_leaf() -> None:
    leaves = Leaves()
    assert leaves.digests == []
    for piece in (b"a", bytearray(b"b"), memoryview(b"c")):
        leaves.add(piece)
    assert leaves.digests == [leaf_of(piece) for piece in (b"a", b"b", b"c")]


@pytest.mark.parametrize("change", ["round", "parent", "group", "run_id", "members"])
def test_a_signature_holds_for_one_sitting_only(change: str) -> None:
    here, digest = sitting(), hashlib.sha256(b"y").hexdigest()
    members = tuple(member.model_copy(update={"tokens": 6}) for member in here.members)
    there = sitting(**{change: {"round": 4, "members": members}.get(change, digest)})
    root = root_of(leaves_of(3))
    sent, reduced = seal_sent(ONE, here, OTHER.peer_id, root), seal_reduced(ONE, here, root, root)
    assert has_sent(here, ONE.peer_id, OTHER.peer_id, root, sent.signature)
    assert has_reduced(here, ONE.peer_id, root, reduced)
    assert not has_sent(there, ONE.peer_id, OTHER.peer_id, root, sent.signature)
    assert not has_reduced(there, ONE.peer_id, root, reduced)


def test_a_signature_holds_for_one_reducer_one_signer_and_one_kind() -> None:
    here, root = sitting(), root_of(leaves_of(3))
    sent, reduced = seal_sent(ONE, here, OTHER.peer_id, root), seal_reduced(ONE, here, root, root)
    assert not has_sent(here, ONE.peer_id, ONE.peer_id, root, sent.signature)
    assert not has_sent(here, OTHER.peer_id, OTHER.peer_id, root, sent.signature)
    assert not has_sent(here, ONE.peer_id, OTHER.peer_id, root, reduced.signature)
    assert not has_reduced(here, OTHER.peer_id, root, reduced)
    assert not has_reduced(here, ONE.peer_id, root, reduced._replace(residual=residual_of(1, (0, 9), root)))
    with pytest.raises(ProtocolError, match="is not a member"):
        has_sent(here, ONE.peer_id, "somebody", root, sent.signature)


def test_seals_have_one_length() -> None:
    seal = seal_sent(ONE, sitting(), OTHER.peer_id, root_of([]))
    assert len(seal.body) == SEAL_BYTES
    assert Seal.parse(seal.body) == seal
    reduced = seal_reduced(ONE, sitting(), root_of([]), root_of([]), residual_of(7, (0, 9), root_of(leaves_of(2))))
    assert len(reduced.body) == REDUCED_SEAL_BYTES
    assert ReducedSeal.parse(reduced.body) == reduced


def test_the_same_residual_since_another_round_or_of_another_shard_is_another_one() -> None:
    root, shards = root_of(leaves_of(2)), [(0, 9), (0, 10), (1, 9)]
    assert len({residual_of(since, shard, root) for since in (0, 1, 256) for shard in shards} | {NO_RESIDUAL}) == 10
