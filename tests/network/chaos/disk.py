"""G12: the disk. A peer that dies, or whose disk is full, at any offset of writing a checkpoint; bits that flip.

A child writes checkpoints as a peer does: the agent's part, then the trainer's (`CheckpointWriter`). Its writes below
the folder end at a chosen byte, or between two of the other changes to the folder (`shim`). After that the newest
valid checkpoint must be the one before or the new one, with every value as it was, and the next one must succeed.
Power failure is not tried: what was written and not flushed is there in all of these cases.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from peer.checkpoint.inventory import CheckpointError
from peer.checkpoint.store import find_checkpoint, list_checkpoints, read_checkpoint
from peer.checkpoint.writer import CheckpointWriter
from peer.system.death_signal import die_with_parent
from tests.network.chaos.shim import library, preloaded

OFFSETS, FLIPS = 200, 500
MODES = {"count": 0, "kill": 1, "full": 2}
KEEP = 3
VALUES = 20_000  # of each vector: 80 KB, so that as many offsets lie in data as between files
NOWHERE = 2**62
TELL_EVERY = 20


def vector(version: int) -> torch.Tensor:
    """The values of one version of the state."""
    return torch.full((VALUES,), float(version)) + torch.arange(VALUES) / VALUES


def save(root: Path, step: int, version: int) -> None:
    """Write one checkpoint as a peer and its agent do; raises CheckpointError or OSError."""
    writer = CheckpointWriter(root, KEEP)
    try:
        part = writer.part(step)
        save_file({"anchor": vector(version)}, part / "outer.safetensors")
        (part / "chain.jsonl").write_bytes(b'{"link": 1}\n' * 50)
        writer.submit(step, {"inner": {"parameters": vector(version)}}, {"round": version, "version": version}, part)
    finally:
        writer.close()


def version_of(root: Path) -> int | None:
    """The version of the newest valid checkpoint; None if there is none, or it holds anything else."""
    try:
        path = find_checkpoint(root)
        tensors, state = read_checkpoint(path)
    except CheckpointError:
        return None
    version = int(state["version"])
    same = torch.equal(tensors["inner"]["parameters"], vector(version))
    return version if same and state["round"] == version else None


class Saver:
    """The child: started once with the library, it forks for each checkpoint."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.network.chaos.disk", str(os.getpid()), str(library()), str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=preloaded(),
        )  # fmt: skip

    def save(self, step: int, version: int, mode: str = "count", offset: int = NOWHERE) -> dict[str, Any]:
        """-> what became of it: `killed`, `problem` (None: written), `crash`, `seen`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"step": step, "version": version, "mode": mode, "offset": offset}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Disk:
    """The campaign in one folder."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self._rng, self._saver = root, rng, Saver(root)
        self.ends: Counter[str] = Counter({"killed": 0, "disk full": 0, "written": 0})
        self.lost: list[str] = []
        self.flips, self.missed = 0, list[str]()
        self._step = self._version = 0
        for _ in range(KEEP):
            self._save("the first ones", again=False)
        self.length = int(self._save("the first ones", again=False)["seen"])  # and removes the first

    def close(self) -> None:
        self._saver.close()

    def counts(self) -> dict[str, Any]:
        """So far."""
        return {
            "offsets": self.ends.total(),
            "how_writing_ended": dict(self.ends),
            "states_lost": len(self.lost),
            "what_was_lost": self.lost,
            "bits_flipped": self.flips,
            "flips_not_found": len(self.missed),
            "what_was_not_found": self.missed,
        }

    def _save(self, what: str, again: bool, mode: str = "count", offset: int = NOWHERE) -> dict[str, Any]:
        """The next checkpoint; one of the same step with `again`."""
        self._version += 1
        self._step += 0 if again else 10
        answer = self._saver.save(self._step, self._version, mode, offset)
        if answer["crash"] or (mode == "count" and (answer["problem"] or version_of(self.root) != self._version)):
            self.lost.append(f"{what}, then {answer} and {version_of(self.root)} instead of {self._version}")
        return answer

    def interrupt(self) -> None:
        """One checkpoint that is not finished, then one that is."""
        mode, offset = self._rng.choice(("kill", "full")), self._rng.randrange(self.length)
        again = self._rng.random() < 0.25
        before = self._version
        answer = self._save(f"{mode} at {offset}", again, mode, offset)
        end = "killed" if answer["killed"] else "disk full" if answer["problem"] else "written"
        self.ends[end] += 1
        what = f"{mode} at {offset} of {self.length}{' of the same step' if again else ''}: {answer}"
        if version_of(self.root) not in (before, self._version):
            self.lost.append(f"{what}: the newest is {version_of(self.root)}")
        self._save(what, again=self._rng.random() < 0.25)

    def flip(self) -> None:
        """One bit of the newest checkpoint: it must be refused, and an older one taken."""
        newest, earlier = list_checkpoints(self.root)[:2]
        files = sorted(newest.iterdir())
        # as many in small files as in large ones: lists, the state, headers
        (file,) = self._rng.sample(files, 1)
        content = bytearray(file.read_bytes())
        bit = self._rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        original = file.read_bytes()
        file.write_bytes(content)
        self.flips += 1
        try:
            read_checkpoint(newest)
            self.missed.append(f"bit {bit} of {file.name}")
        except CheckpointError:
            if find_checkpoint(self.root) != earlier:
                self.missed.append(f"bit {bit} of {file.name}: the one before is not taken")
        finally:
            file.write_bytes(original)


def run(
    seed: int, folder: Path, *, offsets: int = OFFSETS, flips: int = FLIPS, minutes: float = 60.0,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Interrupt so many checkpoints and flip so many bits, as far as the minutes allow; -> counts."""
    disk = Disk(folder, random.Random(seed))
    deadline = time.monotonic() + 60 * minutes
    try:
        while disk.ends.total() < offsets and time.monotonic() < deadline:
            disk.interrupt()
            if disk.ends.total() % TELL_EVERY == 0:
                tell(disk.counts())
        while disk.flips < flips and time.monotonic() < deadline:
            disk.flip()
        return disk.counts()
    finally:
        disk.close()


def _child(shim: ctypes.CDLL, root: Path, order: dict[str, Any], out: int) -> None:
    """Write one checkpoint, and say how it went."""
    shim.chaos_arm(os.fsencode(root), ctypes.c_longlong(order["offset"]), MODES[order["mode"]])
    said: dict[str, Any] = {"problem": None, "crash": None}
    try:
        save(root, order["step"], order["version"])
    except (CheckpointError, SafetensorError, OSError) as error:  # as the agent and the trainer do
        said["problem"] = str(error)
    except Exception as error:  # it is what the campaign looks for
        said["crash"] = f"{type(error).__name__}: {error}"
    os.write(out, json.dumps({**said, "seen": shim.chaos_seen()}).encode())


def main() -> None:
    """Process entry: orders from standard input, one answer a line."""
    die_with_parent(int(sys.argv[1]))
    torch.set_num_threads(1)
    shim = ctypes.CDLL(sys.argv[2])
    shim.chaos_seen.restype = ctypes.c_longlong
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(shim, Path(sys.argv[3]), json.loads(line), writing)
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as answer:
            said = json.loads(answer.read() or b'{"problem": null, "crash": null, "seen": 0}')
        killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        print(json.dumps({**said, "killed": killed}), flush=True)


if __name__ == "__main__":
    main()
