"""What a peer and a bootstrap write is their owner's alone, whatever the umask of the shell."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_files_and_folders_are_private(tmp_path: Path, make_swarm: Callable[..., TestSwarm]) -> None:
    bootstrap = make_swarm(steps=5, wait=2.0).bootstrap()
    peer = JoinedPeer(tmp_path / "private", bootstrap.address, "--save-steps", "5", env={})
    with contextlib.closing(peer):
        peer.wait_for(lambda: len(peer.events("step")) > 10)
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(30.0) == 0, peer.log_text()
    made_by_the_test = {peer.folder / "console.log", bootstrap.folder / "run.yaml", bootstrap.folder / "bootstrap.log"}
    wide = [str(path) for folder in (peer.folder, bootstrap.folder) for path in _all(folder) - made_by_the_test
            if not stat.S_ISLNK(path.lstat().st_mode) and stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert wide == []
    assert any(path.suffix == ".safetensors" for path in _all(peer.folder))
    assert (peer.folder / "agent.log").exists()


def _all(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
