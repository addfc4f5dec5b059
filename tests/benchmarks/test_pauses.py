"""What `benchmarks.pauses` makes of the events of a peer."""

from __future__ import annotations

import pytest

from benchmarks.pauses import figures, waits


def test_a_checkpoint_costs_what_its_steps_took_longer_than_the_others():
    time_s, steps = 0.0, []
    for step in range(1, 21):
        time_s += 0.75 if step == 10 else 0.25
        steps.append({
            "step": step, "round": step // 4, "time": time_s, "data_wait_s": 0.0,
            "handover_wait_s": 0.125 * (step // 4), "longest_handover_s": 0.125,
        })  # fmt: skip
    found = waits(steps, save_steps=10)
    assert found == {
        "seconds": 4.5, "hand_over_s": 0.5, "longest_hand_over_s": 0.125, "step_s": 0.25, "checkpoints": 1.5,
        "checkpoints_s": 0.5, "longest_checkpoint_s": 0.5, "data_s": 0.0,
    }  # fmt: skip
    shares = {figure.name: figure for figure in figures({"peer": found})}
    assert shares["peer: checkpoints, of the time"].value == pytest.approx(100 / 9)
    assert not shares["peer: checkpoints, of the time"].met
