"""paba over real agents: one member ten times slower, and one whose line sends 5 Mbit/s."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peer.protocol.line_limits import LineLimits
from tests.network.harness import TestSwarm
from tests.network.members import TOKENS_PER_STEP, Member

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
WARM, ROUNDS = 4, 10


def committed_tokens(member: Member) -> int:
    """Trained and in the anchor."""
    assert member.sync is not None
    return member.sync.tokens - member.sync._ledger.unsent(member.sync.tokens)


def weights_of(member: Member, after: int) -> list[int]:
    return [record.weights[record.members.index(member.peer_id)] for record in member.committed if record.round > after]


def counted(swarm: TestSwarm, members: list[Member]) -> list[float]:
    """Of what each member trains in ROUNDS rounds, the share that counts in their rosters."""
    def told(round: int) -> bool:
        """All are there, and have heard of all that they have merged."""
        return all(round <= member.round == max(each.round for each in member.committed) for member in members)

    swarm.drive(lambda: all(member.committed for member in members))
    swarm.drive(lambda: told(WARM), 120.0)
    before = [(member.round, committed_tokens(member)) for member in members]
    swarm.drive(lambda: told(WARM + ROUNDS), 200.0)
    return [
        sum(weights_of(member, round)) / (committed_tokens(member) - tokens)
        for member, (round, tokens) in zip(members, before, strict=True)
    ]


def test_a_peer_ten_times_slower_costs_the_others_nothing_and_its_work_counts(
    make_swarm: Callable[..., TestSwarm]
) -> None:
    swarm = make_swarm(steps=20, min_group=3, recipe="name: paba, aggregator: mean")
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    fast, _, slow = members
    slow.pace = 10
    assert min(counted(swarm, members)) > 0.95
    assert {len(record.members) for record in fast.committed if record.round > WARM} == {3}
    rates = [sum(weights_of(member, WARM)) / len(weights_of(member, WARM)) for member in (fast, slow)]
    assert rates[1] / rates[0] == pytest.approx(0.1, rel=0.35)
    assert rates[0] >= 20 * TOKENS_PER_STEP
    waits = sorted(record.seconds["match"] for record in fast.committed if record.round > WARM)
    assert waits[len(waits) // 2] < 1.0  # of the window of 5 s, which an even split waits out every time


def test_a_line_of_5_mbit_reduces_nothing_and_all_work_counts(make_swarm: Callable[..., TestSwarm]) -> None:
    swarm = make_swarm(steps=60, hidden=128, min_group=3, recipe="name: paba, aggregator: mean")
    swarm.limits = {"c": LineLimits(up_mbit=5.0)}
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    fast, _, slow = members
    assert min(counted(swarm, members)) > 0.95
    payload = 4 * fast.sync.memory.anchor.numel()
    sent = [sorted(record.bytes_sent for record in member.committed if record.round > WARM) for member in (fast, slow)]
    typical = [each[len(each) // 2] / payload for each in sent]
    assert typical[1] == pytest.approx(1.0, abs=0.1)  # P (1 + (R - 2) s), of s = 0
    assert typical[0] == pytest.approx(1.5, abs=0.1)  # of s = 1/2
    assert slow.sync._allotted < fast.sync._allotted
