"""A node of hivemind's own program, which knows nothing of Atoll, as the address at which runs are found and joined."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from peer.run.runs import look
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.chaos.namespaces import Namespace
from tests.network.processes import LAUNCH, JoinedPeer, environment, run, until

HOST = "10.77.0.1"  # libp2p names no loopback address to others, and all that is known here is known through others
LISTEN = f"/ip4/{HOST}/tcp/0"
RUN_DHT = "hivemind.hivemind_cli.run_dht"
TEXT = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=2.0, total="")


class PlainNode:
    """`hivemind-dht`, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "plain.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*LAUNCH, sys.executable, "-m", RUN_DHT, "--host_maddrs", LISTEN], env=environment(), stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        until(lambda: self._found is not None, 60.0, self.log.read_text)
        assert self._found is not None
        self.address = self._found[0]

    @property
    def _found(self) -> re.Match[str] | None:
        return re.search(rf"/ip4/{re.escape(HOST)}/tcp/\d+/p2p/\w+", self.log.read_text())

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its DHT is a process of its own, which outlives it
        self.process.wait()


@pytest.fixture
def on_a_machine_of_its_own() -> Iterator[None]:
    machine = Namespace("rendezvous")
    machine.run("address", "add", f"{HOST}/8", "dev", "lo")
    with machine.entered():
        yield


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_a_machine_of_its_own")
def test_runs_are_found_and_joined_at_a_plain_node(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plain = stack.enter_context(closing(PlainNode(tmp_path)))
        for name in ("small", "large"):  # of two organisers
            text = TEXT.replace("name: test", f"name: {name}")
            stack.enter_context(closing(BootstrapProcess(tmp_path / name, text, [plain.address], host=HOST)))

        def rows() -> dict[str, int]:
            return {row["run"]: row["peers"] for row in asyncio.run(look(plain.address, tmp_path))}

        until(lambda: rows() == {"small": 0, "large": 0}, 30.0, rows)
        flags = ("--run", "small", "--host-maddrs", LISTEN)
        peers = [
            stack.enter_context(closing(JoinedPeer(tmp_path / name, plain.address, *flags))) for name in ("one", "two")
        ]
        for peer in peers:
            peer.wait_for(lambda peer=peer: any(len(event["members"]) == 2 for event in peer.committed))
        code, said = run("peer.cli", ["runs", plain.address, "--json"])
        found = {row["run"]: row["peers"] for row in map(json.loads, said.splitlines())}
        assert (code, found) == (0, {"small": 2, "large": 0}), said
        undecided = stack.enter_context(closing(JoinedPeer(tmp_path / "any", plain.address)))
        assert undecided.process.wait(100) == 2
        assert "the swarm holds 2 runs; say which one" in (tmp_path / "any" / "console.log").read_text()
