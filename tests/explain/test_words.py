"""What every kind of record says to a person, word for word."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from peer.explain.names import Names
from peer.explain.page import Page
from peer.explain.words import entries, summary
from peer.outer.record import Drop, RoundRecord
from tests.explain.samples import ALPHA, BRAVO, CHARLIE, STORY, aborted, alone, banned, caught_up, committed, gossiped


def page(records: list[RoundRecord], width: int = 200) -> list[str]:
    out = io.StringIO()
    names = Names()
    names.learn(records)
    Page(Console(file=out, width=width), names, local=time.gmtime).show(entries(records))
    return out.getvalue().splitlines()


GOLDEN = """\
2026-01-01
00:00:01  round 1    no peer to average with: 2 tries
                     reason: 1 of at least 2 peers
                     instead: trained on, waited for others; contributed again in round 1, committed 19.5 s later
00:00:40  round 1    committed with bravo in 0.51 s; matched through the DHT
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120; cosine 0.83
                     match 0.41 s, exchange 0.071 s, commit 0.008 s, install 0.019 s; sent 1.2 MB, received 1.2 MB
00:00:42  round 2    committed with bravo and charlie in 0.11 s; matched through the DHT: others want to take part
                     new: charlie
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120, charlie 4,096; cosine 0.83
                     match 0.012 s, exchange 0.071 s, commit 0.008 s, install 0.019 s; sent 1.2 MB, received 1.2 MB
00:00:44  round 3    committed with bravo and charlie in 0.11 s; persistent group
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120, charlie 4,096; cosine 0.83
                     match 0.012 s, exchange 0.071 s, commit 0.008 s, install 0.019 s; sent 1.2 MB, received 1.2 MB
00:00:48  round 4    aborted in the exchange, with bravo and charlie, after 2.31 s
                     reason: charlie closed the stream (culprit: charlie CHAR33)
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120, charlie 4,096
                     match 0.010 s, exchange 2.30 s; sent 600.0 kB, received 450.1 kB
                     instead: trained on; contributed again in round 4, committed 1.90 s later, regrouped without charlie
00:00:49  round 4    committed with bravo in 0.11 s; matched through the DHT
                     no longer there: charlie
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120; cosine 0.83
                     match 0.012 s, exchange 0.071 s, commit 0.008 s, install 0.019 s; sent 1.2 MB, received 1.2 MB
00:01:00  round 5    aborted in the commit, with bravo, after 10.4 s
                     reason: 1 of 2 votes by the deadline
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120
                     match 0.010 s, exchange 0.080 s, commit 10.3 s; sent 0 B, received 0 B
                     instead: trained on; tried again in round 5, which aborted in matching 15.0 s later
00:01:15  round 5    aborted in matching, after 3.20 s
                     reason: bravo sends no roster (culprit: bravo BRAV22)
                     before that the persistent group ended: bravo did not come within 7 s
                     match 3.20 s; sent 0 B, received 0 B
                     instead: trained on; tried again in round 5, which aborted in matching 5.00 s later
00:01:20  round 5    aborted in matching: this peer was behind, after 0.050 s
                     reason: DELT44 is on a heavier lineage (culprit: DELT44)
                     match 0.050 s; sent 0 B, received 0 B
                     instead: caught up to round 8 0.40 s later: replayed 4 rounds from DELT44
