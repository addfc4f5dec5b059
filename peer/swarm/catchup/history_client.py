"""Catching up from donors that are not trusted: replay missed updates, or take a verified snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from peer.errors import ProtocolError
from peer.outer.compress.base import NonFiniteError, Payload
from peer.outer.state.outer_state import state_digest
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol.chain import extended, id_of, shared_links, tally_of
from peer.protocol.lineage import Certificate, Link, RosterLimits, shares_of
from peer.protocol.wire import GossipState, SnapshotMeta
from peer.swarm.catchup.chain_scout import check_links
from peer.swarm.catchup.chunk_download import DONORS_AT_ONCE, CatchUpError, ChunkDownload, Distrust
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.partial_file import PartialFile
from peer.swarm.catchup.tip_agreement import UndecidedError, ask_all, donors_matching_quorum, members_of
from peer.swarm.net.node import Node
from peer.swarm.net.preopened import OpenStream
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import Timing

log = logging.getLogger(__name__)
ONWARD_LINKS = 256  # rounds that others may have made since
HASHED_PER_S = 5e7  # parameters, with their buffers, on a slow machine that has other work
Adopt = Callable[[Path, list[Certificate]], Awaitable[None]]


class ChainFollower(Protocol):
    """The peer whose state is brought to the end of another chain."""

    def carried(self, chain: Sequence[Certificate], judged: int = 0) -> Sequence[Certificate]:
        """What holds of links that the donor shows later."""

    async def apply(self, update: AnyUpdate, certificate: Certificate) -> None:
        """Take one certified step."""

    async def adopt(self, path: Path, chain: Sequence[Certificate]) -> None:
        """Take a verified snapshot file as the state, and the chain that leads to it."""


@dataclass(frozen=True, kw_only=True)
class CaughtUp:
    """How a peer caught up.

    Attributes:
        donor: the donor of its lineage; None when that left half-way.
        chunks: of the snapshot, by the donor that sent them.
    """

    donor: str | None
    replayed: int
    snapshot_round: int | None
    chunks: Mapping[str, int] = field(default_factory=dict)


class HistoryClient:
    """Fetches history. Nothing it returns is trusted before it is checked here.

    Args:
        folder: where an incoming snapshot is written until it is verified.
        distrust: called with a donor that lied while others served the same snapshot, and how.
    """

    def __init__(
        self, node: Node, run_id: str, folder: Path, limits: RosterLimits, distrust: Distrust = lambda *_: None
    ) -> None:
        self._node, self._run_id, self._folder, self._limits = node, run_id, folder, limits
        self._distrust = distrust
        self.requests = DonorRequests(node, run_id)

    @property
    def timing(self) -> Timing:
        """Of the node."""
        return self._node.timing

    async def follow(
        self, donor: str, chain: Sequence[Certificate], local: LocalState, follower: ChainFollower,
        others: Sequence[str] = (), witnesses: Sequence[str] = (),
    ) -> CaughtUp:  # fmt: skip
        """Bring the state to the end of a donor's chain, which has been checked and chosen.

        Args:
            others: peers that may serve the same snapshot, the best first.
            witnesses: live peers: those that made the donor's state are asked for its digest.

        Raises:
            CatchUpError, ProtocolError: the donor's data does not verify.
            StreamClosedError: it went away.
        """
        own = local.history.chain
        if local.valid and shared_links(own, chain) == len(own):
            onward = chain[len(own) :]
            replayed = await replay(onward, local, follower, lambda one: self.requests.update(donor, one, local.state))
            if onward and replayed == len(onward):
                return CaughtUp(donor=donor, replayed=replayed, snapshot_round=None)
        return await self._snapshot(donor, chain, local, follower, others, witnesses)

    async def onward(self, donor: str, local: LocalState) -> list[Certificate]:
        """The donor's certificates that follow this peer's position, checked; none if it is no further.

        Raises:
            ProtocolError: they do not verify.
            StreamClosedError: the donor went away.
        """
        history = local.history
        return await self._onward(donor, history.chain, history.genesis, ONWARD_LINKS)

    async def genesis(self, donor: str, local: LocalState, adopt: Adopt) -> None:
        """Take the initial state from a donor: its digest is the genesis that the manifest names."""
        meta, digests = await self.requests.offer(donor, local, self._folder)
        if meta.round != 0:
            raise CatchUpError(f"{donor} holds round {meta.round}, not the genesis")
        _compare(donor, digests, meta, local.history.genesis)
        path, _ = await self._chunks([donor], meta, digests, self.requests.open)
        await adopt(path, [])

    async def state_of(self, donor: str, local: LocalState, signed: GossipState) -> Path:
        """A gossip peer's own state, checked against its signature: it rests on that peer's word.

        Raises:
            CatchUpError, ProtocolError: it serves another state.
            StreamClosedError: it went away.
        """
        meta, digests = await self.requests.offer(donor, local, self._folder, signed.state_digest)
        if (meta.round, meta.lineage_id) != (signed.round, signed.state_digest):
            raise CatchUpError(f"{donor} serves round {meta.round}, and has signed another state")
        _compare(donor, digests, meta, signed.state_digest)
        path, _ = await self._chunks([donor], meta, digests, self.requests.open)
        return path

    async def said(
        self, link: Link, peers: Iterable[str], patience_s: float, known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The state after a link according to peers: see `ask_all`."""
        return await ask_all(
            self.requests.state_digest, link, peers, patience_s, known, timing=self.timing, clock=self._node.clock
        )

    async def _snapshot(
        self, donor: str, chain: Sequence[Certificate], local: LocalState, follower: ChainFollower,
        others: Sequence[str], witnesses: Sequence[str],
    ) -> CaughtUp:  # fmt: skip
        """Verify the state that the donor's chain leads to, chunk by chunk, from every peer that has it."""
        donors = [donor, *others[: DONORS_AT_ONCE - 1]]
        # all write their files at the same time, that is of the same round
        preparing = [asyncio.ensure_future(self._prepare(other, local)) for other in donors[1:]]
        # the connection takes several round trips, and needs no answer
        early = None if local.valid else self.requests.preopened(donor)  # a peer with a state may need no other
        genesis = local.history.genesis
        try:
            meta, digests = await self.requests.offer(donor, local, self._folder)
            if len(chain) < meta.round:  # rounds have been committed since the chain was read
                more = await self._onward(donor, chain, genesis, meta.round - len(chain) + ONWARD_LINKS)
                if len(chain := follower.carried(extended(chain, more), len(chain))) < meta.round:
                    raise UndecidedError(f"round {len(chain) + 1} of {donor} is signed by few of those who were there")
            chain, after = chain[: meta.round], chain[meta.round :]
            if not chain or id_of(chain, len(chain) - 1) != meta.lineage_id:
                raise CatchUpError(f"{donor}: its chain does not lead to its snapshot of round {meta.round}")
            open_stream = self.requests.open if early is None else early.open
            if after:
                _compare(donor, digests, meta, after[0].link.state_digest)
            else:
                link, offered = chain[-1].link, {donor: state_digest(digests, meta.fragments, meta.num_buffers)}
                patience_s = self.timing.state_patience_s + sum(meta.fragments) / HASHED_PER_S
                said = await self.said(link, [*donors, *members_of(link, witnesses)], patience_s, offered)
                donors = donors_matching_quorum(donors, link, said)
            path, served = await self._chunks(donors, meta, digests, open_stream)
        finally:
            try:
                await cancel_and_wait(preparing)
            finally:
                if early is not None:
                    await early.close()
        await follower.adopt(path, chain)
        return CaughtUp(donor=donor, replayed=0, snapshot_round=meta.round, chunks=served)

    async def _prepare(self, donor: str, local: LocalState) -> None:
        with contextlib.suppress(ProtocolError, StreamClosedError):
            await self.requests.offer(donor, local, self._folder)

    async def _onward(self, donor: str, chain: Sequence[Certificate], genesis: str, most: int) -> list[Certificate]:
        """At most `most` certificates of the donor that follow a chain from genesis, checked; none if its own chain is
        another one, or no longer.
        """
        parent, round = (chain[-1].link.id if chain else genesis), len(chain)
        links = await self.requests.links(donor, round, most)
        if not links or links[0].link.parent != parent:
            return []
        await check_links(links, self._run_id, parent, round, self._limits, tally_of(chain).rounds)
        return links

    async def _chunks(
        self, donors: list[str], meta: SnapshotMeta, digests: list[bytes], open_stream: OpenStream
    ) -> tuple[Path, Mapping[str, int]]:
        """The snapshot as a file, each chunk checked on arrival; -> its path, and how many chunks each donor sent."""
        file = PartialFile(self._folder, meta, digests)
        await asyncio.to_thread(file.open)
        try:
            fetch = ChunkDownload(open_stream, self._run_id, file, self._distrust, self.timing)
            if file.missing:
                await fetch.run(donors)
        finally:
            file.close()
        log.info("%d chunks of round %d were here, %s sent the rest", file.resumed, meta.round, dict(fetch.served))
        return file.finish(), fetch.served


