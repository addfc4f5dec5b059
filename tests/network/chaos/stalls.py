"""Members that stall: what they cost the others, as rounds a minute with and without them.

An identity that was in rounds before stalls in one way after the other; then identities that were in no round come one
after the other, and each takes a seat and falls silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peer.link.supervisor import AgentProcess
from tests.network.chaos import stalling
from tests.network.chaos.observe import Digests
from tests.network.chaos.stalling import HOW, LATE, stall
from tests.network.chaos.swarm import ChaosSwarm, Seat
from tests.network.forked import ForkedAgent

HONEST = ("alpha", "bravo", "charlie")
FIRST_ROUNDS = 2  # of the attacker: what comes after them counts
FIRST_WITHIN_S = 20.0
WITHIN_S = 120.0
PATIENCE_S = 10.0  # of a fresh identity that gets no seat
LONGER = {"turns": 3}  # times: after its first turns, each of the others' answers lasts for minutes
KNOWN_ROUNDS = 11  # more than probation: it is trusted as much as the others


class StalledSwarm(ChaosSwarm):
    """A swarm of honest members, and others, with any other name, that can be told to stall."""

    def _agent(self, folder: Path) -> AgentProcess:
        if folder.name in HONEST:
            return super()._agent(folder)
        return ForkedAgent(folder / "agent.log", time.monotonic, stalling.main, (str(folder),))


class Campaign:
    """The campaign over one swarm.

    Args:
        swarm: whose honest members have begun.
        seconds: that each rate is measured, but for those in LONGER.
    """

    def __init__(self, swarm: StalledSwarm, seconds: float) -> None:
        self._swarm, self._seconds = swarm, seconds
        self.honest = [seat for seat in swarm.seats if seat.name in HONEST]
        self.digests, self.alone, self.identities = Digests(), 0.0, 0
        self.rates: dict[str, float] = {}

    def counts(self) -> dict[str, Any]:
        """So far; `share` is the worst of all ways, in percent of the rate without an attacker."""
        ways = {how: rate for how, rate in self.rates.items() if how != "fresh"}
        share = {"known": min(ways.values(), default=0.0), "fresh": self.rates.get("fresh", 0.0)}
        return {
            "rounds_a_minute_alone": round(60 * self.alone, 1),
            **{f"rounds_a_minute_{how}": round(60 * rate, 1) for how, rate in self.rates.items()},
            **{f"share_{who}": round(100 * rate / self.alone, 1) for who, rate in share.items() if rate},
            "fresh_identities": self.identities,
            "digests_compared": self.digests.compared,
            "digest_mismatches": len(self.digests.mismatches),
        }

    def undisturbed(self) -> None:
        """The rate without an attacker."""
        self.alone = self._rate(self._seconds)

    def known(self, how: str) -> None:
        """An identity that was in rounds stalls from now on."""
        (seat,) = self._swarm.open(f"mallory-{how}")
        self._swarm.run_until(lambda: len(self._together(seat)) >= KNOWN_ROUNDS, WITHIN_S)
        stall(seat.member.folder, how, self.honest[0].member.peer_id)
        self._swarm.run_until(self._rounds_of(seat, how), WITHIN_S)
        self.rates[how] = self._rate(LONGER.get(how, 1) * self._seconds)
        self._swarm.retire(seat)
        self._swarm.run_until(self._gone_on(2), WITHIN_S)

    def fresh(self) -> None:
        """Identities that were in no round come, stall and go."""
        live: list[Seat] = []

        def next_one() -> None:
            if live and not _stalled(live[0]) and time.monotonic() < live[0].since + PATIENCE_S:
                return
            for seat in live:
                self._swarm.retire(seat)
            self.identities += 1
            live[:] = self._swarm.open(f"fresh-{self.identities}")
            stall(live[0].member.folder, "contribution")

        self.rates["fresh"] = self._rate(self._seconds, next_one)
        for seat in live:
            self._swarm.retire(seat)

    def _together(self, seat: Seat) -> Sequence[Any]:
        return [record for record in self.honest[0].member.committed if seat.member.peer_id in record.members]

    def _rounds_of(self, seat: Seat, how: str) -> Callable[[], bool]:
        """Whether the attacker has had its first rounds."""
        marks, until = [len(each.member.records) for each in self.honest], time.monotonic() + FIRST_WITHIN_S

        def done() -> bool:
            return time.monotonic() >= until or any(
                sum(
                    seat.member.peer_id in record.members and (record.status == "aborted" or how in LATE)
                    for record in each.member.records[mark:]
                ) >= (2 * FIRST_ROUNDS if how == "late-at-times" else FIRST_ROUNDS)
                for each, mark in zip(self.honest, marks, strict=True)
            )  # fmt: skip

        return done

    def _gone_on(self, rounds: int) -> Callable[[], bool]:
        marks = [len(seat.member.committed) for seat in self.honest]
        return lambda: all(
            len(seat.member.committed) >= mark + rounds for seat, mark in zip(self.honest, marks, strict=True)
        )

    def _rate(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        began, before = time.monotonic(), max(seat.member.round for seat in self.honest)
        while time.monotonic() < began + seconds:
            meanwhile()
            self._swarm.tick()
            for seat in self.honest:
                self.digests.add(seat.name, seat.member.records)
        return (max(seat.member.round for seat in self.honest) - before) / (time.monotonic() - began)


def _stalled(seat: Seat) -> bool:
    return any(record.status == "aborted" and record.members for record in seat.member.records)


def run(
    folder: Path, *, seconds: float, hows: Sequence[str] = HOW, fresh: bool = True,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each way of stalling for so many seconds; -> counts."""
    swarm = StalledSwarm(folder)
    try:
        swarm.open(*HONEST)
        swarm.run_until(lambda: swarm.settled() and all(seat.member.committed for seat in swarm.seats), WITHIN_S)
        campaign = Campaign(swarm, seconds)
        campaign.undisturbed()
        for how in hows:
            campaign.known(how)
            tell(campaign.counts())
        if fresh:
            campaign.fresh()
        campaign.digests.compare_states(campaign.honest)
        return campaign.counts()
    finally:
        swarm.close()
