"""What a watcher makes of records and reports: peers and their silence, rounds in words, the figures of the run."""

from __future__ import annotations

import json

import pytest

from peer.errors import ProtocolError
from peer.explain.swarm_state import FORGOTTEN_S, MAX_EVENTS, MAX_PEERS, SILENT_S
from peer.outer.record import RoundRecord
from peer.protocol.records import parse_json
from peer.protocol.reports import ValidationPoint
from tests.explain.samples import ALPHA, BRAVO, CHARLIE, GROUP, aborted, alone, committed
from tests.explain.watched import NAMES, Watched


@pytest.fixture
def three():
    watched = Watched()
    for peer_id in NAMES:
        watched.peer(peer_id, loss=2.0)
    return watched


def test_a_peer_is_gone_once_it_is_silent_and_forgotten_after_an_hour(three):
    assert {view.state for view in three.views().values()} == {"training"}
    three.now += SILENT_S / 2
    three.peer(ALPHA)
    three.peer(BRAVO, state="finished")
    three.look()
    three.now += SILENT_S / 2 + 0.1
    three.peer(ALPHA)
    views = three.views()
    assert {name: view.state for name, view in views.items()} == {
        "alpha": "training", "bravo": "finished", "charlie": "gone",
    }  # fmt: skip
    assert (views["charlie"].tokens_per_s, three.state.point().tokens_per_s) == (0.0, 10.0)
    three.records = {}
    three.now += FORGOTTEN_S
    assert [view.nickname for view in three.look().peers] == ["alpha"]


def test_an_old_record_is_no_sign_of_life(three):
    three.look()
    three.now += SILENT_S + 0.1
    assert {view.state for view in three.views().values()} == {"gone"}


def test_a_round_is_told_once_for_all_its_members(three):
    for peer_id in NAMES:
        three.report(peer_id, committed(4, 50.0))
    (event,) = three.look().events
    assert event.headline == "committed with alpha, bravo and charlie in 0.11 s; persistent group"
    assert (event.round, event.tokens, event.members) == (4, 14_336, (ALPHA, BRAVO, CHARLIE))
    assert "weights in tokens: alpha 5,120, bravo 5,120, charlie 4,096; cosine 0.83" in event.details
    assert "this peer" not in "".join(event.details)
    three.report(ALPHA, committed(4, 50.0))
    assert len(three.look().events) == 1


def test_a_failed_round_is_told_by_each_peer_that_saw_it_with_its_reason(three):
    failed = aborted(5, 60.0, "exchange", f"{CHARLIE} closed the stream", culprit=CHARLIE, **GROUP)
    three.report(ALPHA, failed)
    (event,) = three.look().events
    assert (event.tone, event.teller, event.status) == ("bad", ALPHA, "aborted")
    assert event.headline == "aborted in the exchange, with bravo and charlie"
    assert event.details[0] == "reason: charlie closed the stream (culprit: charlie CHAR33)"
    three.report(ALPHA, failed, committed(5, 61.0, (ALPHA, BRAVO)))
    failure, success = three.look().events
    assert failure.key == event.key
    assert failure.details[-1].startswith("instead: trained on; contributed again in round 5, committed 1.00 s later")
    assert success.headline.startswith("committed with alpha and bravo")


def test_tries_without_others_are_one_event(three):
    three.report(ALPHA, alone(1, 1.0))
    three.look()
    three.report(ALPHA, alone(1, 1.0), alone(1, 20.0), alone(1, 40.0))
    (event,) = three.look().events
    assert event.headline == "no peer to average with: 3 tries"


def test_a_peer_cannot_tell_of_a_round_in_which_it_was_not(three):
    three.report(CHARLIE, committed(4, 50.0, (ALPHA, BRAVO)))
    assert three.look().events == []


def test_words_of_a_stranger_stay_on_one_line(three):
    three.report(ALPHA, aborted(5, 60.0, "exchange", "\x1b[31m<b>red</b>\n\u202e"))
    assert three.look().events[0].details[0] == "reason: ?[31m<b>red</b> ?"


