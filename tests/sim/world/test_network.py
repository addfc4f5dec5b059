from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.sim.world.network import (
    agreement_seconds,
    connection_unit_s,
    effective_rate,
    gather_seconds,
    gather_traffic,
    pair_seconds,
    reduce_seconds,
    reduce_traffic,
    ring_allreduce_bytes,
    send_seconds,
    slow_start_seconds,
)
from peer.sim.world.scenario import PeerProfile, load_scenario

IDEAL = PeerProfile()


def link(up=math.inf, down=math.inf, latency_s=0.0, loss=0.0):
    return PeerProfile(up_bytes_s=up, down_bytes_s=down, latency_s=latency_s, loss=loss)


def test_a_rate_is_the_least_of_uplink_and_downlink():
    assert effective_rate(link(up=100.0), link(down=300.0)) == 100.0
    assert effective_rate(link(up=500.0), link(down=300.0)) == 300.0
    assert effective_rate(IDEAL, IDEAL) == math.inf


def test_the_bound_of_loss_and_round_trip_time():
    # RTT = 2 (0.02 + 0.03) = 0.1 s; p = 1 - 0.99^2 = 0.0199; 1460 B / 0.1 s * sqrt(1.5) / sqrt(0.0199) = 126757 B/s.
    first, second = link(latency_s=0.02, loss=0.01), link(latency_s=0.03, loss=0.01)
    assert effective_rate(first, second) == pytest.approx(126_757.4, rel=1e-5)
    assert effective_rate(first, second, streams=4) == pytest.approx(4 * 126_757.4, rel=1e-5)
    assert connection_unit_s(first, second) == pytest.approx(1 / 126_757.4, rel=1e-5)
    assert effective_rate(link(up=1000.0, latency_s=0.02, loss=0.01), second) == 1000.0


def test_neither_loss_nor_latency_alone_bounds_a_rate():
    assert effective_rate(link(loss=0.1), link(loss=0.1)) == math.inf
    assert effective_rate(link(latency_s=1.0), link(latency_s=1.0)) == math.inf


def test_a_transfer_takes_its_bytes_and_one_way():
    assert send_seconds(link(up=100.0, latency_s=0.25), link(latency_s=0.5), 1000) == 10.75
    assert send_seconds(IDEAL, IDEAL, 1e12) == 0.0


def test_a_pair_sends_both_ways_at_once():
    first, second = link(up=100.0, down=50.0, latency_s=0.5), link(up=10.0, down=200.0, latency_s=0.5)
    assert pair_seconds(first, second, 1000, 200) == 21.0       # 200 bytes at 10 B/s, and 1 s
    assert pair_seconds(first, second, 4000, 200) == 41.0       # 4000 bytes at 100 B/s
    assert pair_seconds(first, second, 1000, 200) == gather_seconds([first, second], [1000, 200])


def test_a_reduce_of_equals():
    # Each of 4 sends 3/4 of 8000 bytes at 100 B/s in 60 s, then 3/4 of 4000 in 30 s; one way takes 1 s.
    members = [link(up=100.0, down=1000.0, latency_s=0.5)] * 4
    assert reduce_seconds(members, 8000, 4000) == pytest.approx(60 + 30 + 2)


def test_a_reduce_waits_for_the_slowest_in_each_phase():
    # Shares 1/2, 1/4, 1/4 of 800 bytes. Scatter: the first receives 2 x 400 at 10 B/s: 80 s; the others send 600 at 50.
    # Return: the first sends 2 x 400 at 100 B/s: 8 s, the others receive 600 at 30: 20 s, the first 400 at 10: 40 s.
    members = [link(up=100.0, down=10.0), link(up=50.0, down=30.0), link(up=50.0, down=30.0)]
    assert reduce_seconds(members, 800, 800, [0.5, 0.25, 0.25]) == pytest.approx(80 + 40)


