from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from peer.swarm.net import stale_sockets
from peer.swarm.net.stale_sockets import sweep_stale_sockets
from tests.network.chaos.namespaces import Namespace


@pytest.mark.parametrize("listed", [True, False], ids=["own network namespace", "another"])
def test_only_sockets_of_dead_daemons_are_swept(tmp_path, monkeypatch, listed):
    if not listed:  # as the kernel shows the sockets of others
        header = stale_sockets.UNIX_SOCKETS.read_text().splitlines()[0]
        (tmp_path / "unix").write_text(f"{header}\n")
        monkeypatch.setattr(stale_sockets, "UNIX_SOCKETS", tmp_path / "unix")
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


def test_a_socket_of_another_network_namespace_is_live(tmp_path):
    # its name is not in this namespace's /proc/net/unix, as with containers that share a temporary folder
    other = Namespace("other")
    try:
        with other.entered():
            live = socket.socket(socket.AF_UNIX)
            live.bind(str(tmp_path / "hivemind-p2pd-live.sock"))
            live.listen()
        with live:
            assert str(tmp_path) not in Path("/proc/net/unix").read_text()
            os.utime(tmp_path / "hivemind-p2pd-live.sock", (0.0, 0.0))
            assert sweep_stale_sockets(tmp_path) == 0
        assert sweep_stale_sockets(tmp_path) == 1
    finally:
        other.close()
