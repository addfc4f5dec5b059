"""Places in all and for one peer: never more than there are, and none is lost."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.runtime.admission import Admission

PEERS = st.sampled_from("abcd")


def test_one_peer_leaves_places_to_the_others():
    admission = Admission(total=3, per_peer=2)
    with admission.of("a") as one, admission.of("a") as two, admission.of("a") as three, admission.of("b") as other:
        assert (one, two, three, other) == (True, True, False, True)
        assert admission.usage("a") == "3 of 3 places are taken, 2 of 2 by a"
        assert (admission.held("a"), admission.held("b"), admission.held()) == (2, 1, 3)
        with admission.of("c") as beyond_all:
            assert not beyond_all
    assert (admission.held("a"), admission.held()) == (0, 0)


def test_a_place_is_given_back_when_the_work_fails():
    admission = Admission(total=1, per_peer=1)
    with pytest.raises(ValueError, match="it broke"), admission.of("a"):
        raise ValueError("it broke")
    assert admission.take("b")


def test_a_place_that_nobody_took_cannot_be_given_back():
    with pytest.raises(AssertionError, match="a holds no place"):
        Admission(total=1, per_peer=1).release("a")


@given(st.integers(0, 5), st.integers(0, 3), st.lists(st.tuples(st.booleans(), PEERS)))
def test_no_bound_is_ever_exceeded_and_a_refusal_has_a_reason(total, per_peer, events):
    admission, held = Admission(total, per_peer), dict.fromkeys("abcd", 0)
    for comes, peer in events:
        if comes:
            room = sum(held.values()) < total and held[peer] < per_peer
            assert admission.take(peer) == room
            held[peer] += room
        elif held[peer]:
            admission.release(peer)
            held[peer] -= 1
        assert {one: admission.held(one) for one in held} == held
        assert admission.held() == sum(held.values())
        assert len(admission._taken) == sum(map(bool, held.values()))  # peers that left are forgotten


@given(st.lists(PEERS, max_size=12))
def test_nested_work_releases_whatever_it_took(peers):
    admission = Admission(total=6, per_peer=2)
    with contextlib.ExitStack() as stack:
        admitted = sum(stack.enter_context(admission.of(peer)) for peer in peers)
        assert admission.held() == admitted <= 6
    assert not admission._taken
