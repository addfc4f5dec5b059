"""Solves the puzzle of a run for an identity once, and keeps the solution beside the key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError
from peer.protocol.identity_work import MAX_NONCE, IdentityWork
from peer.protocol.manifest import Digest, Spec
from peer.protocol.records import Count, dump_json, parse_json
from peer.system.clock import Clock, awake_clock

log = logging.getLogger(__name__)
SUFFIX = ".work"
MAX_RUNS = 64  # whose solutions are kept
AT_ONCE = 1 << 14  # hashes between two looks at the clock: some 10 ms


class Solutions(Spec):
    """Run id -> nonce, the latest last."""

    nonces: Annotated[dict[Digest, Count], Field(max_length=MAX_RUNS)]


async def solved(
    work: IdentityWork, peer_id: str, identity_path: Path, tell: Callable[[str], None], clock: Clock = awake_clock
) -> IdentityWork:
    """The work with this peer's nonce: the one that is kept beside the key, or a new one.

    Args:
        tell: called once with the reason if it takes more than a second.
    """
    path = identity_path.with_name(identity_path.name + SUFFIX)
    kept = _read(path)
    nonce = kept.get(work.run_id, 0)
    if work.shown(peer_id, nonce):
        return replace(work, nonce=nonce)
    began, found, told = clock(), None, False
    for first in range(0, MAX_NONCE, AT_ONCE):
        found = await asyncio.to_thread(work.search, peer_id, first, AT_ONCE)
        if found is not None:
            break
        took = clock() - began
        if took > 1.0 and not told:
            told = True
            mean = took * 2**work.bits / (first + AT_ONCE)
            tell(f"this run asks for work of each new identity: about {mean:.0f} s of computing, once")
    assert found is not None
    _write(path, {**kept, work.run_id: found})
    return replace(work, nonce=found)


def _read(path: Path) -> dict[str, int]:
    try:
        return dict(parse_json(Solutions, path.read_bytes()).nonces)
    except FileNotFoundError:
        return {}
    except (OSError, ProtocolError) as error:
        log.warning("%s is written again: %s", path, error)
        return {}


def _write(path: Path, nonces: dict[str, int]) -> None:
    latest = dict(list(nonces.items())[-MAX_RUNS:])
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(dump_json(Solutions(nonces=latest)))
        temporary.replace(path)
    except OSError as error:
        log.warning("cannot keep %s, so that the next start computes again: %s", path, error.strerror)
