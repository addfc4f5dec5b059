"""Peers with several devices: as processes on the CPU, in real swarms."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import JoinedPeer, descendants

pytestmark = pytest.mark.timeout(300)


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


def losses(peer: JoinedPeer) -> list[float]:
    return [float(event["loss"]) for event in peer.events("step")]


def report_of(peer: JoinedPeer) -> dict[str, Any]:
    assert peer.process.wait(100) == 0, peer.log_text()
    report: dict[str, Any] = json.loads((peer.folder / "report.json").read_text())
    return report


@pytest.mark.long
def test_two_ranks_train_as_one_peer(tmp_path: Path, start: Callable[..., JoinedPeer]) -> None:
    node = bootstrap(tmp_path / "run", total=3)
    peers = {
        name: start(node.address, name, "--data-seed", "5", "--report", str(tmp_path / name / "report.json"), *flags)
        for name, flags in (("one", ()), ("two", ("--devices", "cpu:2")))
    }
    reports = {name: report_of(peer) for name, peer in peers.items()}
    assert reports["one"]["state_digest"] == reports["two"]["state_digest"]
    found = {name: losses(peer) for name, peer in peers.items()}
    assert found["two"][:5] == pytest.approx(found["one"][:5], abs=1e-5)
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