def _compare(donor: str, digests: list[bytes], meta: SnapshotMeta, certified: str) -> None:
    if state_digest(digests, meta.fragments, meta.num_buffers) != certified:
        raise CatchUpError(f"{donor} serves another state than the certified {certified[:12]}")


async def replay(
    onward: Sequence[Certificate], local: LocalState, follower: ChainFollower,
    fetch: Callable[[Certificate], Awaitable[Payload | None]],
) -> int:  # fmt: skip
    """Apply certified updates one by one; -> how many, fewer if one is not to be had, or its round's members carried on
    another state than this peer's.

    Args:
        fetch: -> the update of a round, whose digest is right; None if it is not to be had.

    Raises:
        ProtocolError: an update cannot be applied.
    """
    state = local.state
    for count, certificate in enumerate(onward):
        link, digest = certificate.link, await local.digest()
        if digest != link.state_digest:
            log.warning("round %d carried on %s; ours was %s", link.round + 1, link.state_digest[:12], digest[:12])
            return count
        payload = await fetch(certificate)
        if payload is None:
            return count
        weights = [member.tokens for member in link.roster]
        try:
            update = await asyncio.to_thread(state.split_update, payload, weights, None, shares_of(link.roster))
            await asyncio.to_thread(state.check, update)
        except ProtocolError:
            raise
        except (NonFiniteError, ValueError) as error:
            raise CatchUpError(f"round {link.round}: {error}") from None
        await follower.apply(update, certificate)
    return len(onward)
