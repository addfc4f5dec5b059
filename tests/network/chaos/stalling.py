"""The production agent, which stalls the rounds that it is in as soon as it is told to.

Its arguments are FOLDER and the flags of `peer.swarm.agent.process`. The file `stall` in FOLDER holds how, one of
`HOW`, and the peer id of the member that is to suffer alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

LATE_S = 4.0  # of a deadline of 5 s and a little
DRIP_S = 0.5  # between two bytes
FAILED_S = 8.0  # until another round has begun
TURN_S, TURNS = 45.0, 2  # until the debt of a pair has passed; victims, so few that the disputes are not with most
LATE = ("late", "late-shard", "late-at-times")  # rounds are committed, but long
HOW = ("contribution", "reduced", "victim", "turns", *LATE, "quit", "drip", "waits", "names")
"""`waits`: it contributes to one member alone, and says that it still waited when that one ended the round; `names`: it
gives each round up at once, and names another member to each."""


def stall(folder: Path, how: str, victim: str = "") -> None:
    """Let the agent of this folder stall from now on."""
    text = folder / "stall.tmp"
    text.write_text(f"{how} {victim}")
    text.replace(folder / "stall")


def _told(path: Path) -> tuple[str, str]:
    with contextlib.suppress(FileNotFoundError):
        how, _, victim = path.read_text().partition(" ")
        return how, victim
    return "", ""


def stalled(send: Callable[..., Awaitable[None]], path: Path) -> Callable[..., Awaitable[None]]:
    """`FrameStream.send` of an agent that stalls."""
    from peer.outer.round import RoundAborted
    from peer.protocol.wire import Kind, pack_header

    stalled_at: dict[str, float] = {}
    contributed: Counter[str] = Counter()

    def its_turn(remote: str) -> bool:
        """One victim a round, each again as soon as the debt of the two has passed."""
        now = time.monotonic()
        if now < max(stalled_at.values(), default=-FAILED_S) + FAILED_S or len({*stalled_at, remote}) > TURNS:
            return False
        if now < stalled_at.get(remote, -TURN_S) + TURN_S:
            return False
        stalled_at[remote] = now
        return True

    async def drip(stream: Any, kind: Kind, body: bytes) -> None:
        stream._pipe.write(pack_header(kind, len(body)))
        for place in range(len(body)):
            await asyncio.sleep(DRIP_S)
            stream._pipe.write(bytes(body[place : place + 1]))

    async def sends(stream: Any, kind: Kind, *rest: Any, **options: Any) -> None:
        how, victim = _told(path) if kind in (Kind.CONTRIBUTION, Kind.SEAL_REDUCED) else ("", "")
        if how == ("reduced" if kind is Kind.SEAL_REDUCED else "contribution"):
            await asyncio.Event().wait()
        suffers = stream.remote.endswith(victim) == (how == "victim")
        if kind is Kind.CONTRIBUTION and how in ("victim", "waits") and suffers:
            await asyncio.Event().wait()
        if kind is Kind.CONTRIBUTION and how == "names":
            raise RoundAborted("exchange", "nothing came", stream.remote)
        if kind is Kind.CONTRIBUTION and how == "turns" and its_turn(stream.remote):
            await asyncio.Event().wait()
        contributed[stream.remote] += kind is Kind.CONTRIBUTION
        if how == ("late" if kind is Kind.CONTRIBUTION else "late-shard"):
            await asyncio.sleep(LATE_S)
        if kind is Kind.CONTRIBUTION and how == "late-at-times" and contributed[stream.remote] % 2:
            await asyncio.sleep(LATE_S)
        if kind is Kind.CONTRIBUTION and how == "drip":
            await drip(stream, kind, *rest)
        if kind is Kind.CONTRIBUTION and how == "quit":
            stream.close()
        await send(stream, kind, *rest, **options)

    return sends


def waiting(signed: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """`GroupWords._signed` of an agent that says of each round that it waited, and that a member ended it."""
    from peer.swarm.round.giving_up import Lack

    def signs(words: Any, group: str, lack: Any) -> Any:
        how, victim = _told(path)
        return signed(words, group, Lack("waiting", lack.names, frozenset({victim})) if how == "waits" else lack)

    return signs


def naming(tell: Callable[..., Awaitable[list[str]]], path: Path) -> Callable[..., Awaitable[list[str]]]:
    """`PersistentGroup.tell` of an agent that names to each member the one after it."""
    from peer.protocol.wire import Kind
    from peer.swarm.round.giving_up import Lack

    async def tells(group: Any, message: Any) -> list[str]:
        if _told(path)[0] != "names" or message.word is None:
            return await tell(group, message)
        words, others = group._owner._group_words, sorted(group.outbound)
        for place, peer_id in enumerate(others):
            named = others[(place + 1) % len(others)]
            lie = words._signed(group.identifier, Lack("contribution", frozenset({named})))
            with contextlib.suppress(Exception):
                said = message.model_copy(update={"word": lie, "culprit": named})
                await group.outbound[peer_id].send_message(Kind.ABORT, said)
        return []

    return tells


def main() -> None:
    """Be the agent."""
    path = Path(sys.argv.pop(1)) / "stall"
    from peer.swarm.agent import process as agent
    from peer.swarm.net.stream import FrameStream
    from peer.swarm.round.group_words import GroupWords
    from peer.swarm.round.persistent_group import PersistentGroup

    for owner, name, replaced in (
        (FrameStream, "send", stalled), (GroupWords, "_signed", waiting), (PersistentGroup, "tell", naming),
    ):  # fmt: skip
        setattr(owner, name, replaced(getattr(owner, name), path))
    agent.main()
