"""A swarm that is stopped in order and started again goes on where it was, and strangers can still join it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.checkpoint.store import list_checkpoints, read_checkpoint
from peer.use.trained import open_trained
from tests.chain_files import read_chain
from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer, alive, descendants, until

JoinPeer = Callable[..., JoinedPeer]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[JoinPeer]:
    """Starts peers that end with the test."""
    peers: list[JoinedPeer] = []

    def start(name: str, address: str, *flags: str) -> JoinedPeer:
        peers.append(JoinedPeer(tmp_path / name, address, *flags))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def chain_ids(path: Path) -> list[str]:
    """Lineage ids of a chain file, oldest round first."""
    return [certificate.link.id for certificate in read_chain(path)]


def live_chain(peer: JoinedPeer) -> list[str]:
    """The one chain of a peer's history folder."""
    (path,) = (peer.folder / "history").glob("*/chain.jsonl")
    return chain_ids(path)


def stop_in_order(peers: list[JoinedPeer]) -> None:
    """SIGTERM to all: each exports its model, leaves within five seconds with code 0, and takes its processes along."""
    families = [pid for peer in peers for pid in descendants(peer.process.pid)]
    assert len(families) == 2 * len(peers)
    for peer in peers:
        peer.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    for peer in peers:
        assert peer.process.wait(20.0) == 0, peer.log_text()
    assert time.monotonic() - began < 5.0
    until(lambda: not any(map(alive, families)), 2.0, lambda: families)
    for peer in peers:
        exported, saved = open_trained(peer.folder / "export"), open_trained(peer.folder)
        assert any(line.endswith(f"; the model: {peer.folder / 'export'}") for line in peer.said("info"))
        card = (peer.folder / "export" / "README.md").read_text()
        (round,) = re.findall(r"^\| round \| ([0-9]+) \|$", card, re.MULTILINE)
        assert saved.after.round <= int(round) <= saved.after.round + 1  # one more may have come while it saved
        if saved.after.round == int(round):
            kept = saved.model.state_dict()
            assert all(torch.equal(kept[name], value) for name, value in exported.model.state_dict().items())
        assert not (peer.folder / "export-2").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [
    pytest.param({"steps": 5}, id="diloco"),
    pytest.param({"steps": 12, "layers": 3, "recipe": "name: streaming-diloco, compressor: int8"},
                 id="streaming-diloco", marks=pytest.mark.long),
])  # fmt: skip
def test_stopped_peers_resume_the_same_lineage_and_a_stranger_gets_the_same_state(
    join: JoinPeer, make_swarm: Callable[..., TestSwarm], options: dict[str, Any]
) -> None:
    swarm = make_swarm(wait=2.0, **options)
    swarm.manifest_text = swarm.manifest_text.replace("sequence_length: 8", "sequence_length: 16")
    address = swarm.bootstrap().address
    first = [join(name, address, "--resume-from-checkpoint") for name in ("a", "b")]  # nothing to resume yet
    for peer in first:
        peer.wait_for(lambda peer=peer: peer.round >= 3)
        assert any("no checkpoint of this run" in line and "starting fresh" in line for line in peer.said("info"))
    stop_in_order(first)

    saved = {}
    for peer in first:
        folder = list_checkpoints(peer.folder / "checkpoints")[0]
        _, state = read_checkpoint(folder)
        chain = chain_ids(folder / "chain.jsonl")
        assert chain[-1] == state["lineage_id"]
        assert len(chain) == state["progress"]["round"] >= 3
        saved[peer.folder.name] = (state["progress"], chain, len(peer.events("step")))

    again = [join(name, address, "--resume-from-checkpoint") for name in ("a", "b")]
    target = max(progress["round"] for progress, _, _ in saved.values()) + 3
    for peer in again:
        progress, chain, steps_before = saved[peer.folder.name]
        peer.wait_for(lambda peer=peer: peer.round >= target)
        assert peer.events("start")[1]["round"] >= progress["round"]
        assert peer.events("step")[steps_before]["step"] == progress["step"] + 1
        assert live_chain(peer)[: len(chain)] == chain
        (told,) = [line for line in peer.said("info") if line.startswith("resuming from")]
        assert told.endswith(f"step {progress['step']}, round {progress['round']}")
        assert not [line for line in peer.said("warning") if "begins again" in line]
        assert "does not verify" not in (peer.folder / "agent.log").read_text()
        assert min(event["round"] for event in peer.committed[-3:]) > progress["round"]

    stranger = join("c", address)
    stranger.wait_for(lambda: any(len(event["members"]) == 3 for event in stranger.committed))
    shared = next(event for event in stranger.committed if len(event["members"]) == 3)
    everybody = [*again, stranger]
    for peer in everybody:
        peer.wait_for(lambda peer=peer: len(live_chain(peer)) >= shared["round"])
    stop_in_order(everybody)
    same_round = [event for peer in everybody for event in peer.committed if event["round"] == shared["round"]]
    assert {event["lineage_id"] for event in same_round} == {shared["lineage_id"]}
    assert {event["state_digest"] for event in same_round} == {shared["state_digest"]}
    assert len({tuple(live_chain(peer)[: shared["round"]]) for peer in everybody}) == 1


