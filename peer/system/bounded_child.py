"""Work on a stranger's numbers, in a child with limits of time and memory: where they are too large, only it ends."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from peer.errors import UserError
from peer.system.exit_signals import ending_signals

CPU_S = 60
WALL_S = 180.0
MEMORY_BYTES = 2 * 2**30  # on top of what this process has mapped
MAX_RESULT_BYTES = 64 * 1024


def run_bounded(
    work: Callable[[], Any], what: str, hint: str, *, cpu_s: int = CPU_S, wall_s: float = WALL_S,
    memory_bytes: int = MEMORY_BYTES,
) -> Any:  # fmt: skip
    """What `work` returns, computed in a fork of this process.

    Args:
        work: returns a JSON value of at most MAX_RESULT_BYTES; what it raises as UserError is raised here.
        what, hint: what it makes and what to do if that needs too much, for messages.
        cpu_s, wall_s, memory_bytes: how much it may use.

    Raises:
        UserError: that of `work`, or that it needs more than it may use.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, writing, cpu_s, memory_bytes)
    os.close(writing)
    try:
        content = _read_until(reading, time.monotonic() + wall_s)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        answer = json.loads(content)
    except ValueError:
        raise UserError(
            f"{what} needs more than {cpu_s} s of CPU, {wall_s:g} s, or {memory_bytes / 2**30:g} GiB to be made",
            hint,
        ) from None
    if "what" in answer:
        raise UserError(answer["what"], answer["hint"])
    return answer["result"]


def _work_and_exit(work: Callable[[], Any], writing: int, cpu_s: int, memory_bytes: int) -> None:
    """In the child: nothing of the parent's is flushed, closed or waited for."""
    code = 1
    try:
        for number in ending_signals():
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        limit = _mapped_bytes() + memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        try:
            answer = {"result": work()}
        except UserError as error:
            answer = {"what": error.what, "hint": error.hint}
        os.write(writing, json.dumps(answer).encode()[:MAX_RESULT_BYTES])
        code = 0
    finally:
        os._exit(code)


def _read_until(descriptor: int, deadline: float) -> bytes:
    """The bytes received before the other end closes or the deadline passes."""
    content = b""
    while (left := deadline - time.monotonic()) > 0 and len(content) <= MAX_RESULT_BYTES:
        if not select.select([descriptor], [], [], left)[0]:
            break
        piece = os.read(descriptor, MAX_RESULT_BYTES)
        if not piece:
            break
        content += piece
    return content


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
