"""The internet of the tests: that it does what the tests on it rely on."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.network.chaos.namespaces import Internet, Namespace
from tests.network.chaos.nat import FIRST_PORT, TCP, UDP, Nat
from tests.network.chaos.relay import Link, wire_bytes

PORT = 999
SERVER = """
import socket
server = socket.create_server(("", 999))
print("ready", flush=True)
while True:
    connection, address = server.accept()
    connection.sendall(address[0].encode())
    connection.close()
"""


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as net:
        yield net


def serve(namespace: Namespace) -> subprocess.Popen[bytes]:
    with namespace.entered():
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def seen_by(internet: Internet, name: str, far: str, timeout_s: float = 1.0) -> str | None:
    """The address that a far host sees this one at; None when they do not connect."""
    with internet.hosts[name].entered():
        try:
            with socket.create_connection((internet.addresses[far], PORT), timeout_s) as connection:
                return connection.recv(100).decode()
        except TimeoutError:
            return None


def test_links_cuts_and_translation(internet: Internet) -> None:
    internet.host("a")
    internet.host("b")
    internet.behind("home", Link(delay_ms=5.0), nat=True)
    servers = [serve(internet.hosts[name]) for name in ("a", "b", "home")]
    try:
        assert seen_by(internet, "a", "b") == internet.addresses["a"]
        assert seen_by(internet, "home", "a") == internet.addresses["home"]
        assert seen_by(internet, "a", "home") is None
        internet.cut("a", "b")
        assert seen_by(internet, "b", "a") is None  # the answers do not come
        internet.heal()
        assert seen_by(internet, "b", "a", 5.0) == internet.addresses["b"]
        internet.relays["home"].set(replace(Link(), mute=True))
        assert seen_by(internet, "home", "b") is None
        internet.relays["home"].set(Link())
        assert seen_by(internet, "home", "b", 5.0) == internet.addresses["home"]
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.mark.parametrize(
    ("length", "pieces"), [(40, 1), (1500, 1), (1501, 2), (52 + 2 * 1448, 2), (52 + 45 * 1448, 45)]
)
def test_large_packets_count_with_the_headers_of_their_pieces(length: int, pieces: int) -> None:
    assert wire_bytes(length) == length + 52 * (pieces - 1)


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def packet(protocol: int, source: tuple[str, int], target: tuple[str, int], body: bytes = b"abcd") -> bytes:
    """An IPv4 packet with right checksums."""
    ends = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    size = 20 if protocol == TCP else 8
    middle = bytes(8) + bytes([0x50, 2, 1, 0]) if protocol == TCP else struct.pack("!H", size + len(body))
    ports = struct.pack("!HH", source[1], target[1])
    tail = b"\0\0" if protocol == TCP else b""
    whole = ports + middle + b"\0\0" + tail + body
    at = 16 if protocol == TCP else 6
    found = checksum(ends + struct.pack("!BBH", 0, protocol, len(whole)) + whole)
    whole = whole[:at] + struct.pack("!H", found) + whole[at + 2 :]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(whole), 1, 0, 64, protocol, 0) + ends
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + whole


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_translated_packets_have_right_checksums(protocol: int) -> None:
    rng, nat = random.Random(protocol), Nat("10.0.0.2", "20.0.1.2")
    for number in range(50):
        port, far = rng.randrange(1, 65536), (f"20.0.2.{rng.randrange(1, 255)}", rng.randrange(1, 65536))
        body = rng.randbytes(2 * rng.randrange(0, 600))
        out = nat.outward(packet(protocol, ("10.0.0.2", port), far, body))
        assert out == packet(protocol, ("20.0.1.2", FIRST_PORT + number), far, body)
        answer = nat.inward(packet(protocol, far, ("20.0.1.2", FIRST_PORT + number), body))
        assert answer == packet(protocol, far, ("10.0.0.2", port), body)


def test_only_answers_come_in() -> None:
    nat = Nat("10.0.0.2", "20.0.1.2")
    assert nat.outward(packet(TCP, ("10.0.0.2", 4001), ("20.0.2.2", 80))) is not None
    for source in (("20.0.2.3", 80), ("20.0.2.2", 81)):
        assert nat.inward(packet(TCP, source, ("20.0.1.2", FIRST_PORT))) is None
    assert nat.inward(packet(TCP, ("20.0.2.2", 80), ("20.0.1.2", 4001))) is None
    assert nat.outward(packet(TCP, ("10.0.0.3", 4001), ("20.0.2.2", 80))) is None
