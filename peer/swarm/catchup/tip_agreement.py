"""The state that a chain ends at: no link certifies it yet, so the members of its round are asked.

A link names the state that its round started from, and the update. Members compute the state that follows; the next
round's link will name it. Until then a peer that downloads that state compares the answers of the members.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from peer.errors import ProtocolError, in_words
from peer.protocol.lineage import Link, quorum
from peer.swarm.catchup.chunk_download import CatchUpError
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock

log = logging.getLogger(__name__)
Ask = Callable[[str, Link], Awaitable[str | None]]


class UndecidedError(CatchUpError):
    """The members of the donor's last round do not agree on the state after it: the next round will tell."""


async def ask_all(
    ask: Ask, link: Link, peers: Iterable[str], patience_s: float, known: Mapping[str, str] | None = None,
    *, timing: Timing, clock: Clock,
) -> dict[str, str]:  # fmt: skip
    """What these peers say that the state after `link` is, by peer id.

    Returns when two thirds of the roster have named the same; or when all members that are asked have answered, or are
    gone; else when the time is up: a silent member could be outvoted by those that answer at once.

    Args:
        ask: (peer id, link) -> the digest of that peer's state after the link, None where it holds none.
        known: what is known before, and returned with the rest.
        timing, clock: as of `Node`.
    """
    said = dict(known or {})

    async def one(peer_id: str) -> None:
        try:
            while (digest := await ask(peer_id, link)) is None:
                await asyncio.sleep(timing.state_recheck_s)
            said[peer_id] = digest
        except (ProtocolError, StreamClosedError) as error:
            log.info("%s does not name the state after round %d: %s", peer_id, link.round + 1, in_words(error))

    asked = {asyncio.ensure_future(one(peer_id)): peer_id for peer_id in dict.fromkeys(peers) if peer_id not in said}
    pending, deadline = set(asked), clock() + patience_s
    try:
        while clock() < deadline and most_named(said, link)[1] < quorum(len(link.roster)):
            if not members_of(link, map(asked.__getitem__, pending)):
                break
            _, pending = await asyncio.wait(
                pending, timeout=deadline - clock(), return_when=asyncio.FIRST_COMPLETED
            )
        if pending and clock() < deadline:
            await asyncio.wait(pending, timeout=timing.quorum_grace_s)
    finally:
        await cancel_and_wait(asked)
    return said


def members_of(link: Link, peers: Iterable[str]) -> list[str]:
    """Those of these peers that were in the round."""
    return [peer_id for peer_id in peers if link.place(peer_id) is not None]


def most_named(said: Mapping[str, str], link: Link) -> tuple[str | None, int]:
    """The digest that most members of the round name, and how many do."""
    digests = Counter(said[peer_id] for peer_id in members_of(link, said))
    return next(iter(digests.most_common(1)), (None, 0))


def donors_matching_quorum(donors: Sequence[str], link: Link, said: Mapping[str, str]) -> list[str]:
    """The donors that hold the state which the first of them offers, and which no link certifies yet.

    Args:
        said: digests by peer id, the first donor's among them.

    Raises:
        CatchUpError: two thirds of the roster, or all other members that have spoken, hold another.
        UndecidedError: the members do not agree.
    """
    donor, round, offered = donors[0], link.round + 1, said[donors[0]]
    members, (digest, count) = members_of(link, said), most_named(said, link)
    if digest is not None and count < min(quorum(len(link.roster)), len(members)):
        raise UndecidedError(f"{len(members)} members of round {round} name different states after it")
    if digest not in (None, offered):
        raise CatchUpError(f"{donor} serves another state than the {digest[:12]} that its round's members hold")
    if members:
        log.info("%d of the %d members of round %d hold what %s serves", count, len(link.roster), round, donor)
    else:
        log.warning("no member of round %d is live: its state rests on %s's word only", round, donor)
    return [peer_id for peer_id in donors if said.get(peer_id) == offered]
