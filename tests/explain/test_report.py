"""What a report holds of a peer's rounds, and what a reader refuses."""

from __future__ import annotations

import zlib

import pytest

from peer.errors import ProtocolError
from peer.explain.report import MAX_ROUNDS, PeerReport, open_report, pack_report
from peer.protocol.identity import Identity
from peer.protocol.records import seal
from peer.protocol.reports import MAX_REPORT_BYTES, TrainerFigures, ValidationPoint
from tests.explain.samples import ALPHA, BRAVO, CHARLIE, STORY, aborted, committed

ALICE, BOB = Identity.generate(), Identity.generate()
RUN = "a" * 64
FIGURES = TrainerFigures(
    device="NVIDIA H100 80GB HBM3", utilisation=0.93, mfu=0.41, sample="def add(a, b):",
    validation=ValidationPoint(round=7, tokens=123_456, loss=3.21),
)  # fmt: skip


def packed(rounds, figures=FIGURES):
    blob = pack_report(ALICE, RUN, 5, PeerReport(since=1.0, figures=figures, rounds=tuple(rounds)[-MAX_ROUNDS:]))
    assert blob is not None
    return blob


def test_figures_and_rounds_arrive_with_their_signer_and_without_what_is_known_elsewhere():
    serial, report = open_report(packed(STORY[-4:]), ALICE.peer_id, RUN)
    assert (serial, report.since, report.figures) == (5, 1.0, FIGURES)
    assert [record.round for record in report.rounds] == [record.round for record in STORY[-4:]]
    assert [record.reason for record in report.rounds] == [record.reason for record in STORY[-4:]]
    assert {record.peer_id for record in report.rounds} == {ALICE.peer_id}
    assert all(record.nicknames == {} and record.state_digest is None for record in report.rounds)


def test_a_report_holds_two_dozen_rounds_of_a_group_and_the_newest_of_large_ones():
    rounds = [committed(r, 10.0 * r) for r in range(1, 60)]
    kept = open_report(packed(rounds), ALICE.peer_id, RUN)[1].rounds
    assert [record.round for record in kept] == list(range(60 - len(kept), 60))
    assert 12 <= len(kept) <= MAX_ROUNDS
    crowd = tuple(Identity.generate().peer_id for _ in range(16))
    large = [committed(r, 10.0 * r, crowd, weights=(5120,) * 16) for r in range(1, 60)]
    kept = open_report(packed(large), ALICE.peer_id, RUN)[1].rounds
    assert kept[-1].round == 59
    assert len(packed(large)) <= MAX_REPORT_BYTES


def test_a_round_that_does_not_fit_is_left_out_and_the_figures_stay():
    monster = aborted(3, 1.0, "exchange", "x", audits=("".join(Identity.generate().peer_id for _ in range(60)),))
    report = open_report(packed([monster]), ALICE.peer_id, RUN)[1]
    assert (report.rounds, report.figures) == ((), FIGURES)


def test_a_long_reason_is_cut():
    report = open_report(packed([aborted(3, 1.0, "exchange", "no " * 500, culprit=BRAVO)]), ALICE.peer_id, RUN)[1]
    assert report.rounds[0].reason == ("no " * 500)[:200]
    assert report.rounds[0].culprit == BRAVO


def sealed(payload, signer=ALICE):
    return seal(signer, "report", payload)


HEADER = b"R1" + bytes(8) + bytes.fromhex(RUN)


@pytest.mark.parametrize(
    ("blob", "owner", "reason"),
    [
        (packed([]), BOB, "under"),
        (sealed(b"R1" + bytes(8) + bytes(32) + zlib.compress(b"{}")), ALICE, "run 000000000000"),
        (sealed(HEADER), ALICE, "truncated report"),
        (sealed(HEADER + b"\x00rubbish"), ALICE, "does not unpack"),
        (sealed(HEADER + zlib.compress(b" " * 100_000)), ALICE, "more than 32768 bytes"),
        (sealed(HEADER + zlib.compress(b"[" * 20_000)), ALICE, "malformed PeerReport"),
        (sealed(HEADER + zlib.compress(b'{"since":1,"html":"<script>"}')), ALICE, "malformed PeerReport"),
        (sealed(HEADER + bytes(2048)), ALICE, "the limit is 2048"),
        (packed([])[:-1], ALICE, "no valid signature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # keys are new each time
)
def test_what_is_refused(blob, owner, reason):
    with pytest.raises(ProtocolError, match=reason):
        open_report(blob, owner.peer_id, RUN)


def test_names_of_members_are_no_part_of_it():
    assert not any(one in packed([committed(1, 1.0)]) for one in (ALPHA.encode(), CHARLIE.encode()))
