"""Where the page listens: parsed and bound before anything else of the node starts."""

from __future__ import annotations

import ipaddress
import socket

from peer.errors import UserError

BACKLOG = 128


def parse_place(text: str) -> tuple[str, int]:
    """`127.0.0.1:8080`, `[::]:8080` or `8080` (on loopback) -> (host, port).

    Raises:
        UserError: it is none of these.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = ""
    if not host or not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UserError(f"--http={text}: no address and port", "such as 127.0.0.1:8080, 0.0.0.0:8080 or [::]:8080")
    return host, int(port)


def listen(place: tuple[str, int]) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--http: cannot listen at {place[0]}:{place[1]}: {error.strerror}", "choose another port or address"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """What a person types into a browser on this machine."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"
