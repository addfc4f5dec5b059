"""A swarm that is stopped in order and started again goes on where it was, and strangers can still join it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peer.checkpoint.store import list_checkpoints, read_checkpoint
from peer.swarm.state.chain import read_chain
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
    """SIGTERM to all: each leaves within five seconds with code 0, and takes its processes along."""
    families = [pid for peer in peers for pid in descendants(peer.process.pid)]
    assert len(families) == 2 * len(peers)
    for peer in peers:
        peer.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    for peer in peers:
        assert peer.process.wait(20.0) == 0, peer.log_text()
    assert time.monotonic() - began < 5.0
    until(lambda: not any(map(alive, families)), 2.0, lambda: families)


@pytest.mark.timeout(300)
def test_stopped_peers_resume_the_same_lineage_and_a_stranger_gets_the_same_state(
    join: JoinPeer, make_swarm: Callable[..., TestSwarm]
) -> None:
    swarm = make_swarm(steps=5, wait=2.0)
    swarm.manifest_text = swarm.manifest_text.replace("sequence_length: 8", "sequence_length: 16")
    address = swarm.bootstrap().address
    first = [join(name, address, "--resume-from-checkpoint") for name in ("a", "b")]  # nothing to resume yet
    for peer in first:
        peer.wait_for(lambda peer=peer: peer.round >= 3)
        assert "starting fresh" in peer.log_text()
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
