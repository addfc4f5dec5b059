from __future__ import annotations

import os
import socket
import tempfile

import base58
import pytest

from peer.errors import UserError
from peer.protocol.address import parse_peer_address
from peer.system.preflight import check_host_ports, check_output_dir, check_reachable, lock_identity

PEER_ID = base58.b58encode(b"\x12\x20" + bytes(32)).decode()


@pytest.fixture
def listener():
    """A TCP socket that listens on a free loopback port the way libp2p does, sharing it with whoever wants to."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def peer_at(port, host="127.0.0.1", transport="tcp"):
    suffix = "/quic-v1" if transport == "udp" else ""
    return parse_peer_address(f"/ip4/{host}/{transport}/{port}{suffix}/p2p/{PEER_ID}")


def test_an_output_folder_is_created_with_its_parents_and_left_empty(tmp_path):
    check_output_dir(tmp_path / "a" / "b")
    check_output_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_output_folder_that_is_a_file_or_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"output_dir=.*file: is a file, not a folder"):
        check_output_dir(tmp_path / "file")
    with pytest.raises(UserError, match=r"output_dir=.*file/below: cannot be written to: Not a directory") as caught:
        check_output_dir(tmp_path / "file" / "below")
    assert "--output-dir" in caught.value.hint


def test_an_output_folder_without_permission_or_space_is_refused(tmp_path, monkeypatch):
    def no_space(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_space)
    with pytest.raises(UserError, match="cannot be written to: No space left on device"):
        check_output_dir(tmp_path)


def test_a_port_that_another_program_shares_is_still_in_use(listener):
    port = listener.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(UserError, match=f"cannot listen on /ip4/{host}/tcp/{port}: .* is in use") as caught:
            check_host_ports([f"/ip4/{host}/tcp/{port}"])
        assert "--host-maddrs" in caught.value.hint


def test_a_udp_port_in_use_is_found():
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="is in use by another program"):
            check_host_ports([f"/ip4/127.0.0.1/udp/{other.getsockname()[1]}/quic-v1"])


def test_a_port_whose_last_connections_still_linger_is_free(listener):
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = listener.accept()
    served.close()              # the side that closes first keeps the port in TIME_WAIT
    assert client.recv(1) == b""
    client.close()
    listener.close()
    check_host_ports([f"/ip4/127.0.0.1/tcp/{port}"])


def test_port_zero_is_always_free():
    check_host_ports(["/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"])


def test_every_bad_listening_address_is_named(listener):
    port = listener.getsockname()[1]
    with pytest.raises(UserError) as caught:
        check_host_ports([f"/ip4/127.0.0.1/tcp/{port}", "/ip4/203.0.113.7/tcp/0", "/dns4/me.example.org/tcp/0"])
    assert f"port {port} is in use" in caught.value.what
    assert "203.0.113.7 is not an address of this machine" in caught.value.hint
    assert "a listening address needs /ip4 or /ip6" in caught.value.hint


def test_a_reachable_peer_is_returned_and_a_closed_one_left_out(listener):
    open_peer = peer_at(listener.getsockname()[1])
    pauses = []
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))         # bound but not listening: refuses connections
        closed_peer = peer_at(reserved.getsockname()[1])
        assert check_reachable([closed_peer, open_peer], attempts=2, pause=pauses.append) == [open_peer]
        assert pauses == [1.0]
        with pytest.raises(UserError, match=r"cannot join: /ip4/127.0.0.1/tcp/.*: connection refused") as caught:
            check_reachable([closed_peer], pause=pauses.append)
    assert "(tried 3 times)" in caught.value.hint


def test_a_peer_that_answers_at_the_last_try_is_reachable():
    answers = iter(["connection refused", "no answer", None])
    assert check_reachable([peer_at(1)], connect=lambda *_: next(answers), pause=lambda _: None) == [peer_at(1)]


def test_silence_is_told_with_the_seconds_waited():
    waits = []

    def silent(_, timeout_s):
        waits.append(timeout_s)
        return "no answer"

    with pytest.raises(UserError) as caught:
        check_reachable([peer_at(31337, "203.0.113.7")], connect=silent, pause=lambda _: None)
    assert waits == [5.0, 5.0, 5.0]
    assert caught.value.render() == (
        f"atoll: cannot join: no answer from /ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID} within 15 s\n"
        "  The address answers no TCP connection. Check that the port is open on that host, or ask the organiser for "
        "another bootstrap.\n"
        "  (tried 3 times)"
    )


def test_when_nobody_answers_each_address_is_listed_with_its_reason():
    reasons = {1: "no answer", 2: "connection refused"}
    with pytest.raises(UserError, match="none of 2 addresses answers") as caught:
        check_reachable([peer_at(1), peer_at(2)], connect=lambda peer, _: reasons[peer.port], pause=lambda _: None)
    assert f"{peer_at(1)}: no answer\n{peer_at(2)}: connection refused\n" in caught.value.hint


def test_quic_addresses_are_taken_on_trust():
    def never(*_):
        raise AssertionError("a QUIC address was probed over TCP")

    assert check_reachable([peer_at(1, transport="udp")], connect=never) == [peer_at(1, transport="udp")]


def test_an_identity_runs_once_and_is_free_again_after_close(tmp_path):
    key = tmp_path / "new" / "identity.key"
    with lock_identity(key), pytest.raises(UserError) as caught:
        lock_identity(key)
    assert caught.value.what == f"identity in use: {key} belongs to process {os.getpid()}, which is still running"
    assert "--output-dir" in caught.value.hint
    assert not key.exists()
    again = lock_identity(key)
    again.close()
    again.close()
    assert (tmp_path / "new" / "identity.key.lock").stat().st_mode & 0o777 == 0o600


def test_an_identity_below_a_file_cannot_be_locked(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be locked"):
        lock_identity(tmp_path / "file" / "identity.key")
