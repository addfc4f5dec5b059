"""Every command of README and docs, typed as a page has it, in the page's order: `make long`, or `-k README` for one.

Each page is followed in a folder of its own, beside a run that another person has opened, with two peers. `bash` reads
the lines; commands that stay (the bootstrap, a join) stay until the page ends, as in a terminal of their own. What a
reader replaces (addresses) is replaced; free ports, and less work for the simulator, are added behind the command.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.cli import COMMANDS
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import LOOPBACK, TEXT, JoinedPeer, environment, until
from tests.pages import PAGES, ROOT, Line, lines

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
FOLLOWED = [page for page in PAGES if any(not line.needs for line in lines(page))]
SMALL = MANIFEST.format(hidden=16, recipe=DILOCO, steps=10, wait=2.0, total="")
ADDED = {
    "atoll-bootstrap": f"--host-maddrs {LOOPBACK} --http 127.0.0.1:0 --no-nat-port-map --json",
    "atoll compare": "--tokens 5k --seeds 1",
    "atoll simulate": "--tokens 20k",
}
FRIENDS, OWN = r"/ip4/203\.0\.113\.7/\S+", r"/ip4/127\.0\.0\.1/tcp/31337/p2p/\S+|\bADDRESS\b"
SHIM = """#!/bin/sh
case "{name} $1" in {cases} esac
exec {python} -m {module} "$@"
"""


class Reader:
    """A person who follows one page."""

    def __init__(self, folder: Path, friends_address: str) -> None:
        self.folder, self.friends, self.own, self.page = folder, friends_address, friends_address, ""
        self.staying: list[subprocess.Popen[str]] = []
        self.joined: list[Path] = []
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "run.yaml").write_text(SMALL)
        (folder / "books").mkdir()
        for name in ("books/one.txt", "shakespeare.txt"):
            (folder / name).write_text(TEXT * 500)
        programs = folder / "bin"
        programs.mkdir()
        for name, module in (("atoll", "peer.cli"), ("atoll-bootstrap", "bootstrap.cli")):
            cases = " ".join(f'"atoll-bootstrap {command}") ;;' for command in COMMANDS)
            cases += "".join(f' "{key}"*) set -- "$@" {more};;' for key, more in ADDED.items())
            (programs / name).write_text(SHIM.format(name=name, cases=cases, python=sys.executable, module=module))
            (programs / name).chmod(0o700)
        here = 2 - int(time.time() // 3600 % 24)  # two o'clock at night: within all active hours of the pages
        self.environment = environment({
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT), "HOME": str(folder), "TZ": f"HERE{-here}", "ATOLL_HOST_MADDRS": LOOPBACK,
            "ATOLL_NAT_PORT_MAP": "false", "ATOLL_SAVE_STEPS": "20", "ATOLL_LOGGING_STEPS": "1",
        })  # fmt: skip

    def follow(self, line: Line) -> None:
        text = re.sub(FRIENDS, self.friends, line.text)
        text = re.sub(OWN, self.own, text).replace("YOUR.PUBLIC.IP", "127.0.0.1")
        text = text.replace("http://127.0.0.1:8080", self.page)
        if line.words[:2] == ["atoll", "receipts"]:
            self._met()
        if line.words[0] == "atoll-bootstrap" and line.words[1] not in COMMANDS:
            self._open(text)
        elif line.words[:2] == ["atoll", "join"] and "--max-rounds" not in line.words:  # with it, one that ends
            words = line.words
            self._join(text, words[words.index("--output-dir") + 1] if "--output-dir" in words else "runs/peer")
        else:
            self._run(text)

    def close(self) -> None:
        for child in self.staying:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def leave(self) -> None:
        """Once they have met: Ctrl-C in every terminal, the newest first."""
        self._met()
        for child in reversed(self.staying):
            os.killpg(child.pid, signal.SIGINT)
            assert child.wait(120) in (0, 130), self._logs()

    def _met(self) -> None:
        """Each peer that was joined has averaged with another."""
        for folder in self.joined:
            rounds = folder / "rounds.jsonl"
            until(lambda file=rounds: file.exists() and '"committed"' in file.read_text(), 400, self._logs)

    def _start(self, text: str, stdout: int | None) -> subprocess.Popen[str]:
        with (self.folder / f"{len(self.staying)}.log").open("w") as log:
            child = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=stdout or log, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self.staying.append(child)
        return child

    def _open(self, text: str) -> None:
        child = self._start(text, subprocess.PIPE)
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first, self._logs()
        started = json.loads(first)
        self.own, self.page = started["addresses"][0], started.get("page", "")

    def _join(self, text: str, folder: str) -> None:
        child = self._start(text, None)
        self.joined.append(self.folder / folder)

        def saved() -> bool:
            assert child.poll() is None, f"{text}\n{self._logs()}"
            return any(self.joined[-1].glob("checkpoints/*/checkpoint-*"))

        until(saved, 400, lambda: f"{text}\n{self._logs()}")

    def _run(self, text: str) -> None:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", text], cwd=self.folder, env=self.environment, input="Is it?\n",
            text=True, capture_output=True, timeout=900, check=False,
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), f"{text}\n{done.stdout}\n{done.stderr}"

    def _logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


@pytest.fixture(scope="module")
def friends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, a peer's folder) of a run that another person has opened, and in which two peers train."""
    folder = tmp_path_factory.mktemp("friends")
    bootstrap, peers = BootstrapProcess(folder / "bootstrap", SMALL), list[JoinedPeer]()
    try:
        for name in ("ada", "bea"):
            peers.append(JoinedPeer(folder / name, bootstrap.address, "--save-steps", "20", "--torch-threads", "1"))
        peer = peers[0]
        peer.wait_for(lambda: len(peer.committed) > 0 and any(peer.folder.glob("checkpoints/*/checkpoint-*")), 400)
        yield bootstrap.address, peer.folder
    finally:
        for peer in peers:
            peer.close()
        bootstrap.close()


@pytest.fixture
def reader(tmp_path: Path, friends: tuple[str, Path]) -> Iterator[Reader]:
    reader = Reader(tmp_path, friends[0])
    try:
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_a_page_works_as_it_is_written(
    reader: Reader, friends: tuple[str, Path], page: Path
) -> None:
    followed = [line for line in lines(page) if not line.needs]
    if not any(line.words[:2] == ["atoll", "join"] for line in followed):  # a reader who has joined before
        (reader.folder / "runs").mkdir()
        (reader.folder / "runs/peer").symlink_to(friends[1])
    for line in followed:
        reader.follow(line)
    reader.leave()
