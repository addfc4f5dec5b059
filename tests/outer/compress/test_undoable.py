"""Commit, revert and restore of a small counter, against a list of what counted."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from peer.outer.compress.undoable import Undoable

ADDS = st.tuples(st.just("add"), st.integers(1, 9))
ENDS = st.tuples(st.sampled_from(["commit", "revert", "restore", "_cancel"]), st.just(0))


class Counter(Undoable[tuple[int, int], int]):
    """Its transaction holds (value before, value after) of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0
        self.closed: list[int] = []

    def add(self, amount: int) -> None:
        self._open((self.value, self.value + amount))
        self.value += amount

    def _close(self, opened: Sequence[tuple[int, int]]) -> None:
        self.closed += [after for _, after in opened]

    def _undo(self, opened: Sequence[tuple[int, int]]) -> Sequence[int]:
        self.value = opened[0][0]
        return [after for _, after in opened]

    def _redo(self, undone: Sequence[int]) -> None:
        self.value = undone[-1]


@given(st.lists(st.one_of(ADDS, ENDS)))
def test_it_counts_what_was_applied_and_nothing_else(events: list[tuple[str, int]]) -> None:
    counter = Counter()
    applied, opened, undone = list[int](), list[int](), list[int]()
    for what, amount in events:
        if what == "add":
            counter.add(amount)
            opened, undone = [*opened, amount], []
        else:
            getattr(counter, what)()
        if what == "commit":
            applied, opened, undone = applied + opened, [], []
        elif what == "revert" and opened:
            opened, undone = [], opened
        elif what == "_cancel":
            opened, undone = [], []
        elif what == "restore" and undone:
            applied, undone = applied + undone, []
        assert counter.value == sum(applied) + sum(opened)


def test_what_was_put_off_is_done_once_and_only_for_what_was_applied() -> None:
    counter = Counter()
    counter.add(1)
    counter.add(2)
    counter.revert()
    counter.commit()
    assert (counter.value, counter.closed) == (0, [])
    counter.add(4)
    counter.add(5)
    counter.commit()
    counter.commit()
    assert (counter.value, counter.closed) == (9, [4, 9])
