"""The play: a bootstrap and three peers, a fourth that joins later, one that is killed, and the rest to the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer.demo.children import Child, Children
from peer.demo.report import Observed, observe, validation_losses
from peer.errors import AtollError
from peer.system.clock import Clock
from peer.telemetry.console import LiveSwarm
from peer.telemetry.status import PeerRow

FOUNDERS = ("alpha", "bravo", "charlie")
LATECOMER, JOINS_AFTER_ROUND = "delta", 3
VICTIM, KILLED_AFTER_ROUND = "bravo", 6
CAST = (*FOUNDERS, LATECOMER)
BOOTSTRAP = "bootstrap"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
POLL_S = 0.3
LOGGING_STEPS = 4


class DemoError(AtollError):
    """The demo cannot continue; the message is for the user, `log_tail` is the end of the culprit's log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


@dataclass(frozen=True, kw_only=True)
class PlaySetup:
    """What is played.

    Attributes:
        folder: holds `run.yaml`; gets one folder and one log per process.
        rounds: how many the manifest asks for.
        seconds_limit: the whole play must be over by then.
        seed: makes the data order of each peer a given one.
    """

    folder: Path
    rounds: int
    seconds_limit: float
    seed: int | None


class Play:
    """Runs the whole play.

    Args:
        clock: unix seconds.
        pause: waits for some seconds between two looks.

    Attributes:
        killed: nickname -> unix seconds.
    """

    def __init__(
        self, setup: PlaySetup, children: Children, live: LiveSwarm, *, clock: Clock = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._setup, self._children, self._live, self._clock, self._pause = setup, children, live, clock, pause
        self._started_at = clock()
        self._told: dict[str, int] = {}
        self._last_round_told = 0
        self._address = ""
        self.killed: dict[str, float] = {}
        self.peers: list[Observed] = []

    def run(self) -> None:
        """Play to the end.

        Raises:
            DemoError: a process ended that should not have, or the time is over.
        """
        self._start_bootstrap()
        self._live.note(f"starting {', '.join(FOUNDERS)}: each loads its text and builds the model (about 20 s)")
        for name in FOUNDERS:
            self._start_peer(name)
        while not self._over():
            self._watch()
            self._direct()
            self._pause(POLL_S)
        self._watch()

    def _start_bootstrap(self) -> None:
        self._live.note("starting the bootstrap: it builds the first model and publishes the run (about 10 s)")
        command = [sys.executable, "-m", "bootstrap.cli", str(self._setup.folder / "run.yaml"), "--json"]
        command += ["--host-maddrs", LOOPBACK, "--state-dir", str(self._setup.folder / BOOTSTRAP), "--no-nat-port-map"]
        child = self._children.start(BOOTSTRAP, command, self._setup.folder / "bootstrap.log")
        while (address := published_address(child.log_path)) is None:
            self._check()
            self._live.update(())
            self._pause(POLL_S)
        self._address = address
        self._live.note(f"the run is open: atoll join {address}")

    def _start_peer(self, name: str) -> None:
        folder = self._setup.folder / name
        command = [sys.executable, "-m", "peer.cli", "join", self._address, "--output-dir", str(folder)]
        command += ["--nickname", name, "--host-maddrs", LOOPBACK, "--no-nat-port-map", "--torch-threads", "1"]
        command += ["--device", "cpu", "--save-steps", "0", "--logging-steps", str(LOGGING_STEPS)]
        command += ["--report", str(folder / "report.json")]
        if self._setup.seed is not None:
            command += ["--data-seed", str(self._setup.seed + CAST.index(name))]
        self._children.start(name, command, self._setup.folder / f"{name}.log")

    def _watch(self) -> None:
        """Read what the peers have written, show it, and see that all is well."""
        self._check()
        self.peers = [observe(name, self._setup.folder / name) for name in CAST if name in self._children]
        for peer in self.peers:
            self._tell(peer)
        self._live.title = self._title()
        self._live.update([self._row(peer) for peer in self.peers])

    def _direct(self) -> None:
        """Cues: the latecomer's entrance and the victim's end, each once its round is committed."""
        if self._round >= JOINS_AFTER_ROUND and LATECOMER not in self._children:
            self._live.note(f"round {self._round} is done: {LATECOMER} starts now, with nothing but the address")
            self._start_peer(LATECOMER)
        victim = next(peer for peer in self.peers if peer.nickname == VICTIM)
        if victim.round >= KILLED_AFTER_ROUND and VICTIM not in self.killed:
            self.killed[VICTIM] = self._clock()
            self._children.kill(VICTIM)
            self._live.note(f"{VICTIM} was killed after round {victim.round} (SIGKILL); the others continue")

    @property
    def _round(self) -> int:
        return max((peer.round for peer in self.peers), default=0)

    def _over(self) -> bool:
        """All have left in order but those that were killed, and the cues were played."""
        started = [name for name in CAST if name in self._children]
        alive = [name for name in started if name not in self.killed and self._children[name].code is None]
        return bool(started) and not alive

    def _check(self) -> None:
        if self._clock() - self._started_at > self._setup.seconds_limit:
            limit = f"--seconds-limit={self._setup.seconds_limit:.0f}"
            raise DemoError(f"round {self._round} is done, but {limit} is over; a machine that is busy needs more")
        for child in self._children.ended():
            if child.name not in self.killed and not self._left_in_order(child):
                raise DemoError(f"{child.name} ended unexpectedly ({_cause(child.code)})", child.log_tail())

    def _left_in_order(self, child: Child) -> bool:
        return child.code == 0 and observe(child.name, self._setup.folder / child.name).report is not None

    def _tell(self, peer: Observed) -> None:
        told = self._told.get(peer.nickname, 0)
        self._told[peer.nickname] = len(peer.events)
        for event in peer.events[told:]:
            if event["event"] == "round" and event["status"] == "committed":
                if event["round"] <= self._last_round_told:
                    continue
                self._last_round_told = event["round"]
            for text in describe(peer.nickname, event):
                self._live.note(text)

    def _title(self) -> str:
        losses = validation_losses(self.peers)
        title = f"Atoll demo   round {self._round} of {self._setup.rounds}   {self._clock() - self._started_at:.0f} s"
        if losses:
            title += f"   validation loss {losses[min(losses)][1]:.3f}"
        return f"{title} -> {losses[max(losses)][1]:.3f}" if len(losses) > 1 else title

    def _row(self, peer: Observed) -> PeerRow:
        """Its own line, with what only we know: that it is starting, was killed or has left."""
        row = peer.row or PeerRow(
            peer_id="", nickname=peer.nickname, state="starting", round=peer.round, step=0, tokens=0, tokens_per_s=0.0,
            loss=None, group_size=0, bytes_sent=0, bytes_received=0, seconds_waiting=0.0,
        )
        row = replace(row, round=max(row.round, peer.round))
        if peer.nickname in self.killed:
            return replace(row, state="killed", tokens_per_s=0.0, group_size=0)
        if self._children[peer.nickname].code is not None:
            return replace(row, state="left", tokens_per_s=0.0)
        return row


def published_address(log_path: Path) -> str | None:
    """The address in a bootstrap's `--json` output, once it is there."""
    for line in log_path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "started":
            return str(event["addresses"][0])
    return None


def describe(nickname: str, event: dict[str, Any]) -> Iterator[str]:
    """A line for a person about a peer's event; nothing for those that the table shows anyway."""
    kind = event["event"]
    if kind == "start":
        yield f"{nickname} joined at round {event['round']}"
    elif kind == "agent_restart":
        yield f"{nickname} restarted its agent"
    elif kind == "round" and event["status"] == "committed":
        seconds = event["seconds"]
        exchange_s = seconds["total"] - seconds.get("match", 0.0)  # matching waits for peers that are not due yet
        yield f"round {event['round']} committed by {len(event['members'])} peers, exchanged in {exchange_s:.1f} s"
    elif kind == "round" and event["status"] == "caught_up":
        yield f"{nickname} caught up to round {event['round']}"
    elif kind == "round" and event["status"] == "banned":
        yield f"{nickname} banned {event['culprit']}: {event['reason']}"
    elif kind == "round" and not event["alone"]:
        yield f"{nickname}: round {event['round']} aborted in {event['phase']}: {event['reason']}; nothing is lost"


def _cause(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
