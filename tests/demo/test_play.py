"""The cues of the play, against children that only write what real ones would; time is virtual."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from peer.demo.play import DemoError, Play, PlaySetup, describe, published_address
from peer.telemetry.console import LiveSwarm
from tests.demo.recorded import Recorder

ROUNDS = 9


@dataclass
class ScriptedChild:
    name: str
    log_path: Path
    code: int | None = None

    def log_tail(self) -> str:
        return "last words"


class ScriptedChildren:
    """Peers that commit one round at each pause, and leave with a report after the last."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.round = root, 1000.0, 0
        self.children: dict[str, ScriptedChild] = {}
        self.recorders: dict[str, Recorder] = {}
        self.started_at_round: dict[str, int] = {}
        self.killed_at_round: dict[str, int] = {}
        self.commands: dict[str, list[str]] = {}
        self.crashes: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.children

    def __getitem__(self, name: str) -> ScriptedChild:
        return self.children[name]

    def start(self, name: str, command: Sequence[str], log_path: Path) -> ScriptedChild:
        child = self.children[name] = ScriptedChild(name, log_path)
        self.commands[name] = list(command)
        self.started_at_round[name] = self.round
        log_path.write_text("")
        if name != "bootstrap":
            self.recorders[name] = Recorder(self.root, name, self.now)
            self.recorders[name].start(self.round)
        return child

    def ended(self) -> list[ScriptedChild]:
        return [child for child in self.children.values() if child.code is not None]

    def kill(self, name: str) -> None:
        self.children[name].code = -9
        self.killed_at_round[name] = self.round

    def pause(self, _seconds: float) -> None:
        self.now += 1.0
        started = {"event": "started", "addresses": ["/ip4/127.0.0.1/tcp/5/p2p/Q"]}
        self.children["bootstrap"].log_path.write_text("noise\n" + json.dumps(started) + "\n")
        if "alpha" not in self.children:
            return
        self.round += 1
        for name, recorder in self.recorders.items():
            child = self.children[name]
            if child.code is not None:
                continue
            recorder.round(self.round)
            if self.crashes.get(name) == self.round:
                child.code = 1
            elif self.round == ROUNDS:
                recorder.report(ROUNDS)
                child.code = 0


@pytest.fixture
def children(tmp_path: Path) -> ScriptedChildren:
    return ScriptedChildren(tmp_path)


def play_in(children: ScriptedChildren, *, seconds_limit: float = 600.0, seed: int | None = None) -> Play:
    live = LiveSwarm(Console(file=io.StringIO()), title="demo", live=False)
    setup = PlaySetup(folder=children.root, rounds=ROUNDS, seconds_limit=seconds_limit, seed=seed)
    return Play(
        setup,
        children,  # type: ignore[arg-type]
        live, clock=lambda: children.now, pause=children.pause,
    )


def test_the_fourth_joins_after_round_3_and_bravo_is_killed_after_round_6(children: ScriptedChildren) -> None:
    play = play_in(children)
    play.run()
    assert children.started_at_round == {"bootstrap": 0, "alpha": 0, "bravo": 0, "charlie": 0, "delta": 3}
    assert children.killed_at_round == {"bravo": 6}
    assert list(play.killed) == ["bravo"]
    assert {peer.nickname: peer.round for peer in play.peers} == {"alpha": 9, "bravo": 6, "charlie": 9, "delta": 9}
    assert all(peer.report is not None for peer in play.peers if peer.nickname != "bravo")


def test_every_peer_gets_the_address_and_a_seed_of_its_own(children: ScriptedChildren) -> None:
    play_in(children, seed=5).run()
    seeds = {}
    for name in ("alpha", "bravo", "charlie", "delta"):
        command = children.commands[name]
        assert command[command.index("join") + 1] == "/ip4/127.0.0.1/tcp/5/p2p/Q"
        seeds[name] = command[command.index("--data-seed") + 1]
    assert seeds == {"alpha": "5", "bravo": "6", "charlie": "7", "delta": "8"}


@pytest.mark.parametrize("name", ["alpha", "delta"])
def test_an_unexpected_death_ends_the_demo_with_its_last_words(children: ScriptedChildren, name: str) -> None:
    children.crashes[name] = 5
    with pytest.raises(DemoError, match=rf"{name} ended unexpectedly \(exit code 1\)") as caught:
        play_in(children).run()
    assert caught.value.log_tail == "last words"


def test_the_time_limit(children: ScriptedChildren) -> None:
    with pytest.raises(DemoError, match="round 4 is done, but --seconds-limit=5 is over"):
        play_in(children, seconds_limit=5.0).run()


def test_the_address_is_found_among_other_lines(tmp_path: Path) -> None:
    log = tmp_path / "bootstrap.log"
    log.write_text('warning: x\n{"event":"started","addresses":["/ip4/1.2.3.4')
    assert published_address(log) is None
    log.write_text('warning: x\n7\n{"event":"started","addresses":["/ip4/1.2.3.4/tcp/1/p2p/Q"]}\n')
    assert published_address(log) == "/ip4/1.2.3.4/tcp/1/p2p/Q"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "start", "round": 5}, ["delta joined at round 5"]),
        ({"event": "agent_restart"}, ["delta restarted its agent"]),
        ({"event": "step"}, []),
        ({"event": "round", "status": "aborted", "alone": True}, []),
        (
            {"event": "round", "status": "committed", "round": 2, "members": ["a", "b"], "seconds": {"total": 0.25}},
            ["round 2 committed by 2 peers, exchanged in 0.2 s"],
        ),
    ],
)
def test_events_in_words(event: dict[str, object], said: list[str]) -> None:
    assert list(describe("delta", event)) == said
