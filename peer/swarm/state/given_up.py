"""What a peer's own branch claimed of the run's data when that branch was given up for a heavier one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError
from peer.protocol.lineage import Link
from peer.protocol.manifest import Spec
from peer.protocol.ranges import RangesText
from peer.protocol.records import dump_json, parse_json

log = logging.getLogger(__name__)
GIVEN_UP_FILE = "given-up.jsonl"
MAX_BYTES = 1 << 20


class GivenUpClaims(Spec):
    """One round of the branch: what its members said they had trained on."""

    round: Annotated[int, Field(ge=0)]
    claims: Annotated[tuple[RangesText, ...], Field(max_length=64)]


def keep_given_up(folder: Path, links: Iterable[Link]) -> None:
    """Note them, as far as they claim data and the file has room."""
    path = folder / GIVEN_UP_FILE
    claims = ((link.round, tuple(one.ranges for one in link.roster if one.ranges)) for link in links)
    lines = b"".join(dump_json(GivenUpClaims(round=round, claims=said)) + b"\n" for round, said in claims if said)
    try:
        if lines and (not path.exists() or path.stat().st_size + len(lines) <= MAX_BYTES):
            with path.open("ab") as file:
                file.write(lines)
    except OSError as error:
        log.warning("%s is not written: %s", path, error.strerror)


def read_given_up(folder: Path) -> Iterator[GivenUpClaims]:
    """What was noted; damaged lines are passed over."""
    with contextlib.suppress(FileNotFoundError), (folder / GIVEN_UP_FILE).open("rb") as file:
        for line in file:
            with contextlib.suppress(ProtocolError):
                yield parse_json(GivenUpClaims, line)
