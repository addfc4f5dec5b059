"""The clock that a suspended machine does not stop."""

from __future__ import annotations

import inspect
import time

from peer.swarm.round import exchange
from peer.swarm.runtime import clock as clock_module
from peer.swarm.runtime.clock import boot_clock as now


def test_what_was_slept_counts(monkeypatch):
    slept_s = 3600.0
    counting = {time.CLOCK_MONOTONIC: 100.0, clock_module._CLOCK: 100.0 + slept_s}
    monkeypatch.setattr(time, "clock_gettime", counting.__getitem__)
    assert now() == 3700.0


def test_it_goes_on():
    first = now()
    assert now() >= first > 0.0


def test_the_deadlines_of_rounds_are_told_by_it():
    assert inspect.signature(exchange.Exchange).parameters["clock"].default is now