00:01:20  round 8    caught up: replayed 4 rounds from DELT44
02:01:40  round 40   caught up: took the snapshot of round 40 from bravo; left a1a1a1a1a1a1 at round 8, unsent progress is kept
02:01:41  round 41   aborted in the exchange, with bravo and charlie, after 2 min 5 s
                     reason: deadline passed waiting for the mean of ?[31mEVE
                     weights in tokens: alpha (this peer) 5,120, bravo 5,120, charlie 4,096
                     match 0.010 s, exchange 2 min 5 s; sent 0 B, received 0 B
                     instead: trains on, nothing is lost; contributes again after a pause of some seconds at most
"""  # noqa: E501


def test_a_day_of_one_peer() -> None:
    assert page(STORY) == GOLDEN.splitlines()


def test_counts_and_the_median_of_all_of_it() -> None:
    assert summary(STORY) == (
        "4 committed (1 by a persistent group), 7 aborted (2 without other peers), 2 caught up; "
        "a committed round: 0.11 s (median), 1.2 MB sent (mean)"
    )
    assert summary([alone(1, 0.0)]) == "0 committed, 1 aborted (1 without other peers), 0 caught up"


def test_a_narrow_terminal_folds_within_the_column() -> None:
    lines = page(STORY, width=80)
    assert max(map(len, lines)) <= 80
    assert all(line[:2] == "20" or line[8:10] == "  " for line in lines)
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize(
    ("last", "plan"),
    [
        (alone(3, 1.0), "trains on, nothing is lost; contributes once a peer is found"),
        (
            aborted(3, 1.0, "match", "bravo is on a heavier lineage", behind=True, instead="catch_up"),
            "trains on and looks for a donor of the heavier lineage",
        ),
        (
            aborted(3, 1.0, "commit", "x"),
            "trains on, nothing is lost; contributes again after a pause of some seconds at most",
        ),
        (aborted(3, 1.0, "commit", "x", instead=None), "trains on, nothing is lost"),
    ],
)
def test_while_nothing_has_followed_yet_the_plan_is_told(last: RoundRecord, plan: str) -> None:
    assert page([last])[-1].strip() == f"instead: {plan}"


def test_the_next_attempt_is_told_by_what_became_of_it() -> None:
    assert page([aborted(3, 1.0, "commit", "x"), alone(3, 9.0)])[-4].strip() == (
        "instead: trained on; tried again in round 3, which found no peer to average with 8.00 s later"
    )
    assert page([alone(3, 1.0), caught_up(9, 4.0, "", replayed=1)])[-2].strip() == (
        "instead: caught up to round 9 3.00 s later: replayed 1 round from a donor that left"
    )


def test_tries_for_different_rounds_stay_apart() -> None:
    assert [len(entry.records) for entry in entries([alone(1, 0.0), alone(1, 1.0), alone(2, 2.0)])] == [2, 1]


def test_who_has_gone_is_told_whatever_happened_since() -> None:
    records = [committed(3, 0.0), alone(4, 5.0), caught_up(4, 6.0, "", replayed=1)]
    assert page([*records, committed(5, 7.0, (ALPHA, BRAVO), stood=False)])[-3].strip() == "no longer there: charlie"


def test_what_came_before_is_known_across_two_looks() -> None:
    (entry,) = entries([committed(4, 1.0, (ALPHA, BRAVO), stood=False)], before=committed(3, 0.0))
    assert entry.before is not None
    assert CHARLIE in entry.before.members


def test_two_peers_of_one_nickname_are_told_apart() -> None:
    names = Names({ALPHA: "alpha", BRAVO: "gpu", CHARLIE: "gpu"})
    assert names.among((ALPHA, BRAVO, CHARLIE, "12D3KooWxyzXYZ")) == "alpha, gpu BRAV22, gpu CHAR33 and xyzXYZ"
    assert names.within(f"no answer from {BRAVO}: {ALPHA}") == "no answer from gpu BRAV22: alpha"


def test_what_others_sent_is_no_command_to_the_terminal_and_no_flood() -> None:
    assert Names().within("a\x1b]0;title\x07b\nc\u202e") == "a?]0;title?b c?"
    assert len(Names().within("x" * 5000)) < 500


def test_audits_and_bans_are_told() -> None:
    audits = (f"slice 3 of {BRAVO}'s shard in round 2: recomputed, and right",)
    ban = banned(3, 6.0, BRAVO, "it reduced falsely, in round 3, slice 0 of its shard; this peer audited it")
    records = [committed(3, 0.0, audits=audits), aborted(4, 5.0, "match", "x"), ban, committed(4, 9.0)]
    told = [line.strip() for line in page(records)]
    assert "audited: slice 3 of bravo's shard in round 2: recomputed, and right" in told
    assert any("banned bravo" in line and line.endswith("permanently") for line in told)
    assert "because it reduced falsely, in round 3, slice 0 of its shard; this peer audited it" in told
    assert any("contributed again in round 4, committed 4.00 s later" in line for line in told)
    assert summary(records).startswith("2 committed (2 by a persistent group), 1 aborted, 0 caught up, 1 banned")


def test_a_record_without_its_keeper_is_still_told() -> None:
    bare = RoundRecord(status="committed", round=3, lineage_id="a" * 64, members=(ALPHA, BRAVO), weights=(1, 2))
    assert page([bare]) == [
        "          round 3    committed with ALPHA1 and BRAV22; matched through the DHT",
        "                     weights in tokens: ALPHA1 1, BRAV22 2",
        "                     sent 0 B, received 0 B",
    ]


def test_who_was_left_out_of_the_average_is_named_with_the_reason() -> None:
    drops = (
        Drop(peer_id=CHARLIE, slices=3, of=3, reason="median cosine -0.41 to the rest, whose own is 0.3"),
        Drop(peer_id=BRAVO, slices=1, of=3, reason=f"near-duplicate (cosine 0.999900) of {ALPHA}"),
    )
    lines = " ".join(" ".join(page([committed(3, 44.0, dropped=drops)])).split())
    assert (
        "left out: charlie CHAR33, in 3 of 3 slices that this peer averaged: "
        "median cosine -0.41 to the rest, whose own is 0.3"
    ) in lines
    assert "in 1 of 3 slices that this peer averaged: near-duplicate (cosine 0.999900) of alpha" in lines
    assert "left out" not in " ".join(page([committed(3, 44.0)]))


GOSSIP = """\
2026-01-01
00:00:01  round 7    averaged with bravo in 0.11 s
                     weights in tokens: alpha (this peer) 5,120, bravo 4,096; cosine 0.83
                     match 0.012 s, exchange 0.071 s; sent 1.2 MB, received 0 B
00:00:02  round 8    made alone in 0.11 s; no partner drawn this time
00:00:03  round 9    made alone in 0.11 s
                     drawn with charlie, without charlie
                     because charlie did not come within 34 s; nothing is lost
00:00:04  round 10   averaged with bravo in 0.11 s
                     drawn with bravo and charlie, without charlie
                     because charlie sees another group; nothing is lost
                     weights in tokens: alpha (this peer) 5,120, bravo 4,096
                     match 0.012 s, exchange 0.071 s; sent 1.2 MB, received 0 B"""


def test_gossip_rounds_tell_who_was_drawn_and_who_came() -> None:
    records = [
        gossiped(7, 1.0, (ALPHA, BRAVO), (ALPHA, BRAVO), cosine=0.8312),
        gossiped(8, 2.0, (ALPHA,), (ALPHA,)),
        gossiped(9, 3.0, (ALPHA,), (ALPHA, CHARLIE), phase="match", reason=f"{CHARLIE} did not come within 34 s"),
        gossiped(10, 4.0, (ALPHA, BRAVO), (ALPHA, BRAVO, CHARLIE), phase="match",
                 reason=f"{CHARLIE} sees another group"),
    ]  # fmt: skip
    assert "\n".join(page(records)) == GOSSIP
    assert summary(records).startswith("4 committed (2 alone), 0 aborted")
