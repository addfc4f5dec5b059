"""G10: a stranger floods the directory and the routing tables, while newcomers look for the members.

Thousands of forged node ids and a hundred thousand records: of made-up peers in the run's directory, and of anything
under random keys. Meanwhile one newcomer after another starts a node of its own, knows the bootstrap's address alone,
and reads the directory once. Counted: how many of the members each of them is shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.directory import Directory
from peer.swarm.net.node_start import start_node
from peer.system.death_signal import children_die_with_us, die_with_parent
from tests.network.chaos.observe import family
from tests.network.harness import TestSwarm

IDS, RECORDS = 5_000, 100_000
MEMBERS = 4
READERS = 30  # at least, whatever the flood takes
OPEN_WITHIN_S, ANSWER_WITHIN_S = 300.0, 600.0
Counts = dict[str, Any]


class Child:
    """A module of the campaigns as a child that reads lines and answers each with one of JSON."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        with (folder / f"{module}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"tests.network.chaos.{module}", str(os.getpid()), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.busy = False

    def ask(self, line: str) -> None:
        """One line; `answer` is not None once it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.busy = True

    def answer(self) -> dict[str, Any] | None:
        """What it has said, if it has."""
        assert self.process.poll() is None, f"{self.process.args!r} has ended"
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.busy = False
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Crowd:
    """The campaign over one swarm."""

    def __init__(self, swarm: TestSwarm, folder: Path, seed: int) -> None:
        self._swarm = swarm
        bootstrap = swarm.bootstraps[0]
        self._flooder = Child(folder, "floods", bootstrap.address, bootstrap.run_id, str(seed))
        self._reader = Child(folder, "crowds", bootstrap.address, bootstrap.run_id)
        self._ids = {member.peer_id for member in swarm.members}
        self._processes = [process for pid in self._pids() for process in family(pid)]
        self._before = [process.rss_bytes for process in self._processes]
        self._rounds = len(swarm.members[0].committed)
        self.offered = {"forged ids": 0, "records": 0}
        self.held = {"forged ids": 0, "records": 0}
        self.shown = self.wanted = self.readers = 0
        self.growth_mb = 0.0

    def _pids(self) -> list[int]:
        pids = [self._swarm.bootstraps[0].process.pid, *(member.agent.pid for member in self._swarm.members)]
        return [pid for pid in pids if pid is not None]

    def flood(self, what: str, kind: str) -> None:
        """One flood, with newcomers until it is over."""
        self._flooder.ask(what)
        answers: list[dict[str, Any]] = []
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while not answers:
            assert time.monotonic() < deadline, what
            self._turn()
            answers += filter(None, [self._flooder.answer()])
        self.offered[kind] += answers[0]["offered"]
        self.held[kind] += answers[0]["held"]

    def read_more(self, readers: int) -> None:
        """Until so many newcomers have looked."""
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while self.readers < readers or self._reader.busy:
            assert time.monotonic() < deadline
            self._turn(self.readers < readers)

    def _turn(self, more: bool = True) -> None:
        end = time.monotonic() + 0.2
        self._swarm.drive(lambda: time.monotonic() > end)
        pairs = zip(self._processes, self._before, strict=True)
        self.growth_mb = max(self.growth_mb, *((p.rss_bytes - before) / 1e6 for p, before in pairs))
        if self._reader.busy:
            found = self._reader.answer()
            if found is not None:
                self.readers += 1
                self.wanted += len(self._ids)
                self.shown += len(self._ids & found["shown"].keys())
        elif more:
            self._reader.ask("read")

    def counts(self) -> Counts:
        """So far."""
        return {
            "forged_ids": self.offered["forged ids"],
            "forged_ids_held": self.held["forged ids"],
            "records_offered": self.offered["records"],
            "records_held": self.held["records"],
            "readers": self.readers,
            "members_looked_for": self.wanted,
            "members_shown": self.shown,
            "rounds_meanwhile": len(self._swarm.members[0].committed) - self._rounds,
            "largest_growth_mb": round(self.growth_mb, 1),
        }

    def close(self) -> None:
        for child in (self._flooder, self._reader):
            child.close()


def run(
    seed: int, folder: Path, *, ids: int = IDS, records: int = RECORDS, readers: int = READERS, members: int = MEMBERS,
    minutes: float = 60.0, tell: Callable[[Counts], None] = lambda _: None,
) -> Counts:
    """So many forged ids and records, as far as the minutes allow; -> counts."""
    swarm = TestSwarm(folder / "swarm", steps=20, wait=2.0)
    deadline = time.monotonic() + 60 * minutes
    try:
        swarm.bootstrap()
        swarm.add(*(f"peer{number}" for number in range(members)))
        swarm.drive(lambda: all(len(member.committed) >= 2 for member in swarm.members), OPEN_WITHIN_S)
        crowd = Crowd(swarm, folder, seed)
        try:
            for what, kind in floods(ids, records):
                if time.monotonic() < deadline:
                    crowd.flood(what, kind)
                    tell(crowd.counts())
            crowd.read_more(readers)
            return crowd.counts()
        finally:
            crowd.close()
    finally:
        swarm.close()


def floods(ids: int, records: int) -> Sequence[tuple[str, str]]:
    """What the flooder is asked, in order, and what it counts as: records in turn of both kinds."""
    each = max(1, min(5_000, records // 4))
    kinds = ("small records", "random keys")
    return [(f"forged ids: {ids}", "forged ids"),
            *((f"{kinds[place % 2]}: {each}", "records") for place in range(-(-records // each)))]  # fmt: skip


async def _shown(address: str, run_id: str) -> dict[str, Any]:
    """What one newcomer finds in the directory at its first look: the record of each peer, by id."""
    with tempfile.TemporaryDirectory() as folder:
        config = NodeConfig(
            identity_path=Path(folder) / "identity.key", host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=(address,)
        )
        node = await start_node(config)
        try:
            directory = Directory(node, run_id)
            await directory.refresh()
            return {peer_id: record.model_dump() for peer_id, record in directory.peers.items()}
        finally:
            await node.close()


def main() -> None:
    """Process entry: a newcomer for each line of standard input."""
    die_with_parent(int(sys.argv[1]))
    children_die_with_us()
    for _ in sys.stdin:
        print(json.dumps({"shown": asyncio.run(_shown(sys.argv[2], sys.argv[3]))}), flush=True)


if __name__ == "__main__":
    main()
