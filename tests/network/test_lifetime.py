"""Whatever dies, and however: what it started ends with it, and what can go on does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peer.telemetry.metrics import read_metrics
from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer, alive, descendants, until

MakeSwarm = Callable[..., TestSwarm]
ENDINGS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 0, signal.SIGINT: 0, signal.SIGHUP: 0}
GONE_WITHIN_S = 10.0


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Processes that start meanwhile end when their terminal closes, even if these tests were started by `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("hangs_up")
def test_however_a_trainer_ends_its_agent_and_daemon_end(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    bootstrap = make_swarm().bootstrap()
    peers = {number: JoinedPeer(tmp_path / number.name.lower(), bootstrap.address, env={}) for number in ENDINGS}
    try:
        for number, peer in peers.items():
            peer.wait_for(lambda peer=peer: peer.step > 0)
            family = descendants(peer.process.pid)
            assert family == [peer.agent, peer.daemon]
            peer.process.send_signal(number)
            until(lambda family=family: not any(map(alive, family)), GONE_WITHIN_S, peer.log_text)
            assert peer.process.wait(GONE_WITHIN_S) == ENDINGS[number]
            assert "Traceback" not in peer.log_text()
    finally:
        for peer in peers.values():
            peer.close()


@pytest.mark.timeout(240)
def test_training_survives_the_loss_of_agent_and_daemon(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    bootstrap = make_swarm(steps=5, wait=2.0).bootstrap()
    victim, other = (JoinedPeer(tmp_path / name, bootstrap.address) for name in ("victim", "other"))
    try:
        for peer in (victim, other):
            peer.wait_for(lambda peer=peer: peer.round >= 1)
        for whom in ("agent", "daemon"):
            family, step = descendants(victim.process.pid), victim.step
            target = getattr(victim, whom)
            assert target in family
            os.kill(target, signal.SIGKILL)
            until(lambda family=family: not any(map(alive, family)), GONE_WITHIN_S, victim.log_text)
            round = victim.round  # one more record may be on its way, not two
            victim.wait_for(lambda step=step: victim.step > step)
            victim.wait_for(lambda family=family: victim.agent not in (None, *family))
            victim.wait_for(lambda round=round: victim.round >= round + 2)
            reached = victim.committed[-1]["round"]  # rounds go on: the next look would find another one
            other.wait_for(lambda reached=reached: other.round >= reached)
        events = [event for event in read_metrics(victim.folder / "metrics.jsonl") if event["event"] == "agent_restart"]
        assert [event["starts"] for event in events] == [2, 3]
    finally:
        victim.close()
        other.close()


def test_the_daemon_of_a_killed_bootstrap_ends(make_swarm: MakeSwarm) -> None:
    bootstrap = make_swarm().bootstrap()
    family = descendants(bootstrap.process.pid)
    assert len(family) == 1
    bootstrap.kill()
    until(lambda: not any(map(alive, family)), GONE_WITHIN_S, lambda: family)
