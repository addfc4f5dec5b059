"""Recipes that make every step together, over whole peers: real gradients, a kill, a newcomer, Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer

pytestmark = pytest.mark.timeout(300)
MakeSwarm = Callable[..., TestSwarm]
Join = Callable[..., list[JoinedPeer]]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    with ExitStack() as stack:

        def add(address: str, *names: str) -> list[JoinedPeer]:
            peers = [JoinedPeer(tmp_path / name, address, "--save-steps", "0") for name in names]
            for peer in peers:
                stack.callback(peer.close)
            return peers

        yield add


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [
        ("demo", "adamw"), pytest.param("distro", "adamw", marks=pytest.mark.long),
        pytest.param("dropcompute", "adamw", marks=pytest.mark.long),
        pytest.param("ddp", "muon", marks=pytest.mark.long),
    ],
)
def test_peers_step_together_through_a_kill_and_with_a_newcomer(
    make_swarm: MakeSwarm, join: Join, recipe: str, optimizer: str
) -> None:
    swarm = make_swarm(steps=1, wait=3.0, recipe=f"name: {recipe}")
    inner = f"inner: {{optimizer: {optimizer}, batch_sequences: 4}}"
    swarm.manifest_text = swarm.manifest_text.replace("inner: {batch_sequences: 4}", inner)
    assert inner in swarm.manifest_text
    address = swarm.bootstrap().address
    first, second, victim = peers = join(address, "a", "b", "c")
    for peer in peers:
        peer.wait_for(lambda peer=peer: len(peer.committed) >= 20)  # type: ignore[misc]
    victim.signal(signal.SIGKILL)
    at = first.round
    for peer in (first, second):
        peer.wait_for(lambda peer=peer: peer.round >= at + 20, 60.0)  # type: ignore[misc]
    (late,) = join(address, "late")
    late.wait_for(lambda: len(late.committed) >= 20)
    left = [first, second, late]
    for peer in left:
        peer.signal(signal.SIGINT)
    assert [peer.process.wait(20) for peer in left] == [0, 0, 0], late.log_text()

    states: dict[int, set[str]] = {}
    for peer in left:
        for record in peer.committed:
            states.setdefault(record["round"], set()).add(record["state_digest"])
    assert all(len(digests) == 1 for digests in states.values())
    assert sum(bool(record["stood"]) for record in first.committed) > 0.8 * len(first.committed)
    losses = [step["loss"] for step in first.events("step")]
    assert min(losses[-5:]) < losses[0] - 0.5  # each step starts from the anchor that all gradients made
    ahead = 2 if recipe == "distro" else 1  # gradients on their way: distro applies each one step late
    for peer in left:
        committed = len(peer.committed)
        caught_up = sum(event["status"] == "caught_up" for event in peer.events("round"))
        # a gradient a round; those on their way are lost when others have made rounds without it, and when it ends
        assert committed <= peer.step <= committed + ahead * (caught_up + 1)
