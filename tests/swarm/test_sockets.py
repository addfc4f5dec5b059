from __future__ import annotations

import os
import socket

import pytest

from peer.swarm import sockets
from peer.swarm.sockets import sweep_stale_sockets


@pytest.mark.parametrize("listed", [True, False], ids=["own network namespace", "another"])
def test_only_sockets_of_dead_daemons_are_swept(tmp_path, monkeypatch, listed):
    if not listed:  # as the kernel shows the sockets of others
        header = sockets.UNIX_SOCKETS.read_text().splitlines()[0]
        (tmp_path / "unix").write_text(f"{header}\n")
        monkeypatch.setattr(sockets, "UNIX_SOCKETS", tmp_path / "unix")
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as other:
        live.bind(str(tmp_path / "hivemind-p2pd-live.sock"))
        live.listen()
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "hivemind-p2pd-dead.sock"))
        with socket.socket(socket.AF_UNIX) as starting:
            starting.bind(str(tmp_path / "hivemind-p2pd-starting.sock"))
        for name in ("live", "dead"):
            os.utime(tmp_path / f"hivemind-p2pd-{name}.sock", (0.0, 0.0))
        (tmp_path / "hivemind-p2pclient.txt").touch()
        assert sweep_stale_sockets(tmp_path) == 1
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "unix") == [
            "hivemind-p2pclient.txt", "hivemind-p2pd-live.sock", "hivemind-p2pd-starting.sock", "other.sock"
        ]  # fmt: skip
        assert sweep_stale_sockets(tmp_path) == 0
