"""A loop whose clock stands still while there is anything to do, and jumps to the next timer when there is not."""

from __future__ import annotations

import asyncio
import contextvars
import selectors

MACHINE = contextvars.ContextVar("machine", default=None)
"""Whose a callback is: one that sleeps runs none until it wakes."""


def now():
    """Seconds, by the clock of the loop that runs."""
    return asyncio.get_running_loop().time()


class Sleeper:
    """A machine that may sleep, as when its lid is closed; its clock goes on."""

    def __init__(self):
        self.asleep, self._held = False, []

    def hold(self, handle):
        self._held.append(handle)

    def wake(self):
        """All that was due is done at once."""
        self.asleep, held = False, self._held
        self._held = []
        asyncio.get_running_loop()._ready.extend(held)


class _Sleeping(asyncio.Handle):
    __slots__ = ()

    def _run(self):
        machine = self._context.get(MACHINE)
        if machine is None or not machine.asleep:
            super()._run()
        elif not self._cancelled:
            machine.hold(self)


class _SleepingTimer(_Sleeping, asyncio.TimerHandle):
    __slots__ = ()


def _asleep(handle):
    machine = handle._context.get(MACHINE) if handle is not None else None
    return machine is not None and machine.asleep


class _Jumping(selectors.DefaultSelector):
    """Waits for sockets no longer than it takes to look at them."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        ready = [(key, mask) for key, mask in super().select(0) if not any(map(_asleep, key.data))]
        if not ready and timeout != 0:
            assert timeout is not None, "everybody waits, and no timer runs"
            self.now += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Everything takes exactly as long as its timers say; what threads would do is done in place."""

    def __init__(self):
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now

    def _call_soon(self, *call):
        handle = super()._call_soon(*call)
        handle.__class__ = _Sleeping
        return handle

    def call_at(self, *call, **context):
        handle = super().call_at(*call, **context)
        handle.__class__ = _SleepingTimer
        return handle

    def run_in_executor(self, _, function, *arguments):
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def pytest_asyncio_loop_factories(config, item):  # noqa: ARG001
    """For the `conftest.py` of tests that wait in virtual time, where no busy machine makes a peer late."""
    return {"virtual": VirtualTimeLoop}
