"""The clock that a suspended machine does not stop, and the one that it does."""

from __future__ import annotations

import time

from peer.swarm.net.node import Node
from peer.system import clock as clock_module
from peer.system.clock import awake_clock, boot_clock


def test_what_was_slept_counts(monkeypatch):
    slept_s = 3600.0
    counting = {time.CLOCK_MONOTONIC: 100.0, clock_module._BOOT: 100.0 + slept_s}
    monkeypatch.setattr(time, "clock_gettime", counting.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: counting[time.CLOCK_MONOTONIC])
    assert boot_clock() == 3700.0
    assert awake_clock() == 100.0


def test_it_goes_on():
    first = boot_clock()
    assert boot_clock() >= first > 0.0


def test_the_deadlines_of_a_peer_are_told_by_it():
    assert Node.clock is boot_clock
