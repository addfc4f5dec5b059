"""The public addresses of a rented machine whose provider maps ports and says so in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from peer.errors import UserError
from peer.protocol.address import parse_host_address
from peer.settings import announced_address


def detect_direct_port(port: int, environ: Mapping[str, str]) -> int:
    """The port at which others reach `port` of a rented machine; see `detect_announce_maddrs`."""
    for prefix in ("VAST_TCP_PORT_", "RUNPOD_TCP_PORT_"):
        mapped = environ.get(f"{prefix}{port}", "")
        if port and mapped.isdecimal() and 0 < int(mapped) < 65536:
            return int(mapped)
    return port


def detect_announce_maddrs(host_maddrs: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The public addresses of a rented machine whose provider maps ports and says so in the environment.

    Vast.ai sets PUBLIC_IPADDR and VAST_TCP_PORT_<n>, RunPod RUNPOD_PUBLIC_IP and RUNPOD_TCP_PORT_<n>, where <n> is the
    port inside the machine; so only listening addresses with a fixed TCP port can be found.

    Raises:
        UserError: the provider's variables do not make an address.
    """
    found = []
    for host in map(parse_host_address, host_maddrs):
        for ip_name, port_prefix in (("PUBLIC_IPADDR", "VAST_TCP_PORT_"), ("RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_")):
            public_ip, port = environ.get(ip_name), environ.get(f"{port_prefix}{host.port}")
            if host.transport != "tcp" or not public_ip or not port:
                continue
            kind = "ip6" if ":" in public_ip else "ip4"
            try:
                found.append(announced_address(f"/{kind}/{public_ip}/tcp/{port}"))
            except ValueError as error:
                where = f"{ip_name}={public_ip!r} and {port_prefix}{host.port}={port!r}"
                raise UserError(f"{where} do not make an address: {error}", "Set --announce-maddrs yourself.") from None
    return tuple(dict.fromkeys(found))
