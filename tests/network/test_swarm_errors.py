"""What a person can mend and only a swarm can tell: exit code 2, no traceback, the value, the remedy."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peer import cli
from peer.checkpoint.store import write_checkpoint
from tests.network.bootstraps import BootstrapProcess
from tests.network.processes import LOOPBACK, JoinedPeer, alive, descendants, environment, until
from tests.network.test_errors import SMALL, said_by


@dataclass(frozen=True, kw_only=True)
class Places:
    """Addresses of live nodes by name, and a peer that trains."""

    folder: Path
    bootstrap: BootstrapProcess
    addresses: dict[str, str]
    resident: JoinedPeer

    def fill(self, text: str, here: Path) -> str:
        marks = {"<here>": str(here), "<resident>": str(self.resident.folder), "<run>": self.bootstrap.run_id[:16]}
        marks["<hash>"] = self.bootstrap.run_id
        marks["<id>"] = self.resident.events("start")[0]["peer_id"]
        marks |= {f"<{name}>": address for name, address in self.addresses.items()}
        for mark, value in marks.items():
            text = text.replace(mark, value)
        return text


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("swarm")
    (folder / "run.yaml").write_text(SMALL)
    command = [sys.executable, "-m", "tests.network.publisher", str(folder), str(folder / "run.yaml")]
    publisher = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
    bootstrap = BootstrapProcess(folder / "bootstrap", SMALL)
    resident = JoinedPeer(folder / "resident", bootstrap.address)
    assert publisher.stdout is not None
    addresses = {"live": bootstrap.address, **json.loads(publisher.stdout.readline())}
    resident.wait_for(lambda: resident.step > 0)
    resident.process.send_signal(signal.SIGSTOP)  # its agent stays in the swarm; the processor is for the tests
    yield Places(folder=folder, bootstrap=bootstrap, addresses=addresses, resident=resident)
    resident.close()
    bootstrap.close()
    publisher.kill()
    publisher.wait()


def _empty_folder(here: Path, _: Places) -> None:
    (here / "nothing").mkdir()


def _copied_key(here: Path, places: Places) -> None:
    shutil.copy(places.resident.identity, here / "copy.key")  # with its mode


def _foreign_checkpoint(here: Path, _: Places) -> None:
    progress = {"round": 3, "step": 3, "tokens": 9, "steps_since_snapshot": 0, "unsent_tokens": [0]}
    state = {
        "run_id": "f" * 64, "lineage_id": "f" * 64, "round": 3, "progress": progress, "origin": {},
        "data": {"seed": 1, "sources": []},
    }  # fmt: skip
    write_checkpoint(here / "old", 3, {"inner": {"parameters": torch.zeros(1)}}, state)


def _nothing(here: Path, _: Places) -> None:
    assert here.is_dir()


IN_THE_SWARM = {
    "manifest hash mismatch": (
        _nothing, f"<live> --run-id {'0' * 64}",
        ("manifest hash mismatch: the swarm runs <hash>, not 0000000000", "check --run-id")),
    "incompatible protocol version": (
        _nothing, "<newer>", ("uses protocol version 999; this atoll speaks 11", "upgrade atoll")),
    "no manifest": (
        _nothing, "<empty>", ("holds no manifest (waited 10 s)", "the address that of an Atoll bootstrap")),
    "identity in use on this machine": (
        _nothing, "<live> --identity-path <resident>/identity.key",
        ("identity in use: <resident>/identity.key belongs to process", "--output-dir")),
    "identity in use elsewhere": (
        _copied_key, "<live> --identity-path <here>/copy.key",
        ("identity in use: a live peer already has the id <id>", "--identity-path")),
    "empty data set": (
        _empty_folder, "<live> --train-files <here>/nothing",
        ("train_files '<here>/nothing' matches no file", "takes files, folders and globs")),
    "model that does not fit": (
        _nothing, "<giant>",
        ("a model of 1340050.3M parameters needs 44928.69 GiB", "GiB free", "smaller model")),
    "device that is not there": (
        _nothing, "<live> --device cuda:9", ("device='cuda:9' is not available: this torch sees", "use auto, cpu")),
    "base in 4 bits of a model that trains whole": (
        _nothing, "<live> --load-in-4bit", ("load_in_4bit=True: this run trains the whole model", "leave it off")),
    "checkpoint of another run": (
        _foreign_checkpoint, "<live> --resume-from-checkpoint <here>/old/checkpoint-3",
        ("belongs to run ffffffffffffffff, not <run>", "without --resume-from-checkpoint")),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_THE_SWARM)
def test_join_says_what_is_wrong_with_the_run(name: str, tmp_path: Path, places: Places) -> None:
    prepare, line, says = IN_THE_SWARM[name]
    prepare(tmp_path, places)
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 100)
    own = [] if "--train-files" in line else ["--train-files", str(text)]
    folder = ["--output-dir", str(tmp_path / "out"), "--host-maddrs", LOOPBACK]
    arguments = ["join", *places.fill(line, tmp_path).split(), *folder, *own]
    flat = " ".join(said_by(name, cli.main, arguments, tmp_path, {}).split())
    for phrase in says:
        assert places.fill(phrase, tmp_path) in flat
    assert places.resident.process.poll() is None  # and no other peer was disturbed


@pytest.mark.parametrize("moment", ["while it imports", "while it looks for the run"])
def test_ctrl_c_while_starting_leaves_nothing_alive(moment: str, tmp_path: Path, places: Places) -> None:
    env: dict[str, str] | None = {} if moment == "while it imports" else None
    peer = JoinedPeer(tmp_path / "early", places.addresses["empty"], env=env)
    begun = {
        "while it imports": lambda: peer.agent is not None,
        "while it looks for the run": lambda: peer.daemon is not None,
    }[moment]
    try:
        peer.wait_for(begun)
        family = descendants(peer.process.pid)
        assert len(family) == (1 if moment == "while it imports" else 2)  # the agent, and its daemon
        peer.signal(signal.SIGINT)
        assert peer.process.wait(10.0) == 130
        until(lambda: not any(map(alive, family)), 5.0, lambda: family)
        assert "Traceback" not in peer.log_text()
    finally:
        peer.close()
