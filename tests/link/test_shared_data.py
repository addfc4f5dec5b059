"""What a contribution claims of the run's data: from the step that read it to the certificate."""

from __future__ import annotations

from peer.link.ledger import ContributionLedger
from peer.link.shared_data import UsedData
from peer.protocol.ranges import Range


def used(most_parts: int = 100) -> UsedData:
    data = UsedData()
    data.most_parts = most_parts
    return data


def test_parts_are_claimed_once_by_the_contribution_that_was_marked_after_them() -> None:
    data = used()
    data.add([Range(0, 3, 5), Range(0, 5, 9)])
    data.mark()
    data.add([Range(1, 0, 2)])
    assert data.claim == "0:3-9"
    assert data.pending == [Range(0, 3, 9), Range(1, 0, 2)]
    data.settle()
    assert data.pending == [Range(1, 0, 2)]
    data.mark()
    assert data.claim == "1:0-2"


def test_a_round_that_fails_claims_its_parts_again_with_those_since() -> None:
    data = used()
    data.add([Range(0, 0, 4)])
    data.mark()
    data.add([Range(0, 4, 6)])
    data.mark()
    assert data.claim == "0:0-6"


def test_what_is_above_the_limit_waits_for_the_next_contribution() -> None:
    data = used(most_parts=5)
    data.add([Range(0, 0, 4), Range(0, 8, 12)])
    data.mark()
    assert data.claim == "0:0-4,0:8-9"
    data.settle()
    assert data.pending == [Range(0, 9, 12)]


def test_what_is_lost_is_not_claimed() -> None:
    data = used()
    data.add([Range(0, 0, 4)])
    data.mark()
    data.add([Range(0, 4, 6)])
    data.drop(marked=False)
    assert data.pending == [Range(0, 0, 4)]
    data.drop(marked=True)
    assert (data.pending, data.claim) == ([], "")


def test_the_ledger_settles_claims_with_the_first_fragment_alone() -> None:
    ledger = ContributionLedger(fragments=2)
    ledger.used.most_parts = 10
    ledger.used.add([Range(0, 0, 4)])
    ledger.mark(100)
    assert ledger.hand_over(1).ranges == ""
    ledger.settle_marked()
    assert ledger.used.pending == [Range(0, 0, 4)]
    ledger.mark(200)
    assert ledger.hand_over(0).ranges == "0:0-4"
    ledger.used.add([Range(0, 4, 5)])
    ledger.drop(230)  # since the snapshot, which is on its way
    assert ledger.used.pending == [Range(0, 0, 4)]
    ledger.settle_marked()
    assert ledger.used.pending == []
