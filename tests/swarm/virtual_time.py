"""A loop whose clock stands still while there is anything to do, and jumps to the next timer when there is not."""

from __future__ import annotations

import asyncio
import selectors


class _Jumping(selectors.DefaultSelector):
    """Waits for sockets no longer than it takes to look at them."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
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

    def run_in_executor(self, _, function, *arguments):
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future
