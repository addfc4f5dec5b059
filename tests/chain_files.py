"""Chain files as a test reads them: line by line, without the store that wrote them."""

from __future__ import annotations

from pathlib import Path

from peer.errors import ProtocolError
from peer.protocol.lineage import Certificate
from peer.protocol.records import parse_json


def read_chain(path: Path) -> list[Certificate]:
    """Certificates up to the first line that is none, whether they follow each other or not."""
    chain: list[Certificate] = []
    for line in path.read_bytes().splitlines():
        try:
            chain.append(parse_json(Certificate, line))
        except ProtocolError:
            break
    return chain