@pytest.mark.timeout(300)
def test_peers_that_all_crash_make_the_rounds_after_their_checkpoints_again(
    join: JoinPeer, make_swarm: Callable[..., TestSwarm]
) -> None:
    swarm = make_swarm(steps=5, wait=2.0)
    address = swarm.bootstrap().address
    flags = ("--save-steps", "5", "--save-total-limit", "20", "--resume-from-checkpoint")
    peers = [join(name, address, *flags) for name in ("a", "b")]
    for peer in peers:
        peer.wait_for(lambda peer=peer: peer.round >= 4)
    families = [pid for peer in peers for pid in (peer.process.pid, *descendants(peer.process.pid))]
    for pid in families:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(alive, families)), 5.0, lambda: families)
    before, began = {}, {}
    for peer in peers:
        before[peer.folder], began[peer.folder] = live_chain(peer), len(peer.events("start"))
        *newer, oldest = list_checkpoints(peer.folder / "checkpoints")
        assert read_checkpoint(oldest)[1]["progress"]["round"] < 4 <= len(before[peer.folder])
        for folder in newer:  # a power cut may take them all
            shutil.rmtree(folder)

    for peer in [join(name, address, *flags) for name in ("a", "b")]:
        peer.wait_for(lambda peer=peer: len(live_chain(peer)) > len(before[peer.folder]) + 2)
        assert "from its own files" in (peer.folder / "agent.log").read_text()
        assert len([line for line in peer.said("info") if "rounds after the checkpoint hold" in line]) == 1
        assert peer.events("start")[began[peer.folder]]["round"] >= len(before[peer.folder])
        assert live_chain(peer)[: len(before[peer.folder])] == before[peer.folder]


def checkpoints(peer: JoinedPeer) -> dict[str, list[int]]:
    """The steps of the checkpoints in each run folder."""
    found: dict[str, list[int]] = {}
    for path in list_checkpoints(peer.folder / "checkpoints"):
        found.setdefault(path.parent.name, []).append(int(path.name.split("-")[1]))
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_runs_and_lineages_share_an_output_folder(
    join: JoinPeer, make_swarm: Callable[..., TestSwarm]
) -> None:
    swarms = [make_swarm(steps=5, wait=2.0) for _ in range(2)]
    swarms[1].manifest_text = swarms[1].manifest_text.replace("seed: 3", "seed: 4")
    bootstraps = [swarm.bootstrap() for swarm in swarms]
    first, second = (bootstrap.run_id[:16] for bootstrap in bootstraps)

    def live(address: str, *flags: str) -> JoinedPeer:
        peer = join("shared", address, "--save-steps", "5", "--save-total-limit", "2", *flags)
        began = len(peer.events("start"))
        peer.wait_for(lambda: len(peer.events("start")) > began)
        step = len(peer.events("step"))
        peer.wait_for(lambda: len(peer.events("step")) > step + 20)
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(20.0) == 0, peer.log_text()
        return peer

    kept = checkpoints(live(bootstraps[0].address))[first]
    peer = live(bootstraps[1].address, "--resume-from-checkpoint")
    assert any("no checkpoint of this run" in line for line in peer.said("info"))
    assert checkpoints(peer)[first] == kept, "the other run's are not touched"
    assert len(checkpoints(peer)[second]) == 2, "and hold no place of this run's"

    peer = live(bootstraps[0].address)
    (told,) = [line for line in peer.said("warning") if "starting fresh beside 2 checkpoints" in line]
    assert f"checkpoint-{kept[0]} (step {kept[0]}, round " in told

    flags = ("--resume-from-checkpoint", "--per-device-train-batch-size", "3", "--data-seed", "7")
    peer = live(bootstraps[0].address, *flags)
    (told,) = [line for line in peer.said("warning") if "begins again" in line]
    assert "another data seed" in told, "how a step is cut does not matter to the data"
    assert any("4 sequences of" in line and "in 2 micro-batches of 3" in line for line in peer.said("info"))
    (lines,) = [line for line in peer.said("info") if line.startswith("resuming from")]
    assert f"/checkpoints/{first}/checkpoint-" in lines

    with_other_owner = join("shared", bootstraps[0].address)
    with_other_owner.wait_for(lambda: with_other_owner.agent is not None)
    refused = join("shared", bootstraps[0].address, "--identity-path", str(peer.folder.parent / "other.key"))
    assert refused.process.wait(30.0) == 2
    text = (peer.folder / "console.log").read_text()
    assert f"output_dir={peer.folder}: is in use by process" in text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_peers_with_a_second_trajectory_resume_it(join: JoinPeer, make_swarm: Callable[..., TestSwarm]) -> None:
    swarm = make_swarm(steps=4, recipe="name: fedglomo", wait=2.0)
    address = swarm.bootstrap().address
    for target in (3, 6):
        peers = [join(name, address, "--resume-from-checkpoint", "--save-steps", "4") for name in ("a", "b")]
        for peer in peers:
            peer.wait_for(lambda peer=peer, target=target: peer.round >= target)
        stop_in_order(peers)
        tensors, state = read_checkpoint(list_checkpoints(peers[0].folder / "checkpoints")[0])
        assert state["progress"]["round"] >= target
        second, anchor = tensors["second"], tensors["second"]["anchor"]
        assert float((second["parameters"] - anchor).abs().max()) < 0.5
        assert not torch.equal(second["parameters"], tensors["inner"]["parameters"])
    assert [event["round"] for event in peers[0].events("start")][1] >= 3
    assert not [line for line in peers[0].said("warning") if "step skipped" in line]
