"""Unlike members over real agents: one ten times slower, one whose line sends 5 Mbit/s, one that claims too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any, cast

import pytest

from peer.link.messages import Anchor, Message
from peer.protocol.line_limits import LineLimits
from peer.protocol.manifest import parse_manifest
from peer.swarm.agent import process as agent
from peer.swarm.group.allotter import Allotter
from tests.network.forked import ForkedAgent
from tests.network.harness import TestSwarm
from tests.network.members import TOKENS_PER_STEP, Member
from tests.network.trained import LockstepMember, drive_lockstep, task_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
COUNTS = 0.9  # steps at both ends are of other rounds: some in a hundred on a busy machine; lost work was 40%
WARM, ROUNDS = 4, 10


@dataclass
class Instant(Member):
    """Makes no step while a round is exchanged that all have contributed to. Beside its steps of 10 ms an exchange
    takes as long as the machine is busy, and what is trained meanwhile counts up to twice an even split alone.
    """

    together: list[Member] = field(default_factory=list)

    def step(self) -> None:
        assert self.sync is not None
        at = min(member.round for member in self.together)
        if all(member.in_round or member.round > at for member in self.together):
            self.sync.poll()
        else:
            super().step()


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
    swarm.kind = Instant
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    fast, _, slow = members
    slow.pace = 10
    for member in cast("list[Instant]", members):
        member.together = members
    assert min(counted(swarm, members)) > COUNTS
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
    assert min(counted(swarm, members)) > COUNTS
    payload = 4 * fast.sync.memory.anchor.numel()
    sent = [sorted(record.bytes_sent for record in member.committed if record.round > WARM) for member in (fast, slow)]
    typical = [each[len(each) // 2] / payload for each in sent]
    assert typical[1] == pytest.approx(1.0, abs=0.1)  # P (1 + (R - 2) s), of s = 0
    assert typical[0] == pytest.approx(1.5, abs=0.1)  # of s = 1/2
    assert slow.sync._allotted < fast.sync._allotted


CLAIMED = 10.0  # times the truth
READ_WELL = 17.0  # Mbit/s: the middle of a half octave
UNSEEN = 2  # rounds that are divided by claims alone: the joins of the second say first what was seen
SEEN = 30  # rounds


def boast() -> None:
    """An agent whose joins say that it is ten times as fast, and its line."""
    honest = Allotter.claims

    def claims(self: Allotter, group: str | None) -> dict[str, Any]:
        said = honest(self, group)
        return {**said, "speed": round(CLAIMED * said["speed"]), "up": round(CLAIMED * said["up"])}

    Allotter.claims = claims  # type: ignore[method-assign]
    agent.main()


def with_boaster(swarm: TestSwarm, name: str) -> None:
    """The agent of this name is one; it is forked, so that no other is."""
    honest = swarm._agent
    swarm._agent = lambda folder: (  # type: ignore[method-assign]
        ForkedAgent(folder / "agent.log", main=boast) if folder.name == name else honest(folder)
    )


@dataclass
class Allotted(Member):
    """Notes how many steps each round allots to it, by the number of the round before."""

    steps: dict[int, int] = field(default_factory=dict)

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if isinstance(message, Anchor) and message.steps is not None:
            self.steps[message.round] = message.steps


def rounds_of(members: Sequence[Member]) -> list[int]:
    """The rounds that all have made."""
    return sorted(set.intersection(*({record.round for record in member.committed} for member in members)))


def typical_of(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The means of each member over the rounds that are divided by what was seen. A measured rate is
    rounded to half an octave, and on a busy machine it falls into a neighbouring step, which moves a share by .14 to .3
    in one round (.2 as a root mean square, a sixth of that in the mean of so many rounds). A claim acts in every round.
    """
    assert len(rounds) >= WARM + SEEN
    return [mean(own) for own in zip(*rounds[WARM:], strict=True)]


def shares_of(members: list[Member], payload: int) -> list[dict[int, float]]:
    """Of each member by round: the share that it reduced. A butterfly of three sends P (1 + s)."""
    return [{record.round: record.bytes_sent / payload - 1.0 for record in member.committed} for member in members]


def test_claims_of_ten_times_the_speed_and_bandwidth_move_no_share_once_it_is_measured(
    make_swarm: Callable[..., TestSwarm]
) -> None:
    swarm = make_swarm(steps=20, hidden=128, min_group=3, recipe="name: paba, aggregator: mean")
    swarm.limits = {name: LineLimits(up_mbit=READ_WELL) for name in "abc"}
    with_boaster(swarm, "c")
    swarm.kind = Allotted
    swarm.bootstrap()
    members = cast("list[Allotted]", swarm.add("a", "b", "c"))

    def divided() -> list[int]:
        """The rounds that all have made, and know their steps after."""
        return [number for number in rounds_of(members) if all(number in member.steps for member in members)]

    swarm.drive(lambda: len(divided()) >= WARM + SEEN, 200.0)
    payload = 4 * members[0].sync.memory.anchor.numel()
    shares = shares_of(members, payload)
    rounds = divided()
    assert max(shares[2][number] for number in rounds) <= 2 / 3 + 0.02  # twice the even part, at the most
    assert min(shares[0][number] + shares[1][number] for number in rounds) >= 1 / 3 - 0.02
    typical = typical_of([[own[number] for own in shares] for number in rounds])
    assert typical == pytest.approx([1 / 3] * 3, abs=0.15)  # lines are read to half octaves; one moves .14 of three
    allotted = [[member.steps[number] for member in members] for number in rounds]
    assert all(60 <= sum(steps) <= 62 for steps in allotted)  # who would have none makes one
    steps = typical_of(allotted)
    assert max(steps) <= 1.25 * min(steps)  # the tokens of a round, which all count, are the speed


def test_a_claim_of_ten_times_the_bandwidth_moves_no_ratio_once_it_is_measured(
    make_swarm: Callable[..., TestSwarm]
) -> None:
    recipe = "name: fusionllm-adatopk, aggregator: mean, allocator: {base_ratio: 0.2}"
    swarm = make_swarm(steps=1, hidden=128, min_group=3, recipe=recipe)
    manifest = parse_manifest(swarm.manifest_text.encode(), "test")
    task = task_of(manifest)
    swarm.kind, swarm.shapes = partial(LockstepMember, manifest=manifest), task.layout.shapes
    swarm.limits = {name: LineLimits(up_mbit=READ_WELL) for name in "abc"}
    with_boaster(swarm, "c")
    swarm.bootstrap()
    members = cast("list[LockstepMember]", swarm.add("a", "b", "c"))
    for index, member in enumerate(members):
        member.batches = task.batches(index)
    drive_lockstep(swarm, lambda: len(rounds_of(members)) >= WARM + SEEN, 120.0)
    sent = [{record.round: record.bytes_sent for record in member.committed} for member in members]
    parts = [[own[number] / sum(each[number] for each in sent) for own in sent] for number in rounds_of(members)]
    assert max(part[2] for part in parts[:UNSEEN]) <= 2 / 3 + 0.02
    assert min(part[at] for part in parts[:UNSEEN] for at in (0, 1)) >= 1 / 6 - 0.02
    assert typical_of(parts) == pytest.approx([1 / 3] * 3, abs=0.1)
