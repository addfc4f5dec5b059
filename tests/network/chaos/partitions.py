"""G5: partitions that heal.

Eight members on eight machines of their own internet. Again and again it falls apart into two groups (4/4, 6/2, 5/3),
each trains on, and comes together again. Counted: whether all are on one lineage within three rounds of healing,
whether it is the heavier one, and whether the peers that yielded log exactly what they dropped.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.network.chaos.namespaces import Internet
from tests.network.chaos.wide import WideSwarm
from tests.network.members import Member

TRIALS = 50
SHARES = ((4, 4), (6, 2), (5, 3))
MAX_ROUNDS = 3
ROUNDS_APART = 2
TURNS_PER_STEP = 50  # of at least 10 ms
STEPS = 16  # so that a round takes some 10 s: finding one another again takes seconds, however short rounds are
PHASE_TIMEOUT_S = 300.0
BACK_S = 1200.0  # a member that was cut off again and again is refused for minutes
YIELDED = re.compile(r"dropped (\d+) rounds from (\d+) on, (\d+) tokens \((\d+) ours\)")
Row = dict[str, Any]


def run(
    folder: Path, *, trials: int = TRIALS, shares: Sequence[tuple[int, int]] = SHARES, seed: int = 0,
    steps: int = STEPS, rounds_apart: int = ROUNDS_APART, minutes: float = float("inf"),
    tell: Callable[[Row], None] = lambda _: None, **options: Any,
) -> Row:
    """Let it fall apart and heal, as often as there is time for; -> `count` of all trials.

    Args:
        shares: sizes of the two groups, in turn.
        steps: of a round, of at least half a second each.
        rounds_apart: that each side commits on its own, at least.
        tell: called with the counts so far.
        options: of the swarm.
    """
    rows: list[Row] = []
    names = [f"p{number}" for number in range(sum(shares[0]))]
    until = time.monotonic() + 60 * minutes
    with Internet() as internet:
        for name in ("bootstrap", *names):
            internet.host(name)
        swarm = WideSwarm(folder, internet, steps=steps, wait=4.0, **options)
        try:
            swarm.bootstrap()
            for member in swarm.add(*names):
                member.pace = TURNS_PER_STEP
            while len(rows) < trials and time.monotonic() < until:
                rng = random.Random(f"{seed} {len(rows)}")
                rows.append(trial(swarm, internet, shares[len(rows) % len(shares)], rounds_apart, rng))
                tell(count(rows))
        finally:
            swarm.close()
    return count(rows)


def trial(
    swarm: WideSwarm, internet: Internet, share: tuple[int, int], rounds_apart: int, rng: random.Random
) -> Row:
    """One partition: together, apart, together; raises AssertionError when a phase takes PHASE_TIMEOUT_S."""
    members = swarm.members
    before = max(member.round for member in members)
    swarm.drive(lambda: full_round(members, before) is not None, BACK_S)
    shuffled = rng.sample(members, len(members))
    sides = (shuffled[: share[0]], shuffled[share[0] :])
    names = [[member.name for member in side] for side in sides]
    names[rng.randrange(2)].append("bootstrap")
    internet.split(tuple(names[0]), tuple(names[1]))
    at = max(member.round for member in members)
    seen = {member.name: len(member.records) for member in members}

    def apart() -> bool:
        return all(
            any(r.round >= at + rounds_apart and set(r.members) <= _ids(side) for r in m.committed)
            for side in sides for m in side
        )  # fmt: skip

    swarm.drive(apart, BACK_S)
    lineages = [{member.committed[-1].lineage_id for member in side} for side in sides]
    healed_at, began = max(member.round for member in members), time.monotonic()
    internet.heal()
    swarm.drive_together(members, timeout_s=PHASE_TIMEOUT_S)
    rounds, seconds = max(member.round for member in members) - healed_at, time.monotonic() - began
    swarm.drive(lambda: full_round(members, healed_at) is not None, BACK_S)
    return {
        "share": list(share), "split_at": at, "healed_at": healed_at, "rounds": rounds, "seconds": round(seconds, 1),
        "back_s": round(time.monotonic() - began, 1),
        "distinct": lineages[0].isdisjoint(lineages[1]), "yielded": [m.name for m in members if yielded(m, seen)],
        "unexplained": sum(unexplained(member, seen[member.name], members) for member in members),
        "one_state": len(swarm.drive_together(members, timeout_s=PHASE_TIMEOUT_S)) == 1,
    }  # fmt: skip


def _ids(side: Sequence[Member]) -> set[str]:
    return {member.peer_id for member in side}


def full_round(members: Sequence[Member], after: int) -> int | None:
    """The first committed round after `after` in which everybody took part; None if there is none yet."""
    rounds = [r.round for r in members[0].committed if r.round > after and set(r.members) == _ids(members)]
    return min(rounds, default=None)


def yielded(member: Member, seen: dict[str, int]) -> bool:
    """Whether it changed to another lineage in this trial."""
    return any(YIELDED.search(record.reason or "") for record in member.records[seen[member.name] :])


def unexplained(member: Member, since: int, members: Sequence[Member]) -> int:
    """Tokens that it contributed to rounds that it gave up, more or less than it says.

    A round that failed here and that others committed with its contribution is in the chain once it has caught up.
    """
    ours, wrong = [], 0
    own = {record.lineage_id for record in member.records if record.status == "committed"}
    without = {
        record.lineage_id: (record.round, record.weights[record.members.index(member.peer_id)])
        for other in members for record in other.committed
        if member.peer_id in record.members and record.lineage_id not in own
    }  # fmt: skip
    for record in member.records[since:]:
        if record.status == "committed":
            weight = record.weights[record.members.index(member.peer_id)]
            ours.append((record.round, weight))
        elif record.snapshot_round is not None:
            said = YIELDED.search(record.reason or "")
            first = int(said[2]) if said else record.round
            lost = sum(weight for number, weight in ours if number >= first)
            if said:
                sums = {lost}
                for weight in (weight for number, weight in without.values() if number >= first):
                    sums |= {one + weight for one in sums}
                wrong += min(abs(one - int(said[4])) for one in sums)
            ours = [(number, weight) for number, weight in ours if number < first]
    return wrong


def count(rows: Sequence[Row]) -> Row:
    """What the trials come to."""
    return {
        "trials": len(rows),
        "within": sum(row["rounds"] <= MAX_ROUNDS for row in rows),
        "longest_rounds": max((row["rounds"] for row in rows), default=0),
        "longest_until_one_s": max((row["seconds"] for row in rows), default=0.0),
        "longest_until_all_s": max((row["back_s"] for row in rows), default=0.0),
        "split": sum(row["distinct"] for row in rows),
        "yielded": sum(bool(row["yielded"]) for row in rows),
        "unexplained_tokens": sum(row["unexplained"] for row in rows),
        "one_state": sum(row["one_state"] for row in rows),
    }
