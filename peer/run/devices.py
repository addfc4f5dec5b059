"""Several devices of one peer: which, the processes of the further ones, and what happens when one of them ends."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from peer.errors import UserError
from peer.printable import printable
from peer.settings import PeerSettings
from peer.system.resources import usable_cores
from peer.system.torchrun import under_torchrun
from peer.train.arrivals import Arrivals
from peer.train.device import pick_device, set_threads
from peer.train.ranks import ALONE, FILE, Ranks, arrivals_beside

log = logging.getLogger(__name__)
RANK_COMMAND = (sys.executable, "-m", "peer.run.rank")
NOTICE_S, GRACE_S, POLL_S = 2.0, 6.0, 0.1
HUNG_S = 600.0  # longer than a device compiles, or a rank gathers a large state
MEETING = "ranks"  # in the output folder
MAX_RANKS = 64


def devices_of(text: str) -> list[str]:
    """The devices of a peer by torch's names: `all`, `cuda:0,cuda:1`, or `cpu:2` for two processes on the CPU.

    Raises:
        UserError: one that is not there, twice the same card, too many, or several kinds.
    """
    hint = "use all, a list such as cuda:0,cuda:1, or cpu:2 for two processes on the CPU"
    if text == "all":
        count = torch.cuda.device_count()
        return [f"cuda:{index}" for index in range(count)] if count else [str(pick_device("auto"))]
    if text.startswith("cpu:") and text[4:].isdecimal():
        names = ["cpu"] * int(text[4:])
    else:
        names = [str(pick_device(name.strip())) for name in text.split(",")]
        if len(set(names)) < len(names):
            raise UserError(f"devices={text}: names a device twice", hint)
    if len({name.partition(":")[0] for name in names}) != 1 or not 1 <= len(names) <= MAX_RANKS:
        raise UserError(f"devices={text}: must be 1 to {MAX_RANKS} devices of one kind", hint)
    if len(names) > 1 and names[0].startswith("mps"):
        raise UserError(f"devices={text}: a Mac has one", hint)
    return names


class FurtherRanks(Protocol):
    """The processes of the further devices of this peer."""

    def connect(self) -> Ranks:
        """Meet them."""

    def lost(self) -> UserError | None:
        """What to say where a step with them failed; None: that they are there."""

    def dismiss(self) -> None:
        """They are about to be told to stop."""

    def close(self) -> None:
        """They are needed no more."""


class NoFurther:
    """Of a peer with one device."""

    def connect(self) -> Ranks:
        return ALONE

    def lost(self) -> UserError | None:
        return None

    def dismiss(self) -> None: ...

    def close(self) -> None: ...


class RankProcesses:
    """Processes of this machine. When one ends, so does this peer, `GRACE_S` + `NOTICE_S` later at most; when others
    wait for one that hangs, after `hung_s`.

    Use it from the main thread only: they die with the *thread* that started them (PR_SET_PDEATHSIG).

    Args:
        devices: of all ranks, the first that of this process.
        folder: where each writes its log.
        end: ends this process at once, after the message was shown; for a main thread that a device does not let go.
    """

    def __init__(
        self, devices: Sequence[str], sharded: bool, folder: Path,
        end: Callable[[int], None] = os._exit, command: Sequence[str] = RANK_COMMAND, hung_s: float = HUNG_S,
    ) -> None:  # fmt: skip
        self.devices, self._sharded, self._folder, self._end = list(devices), sharded, folder, end
        self._meeting, self._hung_s = folder / MEETING, hung_s
        shutil.rmtree(self._meeting, ignore_errors=True)  # of a process that was killed
        self._meeting.mkdir()
        self._arrivals = Arrivals(arrivals_beside(self._store), len(self.devices))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing, self._lost = threading.Event(), threading.Event()
        self._why = ""
        for rank, device in enumerate(self.devices[1:], start=1):
            self._processes.append(self._start([*command, "--rank", str(rank), "--device", device], rank))
        self._watch = threading.Thread(target=self._look, name="ranks", daemon=True)
        self._watch.start()

    @property
    def _store(self) -> str:
        return f"{FILE}{self._meeting.absolute()}/store"

    def connect(self) -> Ranks:
        """Meet them."""
        return Ranks.connect(0, len(self.devices), torch.device(self.devices[0]), self._store, self._sharded)

    def lost(self) -> UserError | None:
        """What to say if one has ended; waits a moment for that, as what it breaks in this process may come first."""
        if not self._lost.wait(NOTICE_S):
            return None
        self._closing.set()  # this thread ends the peer
        return UserError(self._why, self._hint)

    @property
    def _hint(self) -> str:
        return f"see {self._folder}/rank*.log; start this peer again with --resume-from-checkpoint"

    def dismiss(self) -> None:
        """They are about to be told to stop, and end without harm."""
        self._closing.set()

    def close(self) -> None:
        """End them: they hold nothing that is to be saved."""
        self._closing.set()
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self, command: list[str], rank: int) -> subprocess.Popen[bytes]:
        command += ["--count", str(len(self.devices)), "--store", self._store, "--parent", str(os.getpid())]
        command += ["--sharded"] if self._sharded else []
        with (self._folder / f"rank{rank}.log").open("ab") as file:
            try:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            except OSError as error:
                what = f"the process of {self.devices[rank]} cannot be started: {error.strerror}"
                raise UserError(what, "free memory, or name fewer devices") from None

    def _look(self) -> None:
        before, since = self._arrivals.counts, time.monotonic()
        while not self._closing.wait(POLL_S):
            ended = [rank for rank, process in enumerate(self._processes, start=1) if process.poll() is not None]
            if (counts := self._arrivals.counts) != before:
                before, since = counts, time.monotonic()
            hung = self._arrivals.last() if time.monotonic() - since > self._hung_s else None
            if ended:
                how = how_it_ended(self._processes[ended[0] - 1].returncode)
                return self._end_peer(f"rank {ended[0]} on {self.devices[ended[0]]} {how}{self._last(ended[0])}")
            if hung is not None:
                held = f"has made no progress for {self._hung_s:.0f} s while the others wait for it"
                return self._end_peer(f"rank {hung} on {self.devices[hung]} {held}")

    def _end_peer(self, why: str) -> None:
        self._why = why
        self._lost.set()
        if not self._closing.wait(GRACE_S):
            print(UserError(self._why, self._hint).render(), file=sys.stderr)
            shutil.rmtree(self._meeting, ignore_errors=True)
            self._end(2)

    def _last(self, rank: int) -> str:
        """The last line of its log."""
        with contextlib.suppress(OSError):
            lines = (self._folder / f"rank{rank}.log").read_bytes()[-4096:].decode(errors="replace").splitlines()
            return f": {printable(lines[-1])[:300]}" if lines else ""
        return ""


class Torchrun:
    """The other processes of this peer as `torchrun` started them, which ends all when one ends."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded

    def connect(self) -> Ranks:
        """Meet them."""
        device = torch.device(torchrun_device(os.environ))
        return Ranks.connect(0, int(os.environ["WORLD_SIZE"]), device, "env://", self._sharded)

    def lost(self) -> UserError | None:
        """What to say where a step with them failed."""
        return UserError("another rank of this peer has ended", "torchrun says which one, and its own output says why")

    def dismiss(self) -> None:
        """They are about to be told to stop."""

    def close(self) -> None:
        """They end by themselves."""


