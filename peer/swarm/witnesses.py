"""The state that a chain ends at: no link certifies it yet, so its round's members are asked what it is.

A link names the state that its round started from, and the update. Members compute the state that follows; the next
round's link will name it. Until then who takes that state from a donor compares what the members say.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from peer.errors import ProtocolError, in_words
from peer.protocol.lineage import Link, quorum
from peer.swarm.chunks import CatchUpError
from peer.swarm.streams import StreamClosedError

log = logging.getLogger(__name__)
ASK_TIMEOUT_S = 3.0
Ask = Callable[[str, Link], Awaitable[str | None]]


class UndecidedError(CatchUpError):
    """The members of the donor's last round do not agree on the state after it: the next round will tell."""


async def ask_all(ask: Ask, link: Link, peers: Iterable[str]) -> dict[str, str]:
    """What these peers say that the state after `link` is, by peer id, as far as they answer in time.

    Args:
        ask: (peer id, link) -> the digest of that peer's state after the link, None where it holds none.
    """

    async def one(peer_id: str) -> str | None:
        try:
            return await asyncio.wait_for(ask(peer_id, link), ASK_TIMEOUT_S)
        except (ProtocolError, StreamClosedError, asyncio.TimeoutError) as error:
            log.info("%s does not say what the state after round %d is: %s", peer_id, link.round + 1, in_words(error))
            return None

    asked = list(dict.fromkeys(peers))
    answers = await asyncio.gather(*map(one, asked))
    return {peer_id: digest for peer_id, digest in zip(asked, answers, strict=True) if digest is not None}


def members_of(link: Link, peers: Iterable[str]) -> list[str]:
    """Those of these peers that were in the round."""
    return [peer_id for peer_id in peers if link.place(peer_id) is not None]


def agreed(said: Mapping[str, str], link: Link) -> str | None:
    """The one digest that members of the round name, or that two thirds of its roster do; else None."""
    digests = Counter(said[peer_id] for peer_id in members_of(link, said))
    for digest, count in digests.most_common(1):
        if len(digests) == 1 or count >= quorum(len(link.roster)):
            return digest
    return None


def believers(donors: Sequence[str], offered: str, link: Link, said: Mapping[str, str]) -> list[str]:
    """The donors that hold the state which the first of them offers, and which no link certifies yet.

    Args:
        offered: its digest.
        said: digests that others name, by peer id.

    Raises:
        CatchUpError: members of the round that led to it hold another.
        UndecidedError: or do not agree.
    """
    donor, round = donors[0], link.round + 1
    said = {**said, donor: offered}
    members, digest = members_of(link, said), agreed(said, link)
    if digest not in (None, offered):
        raise CatchUpError(f"{donor} serves another state than the {digest[:12]} that its round's members hold")
    if digest is None and members:
        raise UndecidedError(f"{len(members)} members of round {round} name different states after it")
    if members:
        agree = sum(said[peer_id] == offered for peer_id in members)
        log.info("%d of the %d members of round %d hold what %s serves", agree, len(link.roster), round, donor)
    else:
        log.warning("nobody of round %d is in sight: its state is as good as %s's word", round, donor)
    return [peer_id for peer_id in donors if said.get(peer_id) == offered]
