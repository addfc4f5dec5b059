from __future__ import annotations

import asyncio
import contextlib
import gc
import select
import socket
import threading
from contextlib import aclosing

import pytest

from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.tls import client_side, server_side
from peer.swarm.runtime.tasks import cancel_and_wait, hush_foreign_noise, staggered
from tests.swarm.uvlooped import run_on_uvloop


async def test_outcomes_of_ended_tasks_are_dropped_without_a_word(caplog):
    async def fail():
        raise ValueError("nobody asks")

    async def fail_when_cancelled():
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("nobody asks")

    tasks = [asyncio.ensure_future(work) for work in (fail(), fail_when_cancelled(), asyncio.sleep(60.0))]
    await asyncio.sleep(0)
    await cancel_and_wait(iter(tasks))
    assert all(task.done() for task in tasks)
    del tasks
    gc.collect()
    assert "never retrieved" not in caplog.text


class Called:
    """Calls that end when the test says so; `begun` and `cancelled` are their names."""

    def __init__(self):
        self.begun, self.cancelled, self.ends = [], [], {}

    async def call(self, name):
        self.begun.append(name)
        self.ends[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.ends[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


async def test_the_next_is_called_when_the_first_is_silent_and_the_rest_is_cancelled():
    called = Called()
    async with aclosing(staggered(lambda: "abcd", called.call, 0.01, 0.5)) as outcomes:
        waiting = asyncio.ensure_future(anext(outcomes))
        while called.begun != ["a", "b"]:
            await asyncio.sleep(0)
        called.ends["b"].set_result(7)
        name, outcome = await waiting
        assert (name, outcome.result()) == ("b", 7)
    assert called.cancelled == ["a"]
    assert called.begun == ["a", "b"]


async def test_whoever_comes_while_the_only_one_is_silent_is_called_too():
    called, names = Called(), ["a"]
    async with aclosing(staggered(lambda: names, called.call, 0.0, 0.01)) as outcomes:
        waiting = asyncio.ensure_future(anext(outcomes))
        while called.begun != ["a"]:
            await asyncio.sleep(0)
        names.insert(0, "b")
        while called.begun != ["a", "b"]:
            await asyncio.sleep(0)
        called.ends["b"].set_result(7)
        assert (await waiting)[0] == "b"
    assert called.cancelled == ["a"]


async def test_the_next_is_called_at_once_when_the_caller_wants_another():
    called, names = Called(), []
    async with aclosing(staggered(lambda: "abc", called.call, 60.0, 0.5)) as outcomes:
        waiting = asyncio.ensure_future(anext(outcomes))
        for name in "abc":
            while name not in called.ends:
                await asyncio.sleep(0)
            called.ends[name].set_exception(ValueError(name))
            found, outcome = await waiting
            names.append((found, str(outcome.exception())))
            waiting = asyncio.ensure_future(anext(outcomes, None))
        assert await waiting is None
    assert names == [("a", "a"), ("b", "b"), ("c", "c")]
    assert called.cancelled == []


async def test_nobody_to_call_is_no_outcome():
    assert [name async for name, _ in staggered(list, Called().call, 1.0, 0.5)] == []


async def test_only_waits_for_an_event_are_destroyed_without_a_word(caplog):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(hush_foreign_noise)

    async def other(event):
        await event.wait()

    def leave(work):
        """Start what nothing refers to any more once this returns."""
        event = asyncio.Event()
        return asyncio.ensure_future(work(event))

    for work, told in ((asyncio.Event.wait, 0), (other, 1)):
        leave(work)
        await asyncio.sleep(0)
        gc.collect()
        assert caplog.text.count("Task was destroyed") == told
    loop.call_exception_handler({"message": "something else"})
    assert "something else" in caplog.text


async def a_connection_that_is_given_up_as_the_other_end_answers_says_nothing():
    loop = asyncio.get_running_loop()
    told = []
    ours, theirs = socket.socketpair()
    context, _ = server_side()
    server = threading.Thread(target=shake_hands, args=(context, theirs))
    server.start()
    connecting = asyncio.ensure_future(
        loop.create_connection(ZeroCopyProtocol, sock=ours, ssl=client_side(), server_hostname="it")
    )
    loop.set_exception_handler(lambda _, context: told.append(context))
    await asyncio.sleep(0)  # it has its socket
    await asyncio.sleep(0)  # it has said hello
    connecting.cancel()
    select.select([ours], [], [], 10.0)  # the answer is there before the loop looks for it, and then for who gave up
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.to_thread(server.join)
    (noise,) = told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "default_exception_handler", told.append)
        hush_foreign_noise(loop, noise)
        assert told == [noise]
        hush_foreign_noise(loop, noise | {"exception": RuntimeError("another")})
        assert len(told) == 2


def shake_hands(context, connection):
    with connection, contextlib.suppress(OSError):
        context.wrap_socket(connection, server_side=True).close()


def test_a_connection_that_is_given_up_as_the_other_end_answers_says_nothing():
    run_on_uvloop(a_connection_that_is_given_up_as_the_other_end_answers_says_nothing)
