"""The puzzle that an identity solves once for a run."""

from __future__ import annotations

import pytest

from peer.errors import UserError
from peer.protocol.identity import Identity
from peer.protocol.identity_work import NO_WORK, IdentityWork
from peer.protocol.manifest import TrustSpec, parse_manifest
from tests.protocol.test_manifest import HEAD

RUN, OTHER = "a" * 64, "b" * 64
ALICE, BOB = "12D3KooWAlice", "12D3KooWBob"


def solution(work: IdentityWork, peer_id: str, first: int = 0) -> int:
    found = work.search(peer_id, first, 1 << 16)
    assert found is not None
    return found


def test_a_solution_holds_for_its_key_and_its_run_alone() -> None:
    work = IdentityWork(RUN, 10)
    nonce = solution(work, ALICE)
    assert work.shown(ALICE, nonce)
    assert not work.shown(ALICE, nonce - 1)  # the lowest one was found
    assert not work.shown(BOB, nonce)
    assert not IdentityWork(OTHER, 10).shown(ALICE, nonce)


def test_more_bits_need_another_solution() -> None:
    easy, hard = IdentityWork(RUN, 6), IdentityWork(RUN, 12)
    nonce = next(nonce for nonce in range(1 << 16) if easy.shown(ALICE, nonce))
    assert not hard.shown(ALICE, nonce)
    assert easy.shown(ALICE, solution(hard, ALICE))


def test_the_cost_is_two_to_the_number_of_bits() -> None:
    """Mean of 200 searches at 6 bits: 64 hashes, with a deviation of 64 / sqrt(200) = 4.5."""
    work = IdentityWork(RUN, 6)
    hashes = [solution(work, f"peer{number}") + 1 for number in range(200)]
    assert sum(hashes) / len(hashes) == pytest.approx(64, abs=4 * 4.5)


def test_a_search_that_finds_nothing_says_so() -> None:
    assert IdentityWork(RUN, 32).search(ALICE, 0, 100) is None


def test_no_bits_ask_for_nothing() -> None:
    assert NO_WORK.shown(Identity.generate().peer_id, 0)


def test_open_runs_ask_for_a_second_and_private_ones_for_nothing() -> None:
    assert (TrustSpec().work_bits, TrustSpec(mode="private").work_bits) == (21, 0)
    assert (TrustSpec(identity_work=0).work_bits, TrustSpec(mode="private", identity_work=8).work_bits) == (0, 8)
    with pytest.raises(UserError, match="manifest") as refusal:
        parse_manifest(HEAD + "trust: {identity_work: 33}", "here")
    assert "identity_work" in str(refusal.value.hint)
