"""Work on a stranger's numbers, in a child with limits of time and memory: where they are too large, only it ends."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from peer.errors import UserError
from peer.printable import printable
from peer.system.exit_signals import ending_signals

CPU_S = 60
WALL_S = 180.0
MEMORY_BYTES = 2 * 2**30  # on top of what this process has mapped
MAX_RESULT_BYTES = 64 * 1024
MAX_REASON_CHARS = 300


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
        UserError: that of `work`; the limit that it reached; or the exception, signal or exit code that ended it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, writing, cpu_s, memory_bytes)
    os.close(writing)
    content = None
    try:
        content = _read_until(reading, time.monotonic() + wall_s)
    finally:
        os.close(reading)
        if content is None:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if content is None:
        raise UserError(f"{what} needs more than {wall_s:g} s to be made", hint)
    try:
        answer = json.loads(content)
    except ValueError:
        limits = f"{cpu_s} s of CPU and {memory_bytes / 2**30:g} GiB of memory"
        raise UserError(_ending(what, code, cpu_s, limits), hint) from None
    if "what" in answer:
        raise UserError(answer["what"], answer["hint"])
    if "raised" in answer:
        raise UserError(f"{what} cannot be made: {answer['raised']}", hint)
    if "memory" in answer:
        raise UserError(f"{what} needs more than {memory_bytes / 2**30:g} GiB of memory to be made", hint)
    return answer["result"]


def _ending(what: str, code: int, cpu_s: int, limits: str) -> str:
    """What is known about a child that ended without an answer; a negative code is a signal."""
    if code == -signal.SIGXCPU:
        return f"{what} needs more than {cpu_s} s of CPU to be made"
    ended = f"a signal, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{what} cannot be made: its process, which had {limits}, ended with {ended}"


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
        except MemoryError:
            answer = {"memory": True}
        except Exception as error:
            answer = {"raised": printable(f"{type(error).__name__}: {error}", MAX_REASON_CHARS)}
        os.write(writing, json.dumps(answer).encode()[:MAX_RESULT_BYTES])
        code = 0
    finally:
        os._exit(code)


def _read_until(descriptor: int, deadline: float) -> bytes | None:
    """The bytes received until the other end closes; None if the deadline passes first."""
    content = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(descriptor, MAX_RESULT_BYTES)
        if not piece:
            return content
        content += piece  # the other end writes MAX_RESULT_BYTES at most
    return None


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
