"""Due rounds and global progress."""

from __future__ import annotations

import pytest

from peer.errors import UserError
from peer.outer.schedule import EverySteps


def test_a_round_is_due_after_exactly_the_steps() -> None:
    schedule = EverySteps(steps_per_round=30)
    assert [schedule.due(steps) for steps in (0, 29, 30, 31)] == [False, False, True, True]


def test_progress_counts_no_more_than_a_round_of_steps() -> None:
    schedule = EverySteps(steps_per_round=30)
    assert [schedule.global_step(0, 0), schedule.global_step(2, 7), schedule.global_step(2, 45)] == [0.0, 67.0, 90.0]
    assert schedule.global_step(3, 0) == schedule.global_step(2, 30)


def test_zero_steps_are_refused() -> None:
    with pytest.raises(UserError, match="steps_per_round=0: must be at least 1"):
        EverySteps(steps_per_round=0)
