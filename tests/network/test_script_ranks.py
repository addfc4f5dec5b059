"""A user's own script on several devices: `torchrun`, with DistributedDataParallel and with FSDP2."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peer.checkpoint.store import list_checkpoints, read_checkpoint
from peer.explain.journal import ROUNDS_FILE
from tests.network.bootstraps import BootstrapProcess
from tests.network.processes import descendants, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples/torchrun_loop.py")
STEPS = 40  # of a round: before the first one is merged, losses are a peer's own
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Script:
    """The example as a child in a session of its own."""

    def __init__(self, folder: Path, address: str, *flags: str, ranks: int = 1) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0",
                       "ATOLL_NAT_PORT_MAP": "false", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        command = [sys.executable, *(TORCHRUN if ranks > 1 else ()), SCRIPT, "--join", address]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--output-dir", str(folder), *flags], env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def rounds(self) -> int:
        path = self.folder / ROUNDS_FILE
        return path.read_text().count('"committed"') if path.exists() else 0

    @property
    def text(self) -> str:
        return self.log.read_text()

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        for pid in descendants(self.process.pid):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if f"RANK={number}".encode() in variables and SCRIPT.encode() in command:
                return pid
        raise AssertionError(self.text)

    def close(self) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            if self.process.poll() is None or pid != self.process.pid:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(folder: Path, stack: ExitStack, rounds: int) -> BootstrapProcess:
    subprocess.run(
        [sys.executable, SCRIPT, "--init", str(folder / "run"), "--rounds", str(rounds)], check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    text = (folder / "run/run.yaml").read_text().replace("steps_per_round: 20", f"steps_per_round: {STEPS}")
    return stack.enter_context(closing(BootstrapProcess(folder / "bootstrap", text)))


def test_the_ranks_of_a_script_make_the_steps_of_one_process(tmp_path: Path, stack: ExitStack) -> None:
    """Each is alone at first, so that its steps are its own; then all resume, with another number of ranks."""
    bootstrap = opened(tmp_path, stack, rounds=40)

    def start(name: str, ranks: int, *flags: str) -> Script:
        return stack.enter_context(closing(Script(tmp_path / name, bootstrap.address, *flags, ranks=ranks)))

    losses = {}
    for name, ranks, flags in (("one", 1, ()), ("copies", 2, ()), ("parts", 2, ("--fsdp",))):
        script = start(name, ranks, "--steps", str(STEPS), *flags)
        assert script.process.wait(120.0) == 0, script.text
        assert script.rounds == 0
        losses[name] = json.loads((script.folder / "losses.json").read_text())
    assert len(losses["one"]) == STEPS
    assert losses["one"][-1] < losses["one"][0] / 2
    for name in ("copies", "parts"):
        assert losses[name] == pytest.approx(losses["one"], abs=1e-5)
    again = [start("one", 2, "--fsdp"), start("copies", 1, "--seed", "2"), start("parts", 2, "--seed", "3")]
    for script in again:
        assert script.process.wait(300.0) == 0, script.text
        assert f"begins at step {STEPS}, round" in script.text
        assert script.rounds >= 2
    one, *others = (load_file(script.folder / "model.safetensors") for script in again)
    assert all(other.keys() == one.keys() and len(one) == 4 for other in others)
    assert all(bool((other[name] == one[name]).all()) for other in others for name in one)


def test_ranks_stop_together_and_end_when_one_dies(tmp_path: Path, stack: ExitStack) -> None:
    bootstrap = opened(tmp_path, stack, rounds=100000)

    def start(name: str, ranks: int, *flags: str) -> Script:
        return stack.enter_context(closing(Script(tmp_path / name, bootstrap.address, *flags, ranks=ranks)))

    pair, other, third = start("pair", 2, "--fsdp"), start("other", 1), start("third", 1)
    scripts = (pair, other, third)
    until(lambda: min(script.rounds for script in scripts) >= 3, 200.0, lambda: pair.text + other.text)
    pair.process.send_signal(signal.SIGINT)
    pair.process.wait(60.0)
    assert pair.text.count("KeyboardInterrupt") >= 2
    checkpoint, *_ = list_checkpoints(pair.folder / "checkpoints")
    _, state = read_checkpoint(checkpoint)
    pair = start("pair", 2)
    until(lambda: pair.text.count("begins at step") == 2, 200.0, lambda: pair.text)
    step, _ = map(int, re.findall(r"begins at step (\d+), round (\d+)", pair.text)[-1])
    assert step == state["progress"]["step"] > STEPS
    began = pair.rounds
    until(lambda: pair.rounds >= began + 2, 200.0, lambda: pair.text)
    os.kill(pair.rank(1), signal.SIGKILL)
    assert pair.process.wait(60.0) != 0
    assert "exitcode  : 1 " in pair.text  # rank 0 has seen it, and torchrun did not have to kill it after 30 s
    assert "Signal 9 (SIGKILL) received by PID" in pair.text
    before = min(other.rounds, third.rounds)
    until(lambda: min(other.rounds, third.rounds) >= before + 3, 100.0, lambda: other.text)
