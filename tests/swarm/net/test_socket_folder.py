from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from peer.errors import UserError
from peer.swarm.net import socket_folder
from peer.swarm.net.socket_folder import open_socket_folder, sweep_stale_sockets
from tests.network.chaos.namespaces import Namespace


@pytest.mark.parametrize("listed", [True, False], ids=["own network namespace", "another"])
def test_only_sockets_of_dead_daemons_are_swept(tmp_path, monkeypatch, listed):
    if not listed:  # as the kernel shows the sockets of others
        header = socket_folder.UNIX_SOCKETS.read_text().splitlines()[0]
        (tmp_path / "unix").write_text(f"{header}\n")
        monkeypatch.setattr(socket_folder, "UNIX_SOCKETS", tmp_path / "unix")
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as other:
        live.bind(str(tmp_path / "p2pd-live.sock"))
        live.listen()
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "p2pd-dead.sock"))
        with socket.socket(socket.AF_UNIX) as starting:
            starting.bind(str(tmp_path / "p2pd-starting.sock"))
        for name in ("live", "dead"):
            os.utime(tmp_path / f"p2pd-{name}.sock", (0.0, 0.0))
        (tmp_path / "p2pclient.txt").touch()
        assert sweep_stale_sockets(tmp_path) == 1
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "unix") == [
            "other.sock", "p2pclient.txt", "p2pd-live.sock", "p2pd-starting.sock"
        ]  # fmt: skip
        assert sweep_stale_sockets(tmp_path) == 0


def test_a_folder_that_cannot_hold_sockets_is_passed_over(tmp_path_factory, monkeypatch, caplog):
    tmp_path = tmp_path_factory.mktemp("s")  # short: a socket's path has at most 108 bytes
    monkeypatch.setattr(socket_folder, "OTHERS", (tmp_path / "other",))
    (tmp_path / "other").mkdir()
    name = f"atoll-{os.getuid()}"

    def open_below(root):
        monkeypatch.setenv("TMPDIR", str(root))
        return open_socket_folder()

    assert open_below(tmp_path) == tmp_path / name
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    (tmp_path / "open" / name).mkdir(parents=True)  # others could listen there
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / name).symlink_to(tmp_path / name)
    reasons = {deep: "its path has", tmp_path / "open": "not a folder of this user", tmp_path / "link": "not a folder",
               Path("/proc"): "No such file"}  # fmt: skip
    for root, reason in reasons.items():
        caplog.clear()
        assert open_below(root) == tmp_path / "other" / name
        assert reason in caplog.text
    monkeypatch.setattr(socket_folder, "OTHERS", ())
    with pytest.raises(UserError, match="cannot hold sockets: its path has") as refused:
        open_below(deep)
    assert "TMPDIR" in refused.value.hint


def test_a_socket_of_another_network_namespace_is_live(tmp_path):
    # its name is not in this namespace's /proc/net/unix, as with containers that share a temporary folder
    other = Namespace("other")
    try:
        with other.entered():
            live = socket.socket(socket.AF_UNIX)
            live.bind(str(tmp_path / "p2pd-live.sock"))
            live.listen()
        with live:
            assert str(tmp_path) not in Path("/proc/net/unix").read_text()
            os.utime(tmp_path / "p2pd-live.sock", (0.0, 0.0))
            assert sweep_stale_sockets(tmp_path) == 0
        assert sweep_stale_sockets(tmp_path) == 1
    finally:
        other.close()
