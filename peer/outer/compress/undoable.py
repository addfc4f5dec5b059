"""What a round changes at its sender, and what becomes of that when the round is applied, abandoned, or both."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

Opened = TypeVar("Opened")
Undone = TypeVar("Undone")


class Undoable(ABC, Generic[Opened, Undone]):
    """A transaction that begins with the first encoding of a round and ends with `commit` or `revert`.

    A subclass opens it, and says how to undo and redo; both are exact, bit for bit. For many threads: a round may be
    abandoned while one still encodes for it.
    """

    def __init__(self) -> None:
        self._opened: list[Opened] = []
        self._undone: Sequence[Undone] = ()
        self._lock = threading.RLock()

    def commit(self) -> None:
        """The round was applied: `revert` can no longer undo it."""
        with self._lock:
            self._close(self._opened)
            self._opened, self._undone = [], ()

    def revert(self) -> None:
        """The round was abandoned: all is as it was before, bit for bit. Nothing happens if none is open."""
        with self._lock:
            if self._opened:
                self._undone = self._undo(self._opened)
                self._opened = []

    def restore(self) -> None:
        """The round that was abandoned last was applied by others after all: it counts again, exactly.

        Nothing happens if there was none, or another has begun since.
        """
        with self._lock:
            if self._undone:
                self._redo(self._undone)
                self._undone = ()

    def _open(self, opened: Opened) -> None:
        with self._lock:
            self._opened.append(opened)
            self._undone = ()

    def _cancel(self) -> None:
        """As `revert`, for a round that no member can have applied."""
        with self._lock:
            self.revert()
            self._undone = ()

    def _close(self, opened: Sequence[Opened]) -> None:
        """Carry out what was put off until the round is applied."""

    @abstractmethod
    def _undo(self, opened: Sequence[Opened]) -> Sequence[Undone]:
        """Take back what was opened, in this order -> what `_redo` needs."""

    @abstractmethod
    def _redo(self, undone: Sequence[Undone]) -> None:
        """Take `_undo` back."""
