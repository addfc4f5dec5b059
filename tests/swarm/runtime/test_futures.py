"""Futures as inboxes: the first outcome counts, and an error that no task awaits is silent and keeps nothing alive."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from peer.swarm.runtime.futures import deliver, fail, settled


async def test_the_first_outcome_counts():
    loop = asyncio.get_running_loop()
    one, other, cancelled = loop.create_future(), loop.create_future(), loop.create_future()
    cancelled.cancel()
    deliver(one, 1)
    fail(ValueError("late"), one, other, cancelled)
    deliver(one, 2)
    deliver(other, 2)
    deliver(cancelled, 2)
    assert (one.result(), cancelled.cancelled(), await settled(3)) == (1, True, 3)
    with pytest.raises(ValueError, match="late"):
        other.result()


async def test_an_error_that_no_task_awaits_is_not_logged(caplog):
    future = asyncio.get_running_loop().create_future()
    fail(ValueError("the round is over"), future)
    del future
    gc.collect()
    assert caplog.text == ""


async def test_the_error_does_not_keep_the_frames_that_raised_it():
    class Round:
        pass

    def play():
        held = Round()
        watched.append(weakref.ref(held))
        raise ValueError(f"{held} is over")

    watched, future = [], asyncio.get_running_loop().create_future()
    gc.disable()
    try:
        try:
            play()
        except ValueError as error:
            fail(error, future)
        assert watched[0]() is None
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="is over"):
        future.result()
