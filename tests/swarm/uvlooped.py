"""What runs on uvloop, as agents do: in a child, since no agent can be forked any more where libuv has been in use."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

TIMEOUT_S = 20.0


def run_case(loop: asyncio.AbstractEventLoop, case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it to its end on this loop, and close the loop."""
    try:
        loop.run_until_complete(asyncio.wait_for(case(), TIMEOUT_S))
    finally:
        loop.close()


def run_on_uvloop(case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it to its end in a child; fails where that fails (see `tests.network.forked`)."""
    child = os.fork()
    if child == 0:
        try:
            run_case(uvloop.new_event_loop(), case)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
