"""Maps that forget, against a plain dict and a list of times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.runtime.expiring import BoundedMap, ExpiringMap, ExpiringSet

KEYS = st.integers(0, 5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_entry_ends_when_its_time_is_over_and_not_before():
    clock = Clock()
    entries = ExpiringMap(clock, seconds=10.0)
    entries["a"] = 1
    entries.put("b", 2, seconds=20.0)
    clock.now += 9.5
    assert (dict(entries), entries.left_s("a"), entries.left_s("b")) == ({"a": 1, "b": 2}, 0.5, 10.5)
    clock.now += 0.5
    assert ("a" in entries, entries.get("a"), len(entries), dict(entries)) == (False, None, 1, {"b": 2})
    assert (entries.left_s("a"), entries.left_s("never set")) == (0.0, 0.0)
    with pytest.raises(KeyError):
        entries["a"]


def test_to_set_an_entry_again_gives_it_its_time_again():
    clock = Clock()
    held = ExpiringSet(clock, seconds=10.0)
    held.add("a")
    clock.now += 9.0
    held.add("a")
    clock.now += 9.0
    assert "a" in held
    held.add("a", seconds=0.5)  # a shorter time counts too
    clock.now += 0.5
    assert "a" not in held


def test_what_has_no_time_stays_until_it_is_removed():
    clock = Clock()
    entries = ExpiringMap(clock)
    entries["a"] = 1
    clock.now += 1e9
    assert entries.pop("a") == 1
    assert "a" not in entries


def test_entries_that_nobody_asks_for_take_no_memory():
    clock = Clock()
    entries = ExpiringMap(clock, seconds=3.0)
    for number in range(1000):
        entries[number] = number
        clock.now += 1.0
        assert len(entries._entries) <= 3


SETS = st.tuples(st.just("set"), KEYS, st.integers(0, 9))
WAITS = st.tuples(st.just("wait"), st.integers(0, 4))
DROPS = st.tuples(st.just("drop"), KEYS)


@given(st.lists(st.one_of(SETS, WAITS, DROPS)))
def test_it_holds_what_a_dict_with_times_would(events):
    clock = Clock()
    entries, until = ExpiringMap(clock), {}
    for number, (what, *about) in enumerate(events):
        if what == "set":
            entries.put(about[0], number, seconds=about[1])
            until[about[0]] = clock.now + about[1], number
        elif what == "wait":
            clock.now += about[0]
        else:
            until.pop(about[0], None)
            entries.pop(about[0], None)
        expected = {key: value for key, (end, value) in until.items() if end > clock.now}
        assert {key: entries.get(key) for key in range(6) if key in entries} == expected
        assert (dict(entries), len(entries)) == (expected, len(expected))


@given(st.integers(1, 4), st.lists(KEYS))
def test_a_bounded_map_keeps_the_entries_that_were_set_last(limit, keys):
    entries = BoundedMap(limit)
    for number, key in enumerate(keys):
        entries[key] = number
    newest = dict(sorted(((key, number) for number, key in enumerate(keys)), key=lambda entry: entry[1]))
    last = sorted(newest.items(), key=lambda entry: entry[1])[-limit:]
    assert list(entries.items()) == last


def test_what_is_only_read_stays_in_its_place():
    entries = BoundedMap(2)
    entries["a"], entries["b"] = 1, 2
    assert entries.setdefault("a", 3) == 1
    assert entries.setdefault("c", 4) == 4
    assert dict(entries) == {"b": 2, "c": 4}
