from __future__ import annotations

import socket
from pathlib import Path

from peer.swarm.sockets import sweep_stale_sockets
from tests.network.chaos.namespaces import Namespace


def test_only_sockets_of_dead_daemons_are_swept(tmp_path):
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as other:
        live.bind(str(tmp_path / "hivemind-p2pd-live.sock"))
        live.listen()
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "hivemind-p2pd-dead.sock"))
        (tmp_path / "hivemind-p2pclient.txt").touch()
        assert sweep_stale_sockets(tmp_path) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "hivemind-p2pclient.txt", "hivemind-p2pd-live.sock", "other.sock"
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
            assert sweep_stale_sockets(tmp_path) == 0
        assert sweep_stale_sockets(tmp_path) == 1
    finally:
        other.close()
