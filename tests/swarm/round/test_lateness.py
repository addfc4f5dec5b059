"""For whom a member waits in a round that is committed."""

from __future__ import annotations

import pytest

from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import VoteMessage
from peer.swarm.round.arrivals import Arrivals
from peer.swarm.round.lateness import EXCUSE, SHARE, Lateness, Waited
from peer.swarm.runtime.timing import STANDARD

LATE_S, BEGAN = STANDARD.late_s, 1000.0


def arrivals(began, sent=(), signed=(), joined=(), sealed=()):
    came = {"contribution": dict(sent), "reduced": dict(signed), "vote": {}}
    return Arrivals(began=began, joined=dict(joined), sealed=dict(sealed), came=came)


def waited(sent, reduced=None, *, interval_s=6.0, own_s=0.1):
    """In the second of two rounds: when contributions came after its begin, and shards after the last of these."""
    lateness, last = Lateness(LATE_S), BEGAN + max(sent.values())
    signed = {**{name: last + (reduced or {}).get(name, 0.1) for name in sent}, "me": last + own_s}
    now = max(signed.values())
    lateness.note(now - interval_s, arrivals(now - interval_s))
    return lateness.note(now, arrivals(BEGAN, {name: BEGAN + seconds for name, seconds in sent.items()}, signed))


def test_who_sends_its_contribution_late_is_named_with_the_seconds_beyond_the_usual():
    found = waited({"a": 0.1, "b": 0.2, "x": 4.1})
    assert (found.contributions, found.shards) == ({"x": pytest.approx(4.0)}, {})
    assert found.delayed_by == {"x"}


def test_who_reduces_late_is_named_although_all_contributions_were_in_time():
    found = waited({"a": 0.1, "b": 0.2, "x": 0.1}, {"x": 4.1})
    assert (found.contributions, found.shards) == ({}, {"x": pytest.approx(4.0)})
    assert found.delayed_by == frozenset()


def test_of_each_stage_the_seconds_of_each_member_are_told():
    found = waited({"a": 0.1, "b": 2.1, "c": 0.1, "x": 4.1}, {"x": 3.1})
    assert (found.contributions, found.shards) == (
        {"b": pytest.approx(2.0), "x": pytest.approx(4.0)}, {"x": pytest.approx(3.0)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "interval_s"),
    [
        ({"a": 0.1, "b": 0.2, "x": 0.9 * LATE_S}, 6.0),
        ({"a": 5.0, "b": 6.0, "x": 60.0}, 600.0),  # a slow line beside ten minutes of training
        ({"a": 5.0, "b": 6.0, "x": 14.0}, 20.0),  # all are slow
        ({"x": 4.0}, 6.0),  # of two, each could be the slow one
    ],
)
def test_a_wait_that_costs_little_of_the_time_is_nothing(sent, interval_s):
    for found in (waited(sent, interval_s=interval_s), waited(dict.fromkeys(sent, 0.1), sent, interval_s=interval_s)):
        assert (found.contributions, found.shards) == ({}, {})


def test_half_of_what_is_allowed_explains_a_late_shard():
    allowed_s = SHARE * 60.0
    for seconds, names in ((0.9 * EXCUSE * allowed_s, ""), (1.1 * EXCUSE * allowed_s, "x")):
        found = waited({"a": 0.0, "b": 0.0, "x": seconds}, interval_s=60.0)
        assert found.contributions == {}
        assert found.delayed_by == set(names)


def test_a_vote_says_what_its_sender_waited_for():
    for found in (Waited(), Waited({"c": 0.0}, {"a": 0.0, "b": 0.0}, frozenset("b"))):
        vote = parse_json(VoteMessage, dump_json(found.vote("ab" * 32, "0" * 128)))
        assert Waited.said(vote) == found


def test_what_explains_a_late_shard_is_measured_as_that_is_however_long_contributions_take():
    found = waited({"a": 20.0, "b": 20.0, "x": 32.0}, interval_s=60.0)
    assert found.contributions == {}
    assert found.delayed_by == {"x"}


def test_a_join_that_came_when_most_had_begun_explains_why_this_member_began_late():
    lateness = Lateness(LATE_S)
    sent, signed = dict.fromkeys("abx", BEGAN), dict.fromkeys(("a", "b", "x", "me"), BEGAN + 0.1)
    for seconds, names in ((0.9 * EXCUSE * LATE_S, ""), (1.1 * EXCUSE * LATE_S, "x")):
        joined = {"a": BEGAN - seconds, "b": BEGAN - seconds, "x": BEGAN}
        others = {"a": BEGAN - 0.1, "b": BEGAN - 0.1, "x": BEGAN + 0.1}
        assert lateness.note(BEGAN + 0.2, arrivals(BEGAN, sent, signed, joined, others)).delayed_by == set(names)
        waiting = others | {"b": BEGAN + 0.1}  # b has waited for the same join
        assert lateness.note(BEGAN + 0.2, arrivals(BEGAN, sent, signed, joined, waiting)).delayed_by == set()


def test_of_contributions_the_last_explains_a_late_shard():
    found = waited({"a": 0.0, "b": 0.0, "c": 2.0, "x": 2.1, "y": 0.0}, interval_s=14.0)
    assert found.delayed_by == {"x"}


def test_after_a_round_that_failed_the_time_since_the_last_one_allows_no_more():
    lateness, sent = Lateness(LATE_S), {"a": BEGAN, "b": BEGAN, "x": BEGAN + 3.0}
    signed = dict.fromkeys(("a", "b", "x", "me"), BEGAN + 3.1)
    lateness.note(BEGAN - 60.0, arrivals(BEGAN - 60.0))
    assert lateness.note(BEGAN + 3.2, arrivals(BEGAN, sent, signed)) == Waited()
    lateness.note(BEGAN - 60.0, arrivals(BEGAN - 60.0))
    lateness.failed()
    assert lateness.note(BEGAN + 3.2, arrivals(BEGAN, sent, signed)) == Waited(delayed_by=frozenset("x"))


def test_who_joins_late_is_noted_for_what_its_last_vote_says():
    lateness, joined = Lateness(LATE_S), {"a": BEGAN - 5.0, "b": BEGAN - 5.0, "x": BEGAN}
    sent, signed = dict.fromkeys("abx", BEGAN), dict.fromkeys(("a", "b", "x", "me"), BEGAN + 0.1)
    lateness.note(BEGAN - 9.8, arrivals(BEGAN - 9.8))
    assert lateness.note(BEGAN + 0.2, arrivals(BEGAN, sent, signed, joined)).joins == {"x": 5.0}