def test_what_a_peer_tells_from_the_future_or_again_is_left_out(three):
    three.report(ALPHA, committed(4, 50.0), aborted(9, 1e6, "exchange", "x"))
    assert [event.round for event in three.look().events] == [4]


def test_figures_are_of_those_that_are_trusted(three):
    three.peer(CHARLIE, loss=900_000.0, tokens_per_s=1e11, round=2**40, lineage_weight=2**50)
    three.report(CHARLIE, aborted(5, 60.0, "match", "spam"))
    three.state.trusted = lambda peer_id: peer_id in (ALPHA, BRAVO)
    point = three.look().point()
    assert (point.peers, point.tokens_per_s, point.loss, point.round, point.tokens) == (2, 20.0, 2.0, 4, 4000)
    assert three.state.events == []
    assert len(three.state.peers) == 3


def test_the_place_of_the_run_is_that_of_most_of_its_peers(three):
    three.peer(CHARLIE, round=900, lineage_weight=2**50)
    point = three.look().point()
    assert (point.round, point.tokens, point.peers) == (4, 4000, 3)


def test_tokens_of_several_fragments_count_once():
    watched = Watched(fragments=4)
    watched.peer(ALPHA)
    assert watched.look().point().tokens == 1000


def test_validation_is_of_the_newest_round_that_enough_peers_have_validated(three):
    for peer_id, round, loss in ((ALPHA, 7, 3.0), (BRAVO, 7, 3.2), (CHARLIE, 8, 2.5)):
        three.report(peer_id, utilisation=0.5, validation=ValidationPoint(round=round, tokens=1, loss=loss))
    point = three.look().point()
    assert (point.validated, point.validation, point.utilisation) == (8, 2.5, 0.5)
    for extra in range(3):
        three.peer(f"p{extra}", "extra")
        three.report(f"p{extra}", validation=ValidationPoint(round=7, tokens=1, loss=3.1))
    point = three.look().point()
    assert (point.validated, point.validation) == (7, 3.1)


def test_crowds_take_no_place_of_the_trusted():
    watched = Watched()
    watched.state.trusted = lambda peer_id: peer_id == ALPHA
    watched.peer(ALPHA)
    watched.look()
    watched.now += 1.0
    for number in range(MAX_PEERS + 50):
        watched.peer(f"stranger{number}", "stranger")
    views = watched.look().peers
    assert len(views) == MAX_PEERS
    assert "alpha" in {view.nickname for view in views}


def test_events_are_bounded():
    watched = Watched()
    for number in range(MAX_EVENTS // 12 + 10):
        peer_id = f"p{number}"
        watched.peer(peer_id, "p")
        watched.report(peer_id, *(aborted(r, float(r), "match", "x") for r in range(12)))
    assert len(watched.look().events) == MAX_EVENTS


@pytest.mark.parametrize(
    "lie",
    [
        {"round": 10**30}, {"weights": [10**30, 1]}, {"weights": [-5, 1]}, {"bytes_sent": 10**400},
        {"bytes_received": -1}, {"seconds": {"total": 1e300}}, {"seconds": {"match": -1.0}}, {"replayed": 10**30},
        {"snapshot_round": -4}, {"dropped": [{"peer_id": "x", "slices": 10**50, "of": -1, "reason": "x"}]},
        {"members": ["x"] * 65}, {"ended_at": 1e300},
    ],
)  # fmt: skip
def test_a_record_with_numbers_that_no_round_has_is_malformed(lie):
    told = committed(4, 50.0).model_dump(mode="json", exclude_none=True)
    parse_json(RoundRecord, json.dumps(told).encode())
    with pytest.raises(ProtocolError, match="malformed RoundRecord"):
        parse_json(RoundRecord, json.dumps(told | lie).encode())


def test_no_word_of_a_record_reaches_a_terminal_as_it_came(three):
    evil = "\x1b[2J\u202e"
    three.report(ALPHA, aborted(5, 60.0, evil, evil, culprit=evil, regrouped=evil, members=(evil,), weights=(1,)))
    three.report(BRAVO, committed(4, 50.0, (BRAVO, evil), audits=(evil,)))
    for event in three.look().events:
        assert "".join((event.headline, *event.details)).isprintable()
