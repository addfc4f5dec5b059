"""Copies between a device and RAM that take time, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Transfer(Protocol):
    """A copy that is under way."""

    def done(self) -> bool: ...
    def result(self) -> None:
        """Wait for it."""


class BackgroundCopies(Protocol):
    """Copies of parameters between a device and RAM while the device computes; `start`: of the first element."""

    def begin_read(self, out: Tensor, start: int) -> Transfer:
        """Copy the local parameters of this moment to `out`, fp32 [n] in RAM."""

    def begin_carry(self, before: Tensor, after: Tensor, start: int) -> Transfer:
        """Bring both to the device, fp32 [n] in RAM, which stay as they are meanwhile."""

    def carry(self) -> None:
        """local <- after + (local - before), with what was brought."""


class Done:
    """Nothing to wait for."""

    def done(self) -> bool:
        return True

    def result(self) -> None:
        """At once."""


class Pending:
    """What is to be done when a transfer has ended; at most one at a time."""

    def __init__(self) -> None:
        self._waiting: tuple[Transfer, Callable[[], None]] | None = None

    def start(self, transfer: Transfer, then: Callable[[], None]) -> None:
        """Do it when the transfer has ended: at once if it has."""
        assert self._waiting is None
        self._waiting = transfer, then
        self.proceed()

    def proceed(self, *, wait: bool = False) -> None:
        """Do it if the transfer has ended, or wait until it has."""
        if self._waiting is None or not (wait or self._waiting[0].done()):
            return
        (transfer, then), self._waiting = self._waiting, None
        transfer.result()
        then()

    def cancel(self) -> bool:
        """Let the transfer end, and do nothing; whether there was one."""
        if self._waiting is None:
            return False
        self._waiting[0].result()
        self._waiting = None
        return True
