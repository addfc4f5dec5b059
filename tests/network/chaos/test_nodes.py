"""Two machines of one owner as one peer: `torchrun` over two network namespaces that a cable connects."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peer.telemetry.metrics import read_metrics
from tests.network.chaos.namespaces import Namespace
from tests.network.processes import LAUNCH, LOOPBACK, TEXT, JoinedPeer, environment
from tests.network.test_devices import bootstrap

ROUNDS = 3


def cabled() -> list[Namespace]:
    """Two machines, 10.77.0.1 and 10.77.0.2."""
    nodes = [Namespace("node0"), Namespace("node1")]
    nodes[0].run("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", nodes[1].path)
    for number, node in enumerate(nodes, start=1):
        node.run("addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        node.run("link", "set", "eth0", "up")
    return nodes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_machines_with_two_ranks_each_are_one_peer(tmp_path: Path) -> None:
    """Bootstrap and agent are on the first; the parts of the second travel through the process group."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 80)
    nodes = cabled()
    with ExitStack() as stack:
        with nodes[0].entered():
            run = stack.enter_context(closing(bootstrap(tmp_path / "run", total=100000)))
            partner = JoinedPeer(tmp_path / "partner", run.address, "--torch-threads", "1")
            stack.enter_context(closing(partner))
        processes = []
        for rank, node in enumerate(nodes):
            command = [
                *LAUNCH, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
                "--master-addr", "10.77.0.1", "--master-port", "29500", "--node-rank", str(rank),
                "-m", "peer.cli", "join", run.address, "--output-dir", str(tmp_path / "peer"), "--json",
                "--host-maddrs", LOOPBACK, "--train-files", str(text), "--logging-steps", "1", "--torch-threads", "1",
                "--sharding", "fsdp", "--max-rounds", str(ROUNDS), "--eval-sequences", "2",
            ]  # fmt: skip
            with (tmp_path / f"node{rank}.log").open("w") as log, node.entered():
                processes.append(subprocess.Popen(
                    command, env=environment({"GLOO_SOCKET_IFNAME": "eth0"}), stdout=log, stderr=log
                ))  # fmt: skip
                stack.callback(processes[-1].kill)
        codes = [process.wait(400) for process in processes]
    assert codes == [0, 0], "\n".join((tmp_path / f"node{rank}.log").read_text()[-3000:] for rank in (0, 1))
    events = read_metrics(tmp_path / "peer" / "metrics.jsonl")
    assert sum(event["event"] == "round" and event["status"] == "committed" for event in events) >= ROUNDS
    validations = [event["loss"] for event in events if event["event"] == "validation"]
    assert validations[-1] < validations[0] - 0.5
    assert load_file(tmp_path / "peer" / "export" / "model.safetensors")
    for node in nodes:
        node.close()
