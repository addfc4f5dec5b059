"""A swarm that is driven without ever waiting for one of its members, so that any of them may die at any moment."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from peer.errors import UserError
from peer.link.messages import Anchor, Fatal, Published
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.outer.record import RoundRecord
from tests.network.chaos import gated
from tests.network.chaos.observe import Process, family
from tests.network.forked import ForkedAgent
from tests.network.harness import TestSwarm
from tests.network.members import Member

# Back-off between the starts of one agent: its rule is tested elsewhere; here the next start is wanted soon.
BACKOFF_CLOCK = 20.0
TURN_S = 0.02


@dataclass
class Seat:
    """One place of the swarm: a member, however often it dies.

    Attributes:
        member: as it is now.
        begun: it has its first anchor and makes steps.
        since: when it last ended a round, got its first anchor, or was let go on; monotonic.
        halted: somebody has stopped its processes: nothing is expected of it.
        relaunches: how often its whole peer was started again.
        failed_starts: how many of those ended before the first anchor.
        refusals: what agents that could not join have said of it.
    """

    member: Member
    begun: bool = False
    since: float = field(default_factory=time.monotonic)
    halted: bool = False
    relaunches: int = 0
    failed_starts: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def live(self) -> bool:
        return self.begun and not self.halted and self.member.agent.running

    @property
    def processes(self) -> list[Process]:
        """The agent and its libp2p daemon."""
        pid = self.member.agent.pid
        return family(pid) if pid is not None and self.member.agent.running else []


class ChaosSwarm(TestSwarm):
    """`TestSwarm` whose members start, die and start again while the others go on.

    Args:
        pace_s: seconds between two steps of a member.

    Attributes:
        turn_s: how long a turn waits at most for an agent to say something.
    """

    turn_s = TURN_S

    def __init__(self, folder: Path, *, steps: int = 20, wait: float = 2.0, pace_s: float = 0.02, hidden: int = 16,
                 recipe: str | None = None) -> None:
        options = {} if recipe is None else {"recipe": recipe}
        super().__init__(folder, steps=steps, wait=wait, hidden=hidden, **options)
        self.seats: list[Seat] = []
        self._genesis: Tensor | None = None
        self._pace_s, self._next_step = pace_s, 0.0
        self._steps_made = 0

    def _agent(self, folder: Path) -> AgentProcess:
        clock = lambda: BACKOFF_CLOCK * time.monotonic()  # noqa: E731
        return ForkedAgent(folder / "agent.log", clock, gated.main, (str(folder),))

    # -- members -----------------------------------------------------------------------------------------------------

    def open(self, *names: str) -> list[Seat]:
        """Start members; they have begun when `tick` says so."""
        if not self.bootstraps:
            self._genesis = self.bootstrap().genesis()
        seats = []
        for name in names:
            member = self._launch(name, self.bootstraps[0].address, len(self.members))
            self.members.append(member)
            seats.append(Seat(member))
        self.seats += seats
        return seats

    def relaunch(self, seat: Seat) -> None:
        """The whole peer again, in the same folder: a new trainer, a new memory, a new agent."""
        before = seat.member
        before.agent.close()
        number = self.members.index(before)
        member = self._launch(before.name, self.bootstraps[0].address, number)
        member.records, member.peer_id = before.records, before.peer_id
        self.members[number] = seat.member = member
        seat.begun, seat.since, seat.halted = False, time.monotonic(), False
        seat.relaunches += 1

    def retire(self, seat: Seat) -> None:
        """This member is no more, and nothing is expected of it."""
        seat.member.agent.close()
        self.seats.remove(seat)
        self.members.remove(seat.member)

    # -- driving -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One turn: a step of everybody who is due, and whatever the agents have said."""
        now = time.monotonic()
        step = now >= self._next_step
        if step:
            self._next_step = now + self._pace_s
            self._steps_made += 1
        for seat in self.seats:
            self._serve(seat, step and self._steps_made % seat.member.pace == 0)
        with selectors.DefaultSelector() as selector:
            for seat in self.seats:
                if not seat.halted and seat.member.agent._channel is not None:
                    selector.register(seat.member.agent._channel, selectors.EVENT_READ)
            selector.select(self.turn_s)

    def _serve(self, seat: Seat, step: bool) -> None:
        if seat.halted:
            return
        if not seat.begun:
            self._bring_up(seat)
            return
        member = seat.member
        assert member.sync is not None
        heard = len(member.records)
        if step or not member.agent.running:
            member.step()  # looks after an agent that has died
        else:
            try:
                member.sync.poll()
            except AgentGoneError:
                member.step()
        if len(member.records) > heard:
            seat.since = time.monotonic()

    def _bring_up(self, seat: Seat) -> None:
        """The beginning of a member, a message at a time."""
        member = seat.member
        try:
            message = member.agent.receive()
            while message is not None:
                if isinstance(message, Published):
                    assert self._genesis is not None
                    self._map(member, message, self._genesis)
                elif isinstance(message, Anchor):
                    assert member.sync is not None
                    member.sync.begin(message)
                    seat.begun, seat.since = True, time.monotonic()
                    return
                elif isinstance(message, Fatal):
                    seat.refusals.append(message.what)
                    raise UserError(message.what, message.hint)
                message = member.agent.receive()
        except (AgentGoneError, UserError):
            if not member.agent.running or member.sync is None:
                seat.failed_starts += 1
                self.relaunch(seat)

    def run_until(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Turns until the condition holds; fails with what everybody did when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, self.explain()
            self.tick()

    def settled(self) -> bool:
        """Everybody has begun and stands at the same lineage id, with a complete state."""
        if not all(seat.live for seat in self.seats):
            return False
        heads = {seat.member.lineage_id for seat in self.seats}
        return len(heads) == 1 and None not in heads

    def where(self) -> str:
        """Who stands at which round and lineage id, and who is away."""
        here = {seat.name: f"{seat.member.round} {str(seat.member.lineage_id)[:8]}" for seat in self.seats if seat.live}
        return ", ".join(f"{seat.name}: {here.get(seat.name, 'away')}" for seat in self.seats)

    def committed(self) -> list[RoundRecord]:
        """All that members have told of rounds that they committed."""
        return [record for member in self.members for record in member.committed]

    def explain(self) -> str:
        lines = [f"{s.name}: begun {s.begun}, halted {s.halted}, pid {s.member.agent.pid}" for s in self.seats]
        ready = [member for member in self.members if member.sync is not None]
        everybody, self.members = self.members, ready
        try:
            return "\n".join([*lines, super().explain()])
        finally:
            self.members = everybody

    def close(self) -> None:
        for seat in self.seats:
            for process in seat.processes:
                process.resume()
        super().close()

