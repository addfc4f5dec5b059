"""Rounds that any peer calls for, over real agents: when its gradient changes, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.network.harness import TestSwarm
from tests.network.members import Member

MakeSwarm = Callable[..., TestSwarm]
SMOOTHING = 3
LONG_S = 60.0  # the straggler's window: whoever came only at its end would be too late for this test


def test_everybody_comes_to_a_round_that_one_peer_calls_for(make_swarm: MakeSwarm) -> None:
    recipe = f"name: selsync, schedule: {{delta: 0.5, smoothing: {SMOOTHING}}}"
    swarm = make_swarm(wait=LONG_S, recipe=recipe)
    swarm.manifest_text = swarm.manifest_text.replace(", steps_per_round: 5", "")
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    swarm.drive_together(members, lambda: all(m.committed and m.at_rest and steps(m) > 10 for m in members))
    swarm.drive_together(members, trained(members, 40))  # a call of the warm-up may still be answered
    before = members[0].round
    assert 1 <= before <= len(members) * SMOOTHING  # of the warm-up; several steps may pass while a round is made

    swarm.drive(trained(members, 40))
    assert {member.round for member in members} == {before}  # the norms are what they were: nobody calls

    # one that the last round left out: the group of the others, if there is one, re-forms for it
    calls = next((member for member in members if member.committed[-1].round < before), members[1])
    calls.grad_norm = 10.0  # 1 -> 5.5 in the average; then 7.75, which is less than half more
    digests = swarm.drive_together(members, lambda: calls.committed[-1].round > before, LONG_S / 3)
    assert len(digests) == 1
    record = calls.committed[-1]
    assert (record.round, len(record.members)) == (before + 1, 3)
    assert record.seconds["total"] < LONG_S / 6
    assert all(weight > 1 for weight in record.weights)  # of whoever was called, too: all that it had trained

    (late,) = swarm.add("late")
    goal = steps(late) + 20
    swarm.drive(lambda: steps(late) >= goal)
    assert late.round == before + 1  # no warm-up on its account
    late.grad_norm = 10.0
    together = [*members, late]
    swarm.drive_together(together, lambda: len(late.committed[-1].members if late.committed else ()) == 4, LONG_S / 3)


@pytest.mark.long
def test_called_rounds_go_on_without_a_killed_peer_and_with_a_newcomer(make_swarm: MakeSwarm) -> None:
    recipe = f"name: selsync, schedule: {{delta: 0.5, smoothing: {SMOOTHING}}}"
    swarm = make_swarm(wait=3.0, recipe=recipe)
    swarm.manifest_text = swarm.manifest_text.replace(", steps_per_round: 5", "")
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    swarm.drive_together(members, lambda: all(m.committed and m.at_rest and steps(m) > 10 for m in members))
    members.pop().kill()
    before, calls = members[0].round, members[0]
    for _ in range(5):
        calls.grad_norm *= 10.0  # more than half of the average, however often
        at = calls.round
        digests = swarm.drive_together(members, lambda at=at: calls.round > at)
        assert len(digests) == 1
    assert {len(record.members) for record in calls.committed if record.round > before} == {2}
    (late,) = swarm.add("late")
    members.append(late)
    goal = steps(late) + 20
    swarm.drive(lambda: steps(late) >= goal)
    late.grad_norm = 10.0
    digests = swarm.drive_together(members, lambda: bool(late.committed) and len(late.committed[-1].members) == 3)
    assert len(digests) == 1


def trained(members: Sequence[Member], more: int) -> Callable[[], bool]:
    """Whether each has made so many more steps."""
    goals = {member.name: steps(member) + more for member in members}
    return lambda: all(steps(member) >= goals[member.name] for member in members)


def steps(member: Member) -> int:
    assert member.sync is not None
    return int(member.sync.step)
