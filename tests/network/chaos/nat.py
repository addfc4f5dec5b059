"""The address translation of a home router: what goes out is remembered, and only answers to it come in.

A port is mapped once for all destinations, and lets in only the address and port that something was sent to
("address- and port-dependent filtering" of RFC 4787); TCP and UDP over IPv4, nothing else.
"""

from __future__ import annotations

import socket
import struct

TCP, UDP = 6, 17
FIRST_PORT = 40000
Endpoint = tuple[int, bytes, int]  # protocol, address, port


class Nat:
    """Translates packets of one private address.

    Args:
        private, public: its address inside and outside.
    """

    def __init__(self, private: str, public: str) -> None:
        self._private, self._public = socket.inet_aton(private), socket.inet_aton(public)
        self._outside: dict[tuple[int, int], int] = {}
        self._inside: dict[tuple[int, int], int] = {}
        self._asked: set[tuple[int, int, bytes, int]] = set()

    def outward(self, packet: bytes) -> bytes | None:
        """What leaves the router for a packet from inside; None if it drops it."""
        found = _ports(packet)
        if found is None or packet[12:16] != self._private:
            return None
        protocol, source, target = found
        port = self._outside.get((protocol, source))
        if port is None:
            port = self._outside[(protocol, source)] = FIRST_PORT + len(self._outside)
            self._inside[(protocol, port)] = source
        self._asked.add((protocol, port, packet[16:20], target))
        return _rewritten(packet, 12, self._public, 0, port)

    def inward(self, packet: bytes) -> bytes | None:
        """What the machine inside gets of a packet from outside; None unless it is an answer."""
        found = _ports(packet)
        if found is None or packet[16:20] != self._public:
            return None
        protocol, source, target = found
        if (protocol, target, packet[12:16], source) not in self._asked:
            return None
        return _rewritten(packet, 16, self._private, 2, self._inside[(protocol, target)])


def _ports(packet: bytes) -> tuple[int, int, int] | None:
    """(protocol, source port, target port) of an unfragmented TCP or UDP packet over IPv4."""
    if len(packet) < 28 or packet[0] >> 4 != 4 or packet[9] not in (TCP, UDP) or packet[6] & 0x3F or packet[7]:
        return None
    source, target = struct.unpack_from("!HH", packet, 4 * (packet[0] & 15))
    return packet[9], source, target


def _rewritten(packet: bytes, address_at: int, address: bytes, port_at: int, port: int) -> bytes:
    """The packet with another address and port, its checksums brought up to date (RFC 1624)."""
    out = bytearray(packet)
    transport = 4 * (packet[0] & 15)
    old = packet[address_at : address_at + 4]
    out[address_at : address_at + 4] = address
    _patch(out, 10, old, address)
    place = transport + port_at
    old += packet[place : place + 2]
    struct.pack_into("!H", out, place, port)
    checksum_at = transport + (16 if packet[9] == TCP else 6)
    if packet[9] == TCP or out[checksum_at : checksum_at + 2] != b"\0\0":
        _patch(out, checksum_at, old, address + out[place : place + 2])
    return bytes(out)


def _patch(out: bytearray, at: int, old: bytes, new: bytes) -> None:
    total = ~int.from_bytes(out[at : at + 2], "big") & 0xFFFF
    for start in range(0, len(old), 2):
        total += ~int.from_bytes(old[start : start + 2], "big") & 0xFFFF
        total += int.from_bytes(new[start : start + 2], "big")
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", out, at, ~total & 0xFFFF)