def test_the_longest_one_way_is_paid_once_in_each_phase():
    members = [link(latency_s=seconds) for seconds in (0.1, 0.5, 0.25)]
    assert reduce_seconds(members, 0, 0) == 2 * 0.75
    assert gather_seconds(members, [0] * 3) == 0.75
    assert agreement_seconds(members) == 2 * 0.75


@given(
    num_bytes=st.floats(1.0, 1e9), rate=st.floats(1e3, 1e9), round_trip_s=st.floats(0.001, 1.0),
)
def test_a_connection_that_starts_slowly_doubles_its_window_each_round_trip(num_bytes, rate, round_trip_s):
    """Against windows that are counted one by one, each sent evenly over its round trip."""
    sent, window, seconds = 0.0, 14_600.0, 0.0
    while window < rate * round_trip_s and sent + window < num_bytes:
        sent, window, seconds = sent + window, 2.0 * window, seconds + round_trip_s
    seconds += (num_bytes - sent) / min(rate, window / round_trip_s)
    lost_s = slow_start_seconds(num_bytes, num_bytes / rate, round_trip_s)
    assert num_bytes / rate + lost_s == pytest.approx(seconds, abs=0.6 * round_trip_s)  # the formula doubles smoothly


def test_what_a_slow_start_costs():
    # 2 MB/s over 0.4 s hold 800 kB: 5.78 round trips until the window is as large, in which 785.4 kB are sent.
    assert slow_start_seconds(4e6, 2.0, 0.4) == pytest.approx(0.4 * math.log2(800 / 14.6) - 785_400 / 2e6)
    assert slow_start_seconds(43_800, 43_800 / 2e6, 0.4) == pytest.approx(2 * 0.4 - 0.0219)  # 14.6 and 29.2 kB
    assert slow_start_seconds(43_800, 0.0, 0.4) == pytest.approx(2 * 0.4)
    assert slow_start_seconds(4e6, 4e6 / 36_500, 0.4) == 0.0  # the first window holds what is under way
    assert slow_start_seconds(4e6, 2.0, 0.0) == slow_start_seconds(0.0, 0.0, 0.4) == 0.0
    members = [link(up=6e6, down=6e6, latency_s=0.1)] * 4  # three connections of 2 MB/s each
    assert reduce_seconds(members, 16e6, 16e6) == pytest.approx(4.0 + 0.4 + slow_start_seconds(4e6, 2.0, 0.4))
    assert gather_seconds(members, [4e6] * 4) == pytest.approx(2.0 + 0.2 + slow_start_seconds(4e6, 2.0, 0.4))
    assert send_seconds(members[0], members[1], 12e6) == pytest.approx(2.2 + slow_start_seconds(12e6, 2.0, 0.4))


def test_without_limits_nothing_takes_time():
    assert reduce_seconds([IDEAL] * 8, 1e12, 1e12) == 0.0
    assert gather_seconds([IDEAL] * 8, [1e12] * 8) == 0.0
    assert reduce_seconds([IDEAL] * 8, 0, 0) == 0.0


def test_one_member_alone_takes_no_time_and_sends_nothing():
    alone = [link(up=1.0, down=1.0, latency_s=9.0, loss=0.5)]
    assert reduce_seconds(alone, 1000, 1000) == gather_seconds(alone, [1000]) == 0.0
    assert reduce_traffic(1, 1000, 1000).tolist() == gather_traffic([1000]).tolist() == [0.0]


def test_a_gather_uploads_to_all_and_downloads_the_others():
    # Payloads of 100, 200, 300: the last uploads 2 x 300 at 60 B/s: 10 s; the first downloads 500 at 20 B/s: 25 s.
    members = [link(up=100.0, down=20.0), link(up=100.0, down=100.0), link(up=60.0, down=100.0)]
    assert gather_seconds(members, [100, 200, 300]) == 25.0
    assert gather_seconds([link(up=60.0)] * 3, [100, 200, 300]) == 10.0


