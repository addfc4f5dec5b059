from __future__ import annotations

import socket

from peer.swarm.sockets import sweep_stale_sockets


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
