"""When a joining peer's agent hears where the run is."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

PEER_ID = "12D3KooWMw9BnDMb8EYv9yC78d4XT4oen658LtM4HE7t3NnyVqeM"
# `atoll join`, which says what its agent is told, and ends where the heavy imports begin
PEER = """\
import os, sys
import peer.link.supervisor as supervisor
from peer import cli

class Agent(supervisor.AgentProcess):
    def start(self):
        super().start()
        print("starts", flush=True)

    def send(self, message):
        super().send(message)
        print("looks at", *message.initial_peers, flush=True)

class Heavy:
    def find_spec(self, name, *rest):
        if name == "peer.run.lifecycle":
            print("imports", "torch" in sys.modules, flush=True)
            os._exit(0)

supervisor.AgentProcess = Agent
sys.meta_path.insert(0, Heavy())
cli.main(["join", *sys.argv[1:]])
"""


@pytest.mark.parametrize(("from_now", "told"), [(None, True), (-1, True), (3, False)])
def test_an_agent_looks_for_the_run_while_its_peer_imports_but_only_in_active_hours(tmp_path, from_now, told):
    with socket.create_server(("127.0.0.1", 0)) as bootstrap:
        address = f"/ip4/127.0.0.1/tcp/{bootstrap.getsockname()[1]}/p2p/{PEER_ID}"
        options = ["--train-files", __file__, "--output-dir", str(tmp_path / "out")]
        if from_now is not None:
            begin = time.localtime().tm_hour + from_now
            options += ["--active-hours", f"{begin % 24}-{(begin + 3) % 24}"]
        command = [sys.executable, "-c", PEER, address, *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.splitlines() == ["starts", *([f"looks at {address}"] if told else []), "imports False"]
