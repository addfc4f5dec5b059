"""Floods of the DHT and replays of old records, against a real bootstrap and real agents."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peer.protocol.manifest import RunManifest
from peer.protocol.records import MANIFEST_KEY, seal_manifest
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.directory import Directory, write_record
from peer.swarm.net.keys import load_or_create_identity
from peer.swarm.net.manifests import ManifestSearch
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from tests.network.chaos.observe import family
from tests.network.harness import TestSwarm

pytestmark = pytest.mark.timeout(400)
MakeSwarm = Callable[..., TestSwarm]
MEMBERS = 3
MOST_MORE_BYTES = 64 << 20
GIVEN_BACK_WITHIN_S = 120.0
LEFT_BYTES = 24 << 20  # of a process that goes on working
MOST_HELD = {"runs": 32, "manifests": 32}  # what one identity may


@pytest.fixture
def flooder(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Starts the stranger; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(address: str, run_id: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.network.chaos.floods", str(os.getpid()), address, run_id, "17"]
        with (tmp_path / "flooder.log").open("ab") as log:
            started.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def config(folder: Path, name: str, address: str) -> NodeConfig:
    return NodeConfig(
        identity_path=folder / f"{name}.key", host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=(address,)
    )


def test_floods_cost_little_memory_give_it_back_and_hide_no_peer(
    make_swarm: MakeSwarm, tmp_path: Path, flooder: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    swarm = make_swarm(steps=5)
    bootstrap = swarm.bootstrap()
    members = swarm.add(*("alpha", "bravo", "charlie")[:MEMBERS])
    swarm.drive(lambda: all(len(member.committed) >= 3 for member in members), 100.0)
    pids = [bootstrap.process.pid, *(member.agent.pid for member in members)]
    processes = [family(pid)[0] for pid in pids if pid is not None]
    before = [process.rss_bytes for process in processes]
    most = list(before)
    stranger = flooder(bootstrap.address, bootstrap.run_id)
    assert stranger.stdin is not None
    assert stranger.stdout is not None
    os.set_blocking(stranger.stdout.fileno(), False)

    def measure() -> None:
        for place, process in enumerate(processes):
            most[place] = max(most[place], process.rss_bytes)

    for name in ("directory", "small records", "random keys", "runs", "manifests", "dictionaries", "forged ids",
                 "replays"):  # fmt: skip
        print(name, file=stranger.stdin, flush=True)
        said: list[str] = []

        def answered(said: list[str] = said) -> bool:
            measure()
            assert stranger.poll() is None, (tmp_path / "flooder.log").read_text()
            assert stranger.stdout is not None
            said += [line for line in [stranger.stdout.readline()] if line]
            return bool(said)

        swarm.drive(answered, 120.0)
        told = json.loads(said[0])
        assert told["held"] <= MOST_HELD.get(name, 0), (name, told)
        print(name, told, [(peak - start) >> 20 for peak, start in zip(most, before, strict=True)])
    rounds = [len(member.committed) for member in members]
    shown = asyncio.run(_shown(config(tmp_path, "reader", bootstrap.address), bootstrap.run_id))
    assert {member.peer_id for member in members} <= shown
    assert [peak - start for peak, start in zip(most, before, strict=True) if peak - start > MOST_MORE_BYTES] == []
    deadline = time.monotonic() + GIVEN_BACK_WITHIN_S
    swarm.drive(
        lambda: time.monotonic() > deadline
        or all(p.rss_bytes - start < LEFT_BYTES for p, start in zip(processes, before, strict=True)),
        GIVEN_BACK_WITHIN_S + 10.0,
    )
    left = [process.rss_bytes - start for process, start in zip(processes, before, strict=True)]
    print("left", [more >> 20 for more in left])
    assert max(left) < LEFT_BYTES
    swarm.drive(lambda: all(len(m.committed) > count + 1 for m, count in zip(members, rounds, strict=True)), 60.0)


async def _shown(config: NodeConfig, run_id: str) -> set[str]:
    node = await start_node(config)
    try:
        directory = Directory(node, run_id)
        await directory.refresh()
        return set(directory.peers)
    finally:
        await node.close()


def test_an_old_manifest_that_is_published_again_moves_no_newcomer(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    bootstrap = make_swarm().bootstrap()
    found = asyncio.run(_join_after_a_replay(tmp_path, bootstrap.address, bootstrap.folder / "identity.key"))
    assert found == [bootstrap.run_id] * 3


async def _join_after_a_replay(folder: Path, address: str, key: Path) -> list[str]:
    """-> the runs that three newcomers find while a manifest of the same organiser, older by its serial, is renewed."""
    organiser = load_or_create_identity(key)
    model = {"architecture": "llama", "config": {"hidden_size": 8}}
    old = RunManifest.model_validate({"name": "old", "model": model, "genesis": "0" * 64})
    stranger = await start_node(config(folder, "stranger", address))
    nodes: list[Node] = [stranger]
    try:
        for name in ("one", "two", "three"):
            nodes.append(await start_node(config(folder, name, address)))
        sealed = seal_manifest(organiser, old, 1)
        for _ in range(3):
            # nodes that hold no newer one store it, so that newcomers may well be told of it
            await write_record(
                stranger, MANIFEST_KEY, sealed, time.time() + 115.0 + random.random(), owner=organiser.peer_id
            )
        return [(await ManifestSearch(node, None).run()).manifest.run_id for node in nodes[1:]]
    finally:
        for node in nodes:
            await node.close()
