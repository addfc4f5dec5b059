"""Multiaddresses, parsed strictly: the few forms that a peer can listen on, announce or dial.

    /ip4/203.0.113.7/tcp/31337/p2p/Qm...          /dns4/boot.example.org/udp/31337/quic-v1/p2p/12D3KooW...

Grammar: https://github.com/multiformats/multiaddr; peer ids: https://github.com/libp2p/specs, "peer-ids".
"""

from __future__ import annotations

import enum
import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, cast

import base58

from peer.errors import UserError

HostKind = Literal["ip4", "ip6", "dns", "dns4", "dns6"]
Transport = Literal["tcp", "udp"]

MAX_ADDRESS_CHARS = 512
MAX_PORT = 65535
HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
PEER_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HOST_EXAMPLE = "/ip4/0.0.0.0/tcp/31337"

_SHA2_256 = b"\x12\x20"                             # multihash: code, then 32 bytes
_ED25519_IDENTITY = b"\x00\x24\x08\x01\x12\x20"     # identity multihash of a protobuf that holds an Ed25519 key
_DNS_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_PORT = re.compile(r"0|[1-9][0-9]{0,4}")


@dataclass(frozen=True, kw_only=True)
class HostAddress:
    """Where a daemon listens. `udp` always means QUIC version 1; port 0 lets the system choose."""

    host_kind: HostKind
    host: str
    transport: Transport
    port: int

    def __str__(self) -> str:
        suffix = "/quic-v1" if self.transport == "udp" else ""
        return f"/{self.host_kind}/{self.host}/{self.transport}/{self.port}{suffix}"


@dataclass(frozen=True, kw_only=True)
class PeerAddress(HostAddress):
    """Where a peer can be dialled, and the identity that it must prove there."""

    peer_id: str

    def __str__(self) -> str:
        return f"{super().__str__()}/p2p/{self.peer_id}"


def parse_peer_address(text: str) -> PeerAddress:
    """A multiaddress with a peer id -> PeerAddress.

    Raises:
        UserError: any malformed part; shows the value, the part and an example.
    """
    try:
        return _peer_address(text)
    except ValueError as problem:
        raise UserError(f"{_short(text)!r} is not a peer address: {problem}", f"Example: {PEER_EXAMPLE}") from None


def parse_host_address(text: str) -> HostAddress:
    """A multiaddress without a peer id -> HostAddress; port 0 is allowed.

    Raises:
        UserError: any malformed part; shows the value, the part and an example.
    """
    try:
        return _host_address(text)
    except ValueError as problem:
        raise UserError(f"{_short(text)!r} is not a host address: {problem}", f"Example: {HOST_EXAMPLE}") from None


class Reach(enum.IntEnum):
    """Whom an address serves; the widest first."""

    PUBLIC = 0
    LAN = 1
    LOOPBACK = 2


def reach_of(maddr: str) -> Reach:
    """From where a multiaddress can be dialled, as far as it tells; names count as public."""
    _, kind, host, *_ = maddr.split("/")
    if kind not in ("ip4", "ip6"):
        return Reach.LOOPBACK if host == "localhost" else Reach.PUBLIC
    address = ipaddress.ip_address(host)
    if address.is_loopback or address.is_unspecified:
        return Reach.LOOPBACK
    return Reach.PUBLIC if address.is_global else Reach.LAN


def check_peer_id(peer_id: str) -> None:
    """Raise ValueError unless a peer id is a SHA2-256 or an Ed25519 identity multihash in base58."""
    if not 46 <= len(peer_id) <= 52:
        lengths = "46 (Qm...) or 52 (12D3KooW...)"
        raise ValueError(f"peer id {_short(peer_id)!r} has {len(peer_id)} characters; it must have {lengths}")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        raise ValueError(f"peer id {peer_id!r} is not base58 (no 0, O, I or l)") from None
    if not any(raw.startswith(prefix) and len(raw) == len(prefix) + 32 for prefix in (_SHA2_256, _ED25519_IDENTITY)):
        raise ValueError(f"peer id {peer_id!r} is neither a SHA2-256 nor an Ed25519 multihash")


def _peer_address(text: str) -> PeerAddress:
    host, rest = _leading_host(text)
    if len(rest) < 2 or rest[0] != "p2p":
        found = "/" + "/".join(rest) if rest else "nothing"
        raise ValueError(f"after the port it needs /p2p/<peer id>, but has {found}")
    if len(rest) > 2:
        raise ValueError(f"/{'/'.join(rest[2:])} after the peer id is not supported")
    check_peer_id(rest[1])
    if host.port == 0:
        raise ValueError("port 0 cannot be dialled")
    return PeerAddress(
        host_kind=host.host_kind, host=host.host, transport=host.transport, port=host.port, peer_id=rest[1]
    )


def _host_address(text: str) -> HostAddress:
    host, rest = _leading_host(text)
    if rest:
        raise ValueError(f"it must end after the port, but continues with /{'/'.join(rest)}")
    return host


def _leading_host(text: str) -> tuple[HostAddress, list[str]]:
    """The leading host, transport and port of an address, and the parts after them."""
    kind, *parts = _split(text)
    if kind not in HOST_KINDS:
        raise ValueError(f"it starts with /{kind}; known: " + ", ".join(f"/{known}" for known in HOST_KINDS))
    if len(parts) < 3:
        raise ValueError(f"after /{kind} it needs a host, /tcp or /udp, and a port")
    host, transport, port = parts[:3]
    rest = parts[3:]
    _check_host(kind, host)
    if transport not in ("tcp", "udp"):
        raise ValueError(f"after the host it needs /tcp or /udp, but has /{transport}")
    if not _PORT.fullmatch(port) or int(port) > MAX_PORT:
        raise ValueError(f"port {port!r} must be a number from 0 to {MAX_PORT}")
    if transport == "udp":
        if not rest or rest[0] != "quic-v1":
            raise ValueError(f"/udp/{port} must be followed by /quic-v1")
        rest = rest[1:]
    address = HostAddress(
        host_kind=cast(HostKind, kind), host=host, transport=cast(Transport, transport), port=int(port)
    )
    return address, rest


def _split(text: str) -> list[str]:
    if len(text) > MAX_ADDRESS_CHARS:
        raise ValueError(f"it has {len(text)} characters; the limit is {MAX_ADDRESS_CHARS}")
    if not text.startswith("/"):
        raise ValueError("it must start with '/'")
    parts = text[1:].split("/")
    if "" in parts:
        raise ValueError("it has an empty part ('//', or a '/' at the end)")
    return parts


def _check_host(kind: str, host: str) -> None:
    if kind == "ip4":
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"{host!r} is not an IPv4 address (use /dns4 for a name)") from None
    elif kind == "ip6":
        try:
            zone = ipaddress.IPv6Address(host).scope_id
        except ValueError:
            raise ValueError(f"{host!r} is not an IPv6 address (use /dns6 for a name)") from None
        if zone is not None:
            raise ValueError(f"{host!r} has a zone, which means nothing to other peers")
    else:
        labels = host.split(".")
        if len(host) > 253 or labels[-1].isdigit() or not all(_DNS_LABEL.fullmatch(label) for label in labels):
            raise ValueError(f"{host!r} is not a host name (use /ip4 or /ip6 for a number)")


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
