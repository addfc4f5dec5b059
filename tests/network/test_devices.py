"""Peers with several devices: as processes on the CPU, in real swarms."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peer.telemetry.metrics import read_metrics
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import LAUNCH, LOOPBACK, TEXT, JoinedPeer, descendants, environment

pytestmark = pytest.mark.timeout(600)  # longer than they last by far: imports of many processes on few cores


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., JoinedPeer]]:
    """Starts peers of the test; all end with it."""
    peers: list[JoinedPeer] = []

    def run(address: str, name: str, *flags: str) -> JoinedPeer:
        peers.append(JoinedPeer(tmp_path / name, address, "--torch-threads", "1", *flags))
        return peers[-1]

    yield run
    for peer in peers:
        peer.close()


def bootstrap(folder: Path, total: int, recipe: str = DILOCO) -> BootstrapProcess:
    text = MANIFEST.format(hidden=16, recipe=recipe, steps=5, wait=2.0, total=f", total: {total}")
    return BootstrapProcess(folder, text)


def ranks_of(peer: JoinedPeer) -> list[int]:
    """Process ids of the further devices."""
    below = descendants(peer.process.pid)
    return [pid for pid in below if b"peer.run.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def newest_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoints/*/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def losses(peer: JoinedPeer) -> list[float]:
    return [float(event["loss"]) for event in peer.events("step")]


def fall(values: list[float]) -> float:
    """From the first to the last."""
    return values[0] - values[-1] if values else 0.0


def report_of(peer: JoinedPeer) -> dict[str, Any]:
    assert peer.process.wait(250) == 0, peer.log_text()
    report: dict[str, Any] = json.loads((peer.folder / "report.json").read_text())
    return report


@pytest.mark.long
def test_two_ranks_train_as_one_peer(tmp_path: Path, start: Callable[..., JoinedPeer]) -> None:
    node = bootstrap(tmp_path / "run", total=3)
    flags = {"one": (), "copies": ("--devices", "cpu:2"), "parts": ("--devices", "cpu:2", "--sharding", "fsdp")}
    peers = {
        name: start(node.address, name, "--data-seed", "5", "--report", str(tmp_path / name / "report.json"), *own)
        for name, own in flags.items()
    }
    reports = {name: report_of(peer) for name, peer in peers.items()}
    assert len({report["state_digest"] for report in reports.values()}) == 1
    found = {name: losses(peer) for name, peer in peers.items()}
    for name in ("copies", "parts"):
        assert found[name][:5] == pytest.approx(found["one"][:5], abs=1e-5)
        assert reports[name]["rounds_committed"] >= 1
    kept = {name: newest_checkpoint(peer.folder) for name, peer in peers.items()}
    for file in ("inner", "optimizer", "outer"):
        names = [{key: value.shape for key, value in load_file(one / f"{file}.safetensors").items()}
                 for one in kept.values()]  # fmt: skip
        assert names[0] == names[1] == names[2]
    exported = [load_file(tmp_path / name / "export" / "model.safetensors") for name in flags]
    for values in exported[1:]:
        assert values.keys() == exported[0].keys()
        assert all(torch.equal(values[key], exported[0][key]) for key in values)
    node.close()


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [((), "fsdp"), (("--devices", "cpu:4", "--sharding", "fsdp"), "ddp")])
def test_a_peer_resumes_with_another_number_of_devices(
    tmp_path: Path, start: Callable[..., JoinedPeer], before: tuple[str, ...], after: str
) -> None:
    node = bootstrap(tmp_path / "run", total=100000)
    peer = start(node.address, "alice", "--save-steps", "5", *before)
    peer.wait_for(lambda: peer.step > 12)
    peer.signal(signal.SIGINT)
    assert peer.process.wait(60) == 0, peer.log_text()
    stopped = peer.step
    again = start(node.address, "alice", "--resume-from-checkpoint", "--devices", "cpu:2", "--sharding", after)
    again.wait_for(lambda: again.step > stopped + 3)
    steps = {int(event["step"]): float(event["loss"]) for event in again.events("step")}
    assert sorted(steps) == list(range(1, len(steps) + 1))  # none is left out
    node.close()


def test_a_rank_that_dies_ends_its_peer_with_its_name(tmp_path: Path, start: Callable[..., JoinedPeer]) -> None:
    node = bootstrap(tmp_path / "run", total=100000)
    peer = start(node.address, "pair", "--devices", "cpu:2")
    peer.wait_for(lambda: peer.step > 3)
    (rank,) = ranks_of(peer)
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    assert peer.process.wait(20) == 2
    assert time.monotonic() - began < 10
    assert "rank 1 on cpu was killed by SIGKILL" in (peer.folder / "console.log").read_text()
    node.close()


@pytest.mark.long
def test_a_swarm_of_peers_with_two_ranks_loses_a_rank_and_a_peer_and_gains_one(
    tmp_path: Path, start: Callable[..., JoinedPeer]
) -> None:
    """Whatever happens, all states of a round are one."""
    node = bootstrap(tmp_path / "run", total=100000)
    copies = start(node.address, "copies", "--devices", "cpu:2")
    parts = start(node.address, "parts", "--devices", "cpu:2", "--sharding", "fsdp")
    single = start(node.address, "single")
    for peer in (copies, parts, single):
        peer.wait_for(lambda peer=peer: len(peer.committed) >= 3, 200.0)
    (rank,) = ranks_of(parts)
    os.kill(rank, signal.SIGKILL)
    assert parts.process.wait(30) == 2
    assert "rank 1 on cpu was killed by SIGKILL" in (parts.folder / "console.log").read_text()
    for peer in (copies, single):
        goes_on(peer)
    late = start(node.address, "late", "--devices", "cpu:2", "--sharding", "fsdp")
    late.wait_for(lambda: len(late.committed) >= 15, 200.0)  # past its probation: others may follow it
    single.process.kill()
    for peer in (copies, late):
        goes_on(peer)
    for peer in (copies, late):
        peer.signal(signal.SIGINT)
        assert peer.process.wait(60) == 0, peer.log_text()
    states = [{event["round"]: event["state_digest"] for event in peer.committed}
              for peer in (copies, parts, single, late)]  # fmt: skip
    for other in states[1:]:
        shared = states[0].keys() & other.keys()
        assert len(shared) >= 3
        assert all(states[0][round] == other[round] for round in shared)
    node.close()


def goes_on(peer: JoinedPeer) -> None:
    """Two more rounds are committed."""
    before = len(peer.committed)
    peer.wait_for(lambda: len(peer.committed) >= before + 2)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "sharding"), [
    ("name: streaming-diloco, schedule: {num_fragments: 2}", "ddp"), ("name: noloco", "ddp"), ("name: ddp", "ddp"),
    ("name: ddp", "fsdp"), ("name: demo", "fsdp"), ("name: dropcompute, straggler: {tau_s: 1.0}", "fsdp"),
])  # fmt: skip
def test_recipes_on_two_devices(
    tmp_path: Path, start: Callable[..., JoinedPeer], recipe: str, sharding: str
) -> None:
    every_step = any(name in recipe for name in ("ddp", "demo", "dropcompute"))
    text = MANIFEST.format(hidden=16, recipe=recipe, steps=1 if every_step else 6, wait=2.0, total="")
    if "noloco" in recipe:
        text = text.replace("identity_work: 0", "identity_work: 0, mode: private")
    node = BootstrapProcess(tmp_path / "run", text.replace("hidden_layers: 1", "hidden_layers: 2"))
    pair = start(node.address, "pair", "--devices", "cpu:2", "--sharding", sharding)
    single = start(node.address, "single")
    for peer in (pair, single):
        peer.wait_for(lambda peer=peer: len(peer.committed) >= 6, 200.0)
        peer.wait_for(lambda peer=peer: fall(losses(peer)) > 0.1, 200.0)  # some warm up, one step a round
    for peer in (pair, single):
        peer.signal(signal.SIGINT)
        assert peer.process.wait(60) == 0, peer.log_text()
    if "noloco" not in recipe:  # in a gossip run each has a state of its own
        first, second = ({event["round"]: event["state_digest"] for event in peer.committed} for peer in (pair, single))
        assert len(first.keys() & second.keys()) >= 3
        assert all(first[round] == second[round] for round in first.keys() & second.keys())
    node.close()


@pytest.mark.long
def test_a_rank_of_torchrun_that_waits_for_rank_0_ends_on_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(store.getsockname()[1])}  # fmt: skip
        address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKmmM9Y5H6oezr6EDRhBYuxX24zB2Ryv6XrVcmTra4uad"
        command = [*LAUNCH, sys.executable, "-m", "peer.cli", "join", address]
        rank = subprocess.Popen(command, env=environment(variables))
        try:
            connection, _ = store.accept()
            with connection:
                rank.send_signal(signal.SIGTERM)
                assert rank.wait(20) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            rank.kill()
            rank.wait()


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_the_ranks_of_one_peer(tmp_path: Path, nodes: int) -> None:
    """On two nodes the second has no memory of the first: its part travels through the process group."""
    node = bootstrap(tmp_path / "run", total=100000)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 80)
    join = ["-m", "peer.cli", "join", node.address, "--output-dir", str(tmp_path / "peer"), "--json",
            "--host-maddrs", LOOPBACK, "--train-files", str(text), "--logging-steps", "1", "--torch-threads", "1",
            "--sharding", "fsdp", "--max-rounds", "2", "--eval-sequences", "2"]  # fmt: skip
    partner = JoinedPeer(tmp_path / "partner", node.address, "--torch-threads", "1")
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node",
               str(2 // nodes), "--master-addr", "127.0.0.1", "--master-port", str(port)]  # fmt: skip
    processes = []
    for rank in range(nodes):
        with (tmp_path / f"node{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(
                [*LAUNCH, *command, "--node-rank", str(rank), *join], env=environment({"GLOO_SOCKET_IFNAME": "lo"}),
                stdout=log, stderr=log,
            ))  # fmt: skip
    try:
        codes = [process.wait(200) for process in processes]
        assert codes == [0] * nodes, "\n".join(
            (tmp_path / f"node{rank}.log").read_text()[-3000:] for rank in range(nodes)
        )
    finally:
        partner.close()
        for process in processes:
            process.kill()
        node.close()
    events = read_metrics(tmp_path / "peer" / "metrics.jsonl")
    committed = [event for event in events if event["event"] == "round" and event["status"] == "committed"]
    assert len(committed) >= 2
    assert fall([event["loss"] for event in events if event["event"] == "validation"]) > 0.01
    assert load_file(tmp_path / "peer" / "export" / "model.safetensors")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
