"""The process of one peer of `benchmarks.exchange`: does what its parent says, one line of JSON each way.

Needs the standard library alone, so that a peer may run in an environment that has no Atoll.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from benchmarks.processes import cpu_seconds

DAEMON = "p2pd"


@dataclass(frozen=True, kw_only=True)
class MemberSetup:
    """What a peer is told at its start.

    Attributes:
        folder: shared by the peers of one run, empty at first.
        first: what `BenchMember.address` of the first peer was; empty for itself.
        timeout_s: cap of one round.
        host: multiaddress to listen on.
    """

    codec: str
    numel: int
    peers: int
    index: int
    seed: int
    folder: str
    timeout_s: float
    first: str = ""
    host: str = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True, kw_only=True)
class TimedAveraging:
    """One averaging as one member saw it.

    Attributes:
        began, ended: `time.monotonic()`, which all processes of a machine share.
        cpu: as `processor_seconds` gives it, shortly before `began`; None: as it was when the peer was asked. Counting
            takes milliseconds, in which the others may have begun.
        phases: seconds by phase, where there are any.
    """

    began: float
    ended: float
    cpu: tuple[float, float] | None = None
    phases: dict[str, float] = field(default_factory=dict)


class BenchMember(Protocol):
    """One peer of one system."""

    address: str

    def prepare(self) -> Any:
        """Write a fresh contribution; returns what the other members need."""

    def meet(self, gathered: Sequence[Any]) -> None:
        """Take what all peers returned from `prepare`, in their order."""

    def average(self) -> TimedAveraging:
        """Once all have met."""

    def check(self) -> float:
        """Tidy up after an averaging; returns `relative_error` of what came out."""

    def close(self) -> None:
        """Leave."""


def processor_seconds() -> tuple[float, float]:
    """Processor time of this peer's session so far: all its processes, and of these the libp2p daemon."""
    leader = os.getsid(0)
    return cpu_seconds(leader), cpu_seconds(leader, DAEMON)


def parse_setup() -> tuple[MemberSetup, TextIO]:
    """The command line, and where to answer; from now on whatever prints to standard output goes to the log."""
    parser = argparse.ArgumentParser(description="started by `python -m benchmarks.exchange`")
    parser.add_argument("setup", help="JSON")
    setup = MemberSetup(**json.loads(parser.parse_args().setup))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return setup, answers


def serve(member: BenchMember, answers: TextIO) -> None:
    """Answer until the parent closes its end."""
    work: dict[str, Callable[[Any], Any]] = {
        "prepare": lambda _: member.prepare(),
        "meet": member.meet,
        "average": lambda _: vars(member.average()),
        "check": lambda _: member.check(),
    }
    respond(member.address, work, answers)
    member.close()


def respond(address: str, work: Mapping[str, Callable[[Any], Any]], answers: TextIO) -> None:
    """Say where this peer is, then do what the parent asks for by name, until it closes its end."""
    print(json.dumps(address), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(work[request["do"]](request["given"])), file=answers)
