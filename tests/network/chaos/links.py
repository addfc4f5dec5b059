"""G6: bad links.

Four members, each behind a link of 5 Mbit/s with a round trip of 200 +- 50 ms that loses 0 to 10% of all packets, or
that carries nothing in one direction for a while. Counted: rounds that committed and that were aborted, and whether
each ended by its deadline; how many seats the members, all of them honest, had in those rounds, unless a link carries
nothing; how long after it a member whose link was bad is back in a round of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer.outer.record import RoundRecord
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.relay import Link
from tests.network.chaos.wide import WideSwarm

BAD = Link(mbit=5.0, delay_ms=100.0, jitter_ms=25.0, queue_ms=200.0)
CONDITIONS = ("loss 0", "loss 1", "loss 2", "loss 5", "loss 10", "mute", "deaf")
NAMES = ("p0", "p1", "p2", "p3")
ROUNDS = 10
ROUND_TIMEOUT_S = 20
# a persistent group's patience (9), then two silent leaders (6), a follower's patience (14.25), one's own (5.25)
MATCH_S = 34.5
SLACK_S = 2.0  # to notice, on busy cores
PHASE_TIMEOUT_S = 300.0
BACK_S = 1200.0  # a member whose link cost the others rounds is refused for minutes
HIDDEN, STEPS, TURNS_PER_STEP = 64, 5, 20
Row = dict[str, Any]


def run(
    folder: Path, *, conditions: Sequence[str] = CONDITIONS, rounds: int = ROUNDS, timeout_s: int = ROUND_TIMEOUT_S,
    seed: int = 0, minutes: float = float("inf"), tell: Callable[[Row], None] = lambda _: None,
) -> Row:
    """Let the swarm make rounds under each condition, while there is time; -> `count` of all.

    Args:
        rounds: that each member has to end under each condition, committed or not.
        tell: called with the counts so far.
    """
    rows: list[Row] = []
    until = time.monotonic() + 60 * minutes
    with Internet() as internet:
        internet.host("bootstrap")
        for name in NAMES:
            internet.behind(name, Link())
        swarm = WideSwarm(folder, internet, hidden=HIDDEN, steps=STEPS, wait=5.0, timeout_s=timeout_s)
        try:
            swarm.bootstrap()
            for member in swarm.add(*NAMES):
                member.pace = TURNS_PER_STEP
            for condition in conditions:
                if time.monotonic() < until:
                    rows.append(trial(swarm, internet, condition, rounds, timeout_s, seed))
                    tell(count(rows))
        finally:
            swarm.close()
    return count(rows)


def trial(
    swarm: WideSwarm, internet: Internet, condition: str, rounds: int, timeout_s: int, seed: int
) -> Row:
    """One condition; raises AssertionError when a member ends no rounds, or does not come back."""
    members = swarm.members
    together(swarm)
    since = {member.name: len(member.records) for member in members}
    began = time.monotonic()
    one_way = condition in ("mute", "deaf")
    kind, _, percent = condition.partition(" ")
    for number, name in enumerate(NAMES):
        link = replace(BAD, seed=seed + number, loss=float(percent or 0) / 100)
        internet.relays[name].set(replace(link, **{kind: True}) if one_way and not number else link)
    others = members[1:] if one_way else members

    def ended() -> bool:
        return all(len(attempts(member.records[since[member.name] :])) >= rounds for member in others)

    swarm.drive(ended, PHASE_TIMEOUT_S + rounds * (timeout_s + MATCH_S))
    seconds = time.monotonic() - began
    made = {} if one_way else seats(record for member in members for record in member.records[since[member.name] :])
    for name in NAMES:
        internet.relays[name].set(Link())
    back_s = together(swarm)  # those whose link was dead, too
    records = [record for member in members for record in attempts(member.records[since[member.name] :])]
    worst = max(((record.seconds.get("total", 0.0)) for record in records), default=0.0)
    return {
        "condition": condition, "seconds": round(seconds, 1), "ended": len(records),
        "committed": sum(record.status == "committed" for record in records),
        "aborted": sum(record.status == "aborted" for record in records),
        "late": sum(late(record, timeout_s) for record in records),
        "late_ones": [f"{r.phase or r.status} {r.seconds} {r.reason}" for r in records if late(r, timeout_s)],
        "places": len(members) * len(made), "seats": sum(made.values()),
        "longest_s": round(worst, 1),
        "back_s": round(back_s, 1),
        "one_state": len(swarm.drive_together(members, timeout_s=PHASE_TIMEOUT_S)) == 1,
    }  # fmt: skip


def together(swarm: WideSwarm) -> float:
    """Seconds until a round of all has been committed by all, from now on."""
    members, began = swarm.members, time.monotonic()
    at = {member.name: len(member.records) for member in members}
    swarm.drive(
        lambda: all(any(len(r.members) == len(members) for r in m.records[at[m.name] :] if r.status == "committed")
                    for m in members),
        BACK_S,
    )  # fmt: skip
    return time.monotonic() - began


def seats(records: Iterable[RoundRecord]) -> dict[str, int]:
    """Of each round that was committed, how many members it had."""
    return {record.lineage_id: len(record.members) for record in records if record.status == "committed"}


def attempts(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Rounds that were tried, however they ended."""
    return [record for record in records if record.status in ("committed", "aborted")]


def late(record: RoundRecord, timeout_s: int) -> bool:
    """Whether a round went on beyond its deadline: that of finding a group, or that of exchange and votes."""
    matching = record.seconds.get("match", 0.0)
    if record.phase == "match":
        return record.seconds.get("total", 0.0) > MATCH_S + SLACK_S
    return matching > MATCH_S + SLACK_S or record.seconds.get("total", 0.0) - matching > timeout_s + SLACK_S


def count(rows: Sequence[Row]) -> Row:
    """What the conditions come to."""
    totals = {name: sum(row[name] for row in rows) for name in ("ended", "committed", "aborted", "late", "one_state")}
    shares = {name: {row["condition"]: row[name] for row in rows if row["places"]} for name in ("seats", "places")}
    longest = {name: max((row[name] for row in rows), default=0.0) for name in ("longest_s", "back_s")}
    late_ones = [f"{row['condition']}: {one}" for row in rows for one in row["late_ones"]]
    return {"conditions": len(rows), **totals, **shares, **longest, "late_ones": late_ones}
