"""The first message to an agent, by a person's settings: where the run is found, and as whom."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from peer.link.messages import Start
from peer.protocol.address import PeerAddress
from peer.protocol.invitation import MAX_TOKEN_CHARS
from peer.protocol.yaml_text import read_limited
from peer.run.limits import limits_of
from peer.run.rented import detect_announce_maddrs, detect_direct_port
from peer.settings import PeerSettings
from peer.system.output_files import named_path


def start_message(settings: PeerSettings, addresses: Sequence[PeerAddress], identity_path: Path) -> Start:
    """-> the message. Raises UserError: an address, or the file of an invitation, is of no use."""
    return Start(
        initial_peers=tuple(str(address) for address in addresses),
        host_maddrs=settings.host_maddrs,
        announce_maddrs=settings.announce_maddrs or detect_announce_maddrs(settings.host_maddrs, os.environ),
        identity_path=str(identity_path),
        nickname=settings.nickname,
        directory=str(settings.output_dir),
        run_id=settings.run_id,
        run=settings.run,
        nat_port_map=settings.nat_port_map,
        client_mode=settings.client_mode,
        direct_port=settings.direct_port if settings.direct else None,
        mapped_port=detect_direct_port(settings.direct_port, os.environ),
        limits=limits_of(settings),
        invitation=token_of(settings),
    )


def token_of(settings: PeerSettings) -> str:
    """The invitation, where it is given as a file its content; empty: there is none. Raises UserError."""
    given = (settings.invitation or "").strip()
    if not given.startswith("@"):
        return given
    hint = "give the path of the file that holds the token, after @"
    return read_limited(named_path(given[1:]), MAX_TOKEN_CHARS, "invitation", hint).decode("ascii", "replace").strip()