def test_a_lossy_connection_bounds_each_phase_by_what_it_carries():
    # One unit of the lossy pair as above: 126757 B/s; with the others only one end loses packets.
    bad = [link(latency_s=0.025, loss=0.01)] * 2
    rate = 126_757.4
    seconds = max(2e6 / rate, 9e6 / effective_rate(IDEAL, bad[0]))
    assert gather_seconds([*bad, IDEAL], [1e6, 2e6, 9e6]) == pytest.approx(
        seconds + 0.05 + slow_start_seconds(9e6, seconds, 0.1), rel=1e-5)
    # Shares .7, .2, .1: the second sends the first its part of .7; the first returns .7 of the update.
    assert reduce_seconds([*bad, IDEAL], 1e6, 5e5, [0.7, 0.2, 0.1]) == pytest.approx(
        0.7e6 / rate + 0.35e6 / rate + 0.1, rel=1e-5)


def test_a_connection_is_slow_towards_the_owner_of_a_part_in_both_phases():
    # Only the third loses packets. It owns nothing: it sends parts in the scatter and gets results in the return.
    lossy = link(latency_s=0.05, loss=0.01)
    members = [IDEAL, IDEAL, lossy]
    unit_s = connection_unit_s(lossy, IDEAL)
    start_s = slow_start_seconds(1e6, 1e6 * unit_s, 0.1)  # the same for each size, as windows are soon full
    assert reduce_seconds(members, 1e6, 1e5, [0.75, 0.25, 0.0]) == pytest.approx(0.75 * 1.1e6 * unit_s + 0.1 + start_s)
    # It owns everything: each of the others sends it the whole payload and gets the whole update.
    assert reduce_seconds(members, 1e6, 1e5, [0.0, 0.0, 1.0]) == pytest.approx(1.1e6 * unit_s + 0.1 + start_s)


def test_traffic_of_a_reduce():
    assert reduce_traffic(4, 8000, 4000).tolist() == [6000 + 3000] * 4
    assert reduce_traffic(3, 800, 400, [0.5, 0.25, 0.25]).tolist() == [400 + 400, 600 + 200, 600 + 200]
    assert reduce_traffic(2, 800, 400, [1.0, 0.0]).tolist() == [400, 800]


def test_traffic_of_a_gather():
    assert gather_traffic([100, 200, 300]).tolist() == [200, 400, 600]
    assert gather_traffic([]).tolist() == []


@given(st.integers(1, 40), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_reduce_of_equal_shares_sends_r_minus_one_over_r_of_both(members, payload, update):
    expected = (members - 1) / members * (payload + update)
    assert reduce_traffic(members, payload, update) == pytest.approx(np.full(members, expected), abs=1e-3)


def test_a_ring_sends_twice_r_minus_one_over_r():
    assert ring_allreduce_bytes(1000, 4) == 6000.0
    assert ring_allreduce_bytes(1000, 1) == 0.0
    assert ring_allreduce_bytes(1000, 8, bytes_per_value=2) == 3500.0
    assert ring_allreduce_bytes(1000, 4) == reduce_traffic(4, 4000, 4000)[0]


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.5, 0.4, 0.3], [-0.5, 1.0, 0.5], [math.nan] * 3])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, match="for 3 members"):
        reduce_seconds([IDEAL] * 3, 1, 1, shares)
    with pytest.raises(ValueError, match="for 3 members"):
        reduce_traffic(3, 1, 1, shares)


def test_a_payload_is_needed_from_each():
    with pytest.raises(ValueError, match="2 payloads for 3 members"):
        gather_seconds([IDEAL] * 3, [1, 2])


def test_a_thousand_members_are_fast():
    members = load_scenario("home").draw(1000)
    start = time.process_time()
    seconds = reduce_seconds(members, 1e9, 1e9) + gather_seconds(members, [1e6] * 1000)
    assert time.process_time() - start < 2.0
    assert 500 < seconds < 2000