def torchrun_device(environ: Mapping[str, str]) -> str:
    """The device of this process of `torchrun`."""
    return f"cuda:{environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


def how_it_ended(code: int) -> str:
    """In words, by the exit code of a child; a negative one is a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def start_ranks(settings: PeerSettings) -> FurtherRanks:
    """The processes of the further devices."""
    if under_torchrun(os.environ):
        return Torchrun(settings.sharding == "fsdp")
    devices = device_names(settings)
    if len(devices) == 1:
        return NoFurther()
    if settings.torch_threads is None and devices[0] == "cpu":
        set_threads(max(1, usable_cores() // len(devices)))
    return RankProcesses(devices, settings.sharding == "fsdp", settings.output_dir)


def device_names(settings: PeerSettings) -> list[str]:
    """Those of this peer, the first that of this process.

    Raises:
        UserError: they are not there, or `torchrun` decides on them.
    """
    if under_torchrun(os.environ):
        if settings.devices is not None:
            raise UserError(f"devices={settings.devices}: torchrun says how many there are", "leave --devices out")
        return [torchrun_device(os.environ)] * int(os.environ["WORLD_SIZE"])
    return [str(pick_device(settings.device))] if settings.devices is None else devices_of(settings.devices)


def planned_ranks(settings: PeerSettings) -> Ranks:
    """As many as there will be, for what must be known before they meet."""
    return Ranks(0, len(device_names(settings)), settings.sharding == "fsdp")
