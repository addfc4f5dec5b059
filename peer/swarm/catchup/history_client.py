"""Catching up from donors that are not trusted: replay missed updates, or take a verified snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer.errors import ProtocolError
from peer.outer.compress.base import NonFiniteError
from peer.outer.state.outer_state import AnyUpdate, OuterState, state_digest
from peer.protocol import hashing
from peer.protocol.fork_choice import shared_links
from peer.protocol.lineage import Certificate, Link, RosterLimits
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, GossipState, HistoryRequest, Kind, SnapshotMeta
from peer.swarm.catchup.chain_scout import LEAST_LINK_RATE, check_links
from peer.swarm.catchup.chunk_download import DONORS_AT_ONCE, CatchUpError, ChunkDownload, Distrust
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.history_server import FRAME_BYTES, history_name
from peer.swarm.catchup.partial_file import PartialFile
from peer.swarm.catchup.tip_agreement import ask_all, donors_matching_quorum, members_of
from peer.swarm.net.node import BULK_BYTES, Node
from peer.swarm.net.preopened import OpenStream, PreopenedStream
from peer.swarm.net.request import open_request
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import Timing
from peer.swarm.state.snapshot_file import chunk_lengths

log = logging.getLogger(__name__)
LATEST = 2**53 - 1
ONWARD_LINKS = 256  # rounds that others may have made since
DIGEST_BYTES = 32
HASHED_PER_S = 5e7  # parameters, with their buffers, on a slow machine that has other work
Apply = Callable[[AnyUpdate, Certificate], Awaitable[None]]
Adopt = Callable[[Path, list[Certificate]], Awaitable[None]]


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
        limits: what the run allows in a roster.
        distrust: called with a donor that lied while others served the same snapshot, and how.
    """

    def __init__(
        self, node: Node, run_id: str, folder: Path, limits: RosterLimits, distrust: Distrust = lambda *_: None
    ) -> None:
        self._node, self._run_id, self._folder, self._limits = node, run_id, folder, limits
        self._distrust = distrust

    @property
    def timing(self) -> Timing:
        """Of the node."""
        return self._node.timing

    async def follow(
        self, donor: str, chain: Sequence[Certificate], local: LocalState, apply: Apply, adopt: Adopt,
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
            onward = list(chain[len(own) :])
            replayed = await self._replay(donor, onward, local, apply)
            if onward and replayed == len(onward):
                return CaughtUp(donor=donor, replayed=replayed, snapshot_round=None)
        return await self._snapshot(donor, list(chain), local, adopt, others, witnesses)

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
        meta, digests = await self._offer(donor, local)
        if meta.round != 0:
            raise CatchUpError(f"{donor} holds round {meta.round}, not the genesis")
        _compare(donor, digests, meta, local.history.genesis)
        path, _ = await self._chunks([donor], meta, digests, self._open)
        await adopt(path, [])

    async def state_of(self, donor: str, local: LocalState, signed: GossipState) -> Path:
        """A gossip peer's own state, checked against its signature: it rests on that peer's word.

        Raises:
            CatchUpError, ProtocolError: it serves another state.
            StreamClosedError: it went away.
        """
        meta, digests = await self._offer(donor, local, signed.state_digest)
        if (meta.round, meta.lineage_id) != (signed.round, signed.state_digest):
            raise CatchUpError(f"{donor} serves round {meta.round}, and has signed another state")
        _compare(donor, digests, meta, signed.state_digest)
        path, _ = await self._chunks([donor], meta, digests, self._open)
        return path

    async def said(
        self, link: Link, peers: Iterable[str], patience_s: float, known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The state after a link according to peers: see `ask_all`."""
        return await ask_all(
            self._state_digest, link, peers, patience_s, known, timing=self.timing, clock=self._node.clock
        )

    async def _replay(self, donor: str, onward: list[Certificate], local: LocalState, apply: Apply) -> int:
        """Apply certified updates one by one; -> how many, fewer if the donor lacks one, or its round's members carried
        on another state than this peer's.
        """
        state = local.state
        for count, certificate in enumerate(onward):
            link, digest = certificate.link, await local.digest()
            if digest != link.state_digest:
                log.warning("round %d carried on %s; ours was %s", link.round + 1, link.state_digest[:12], digest[:12])
                return count
            payload = await self._update(donor, certificate, state)
            if payload is None:
                return count
            weights = [member.tokens for member in link.roster]
            try:
                update = await asyncio.to_thread(state.split_update, payload, weights)
                await asyncio.to_thread(state.check, update)
            except ProtocolError:
                raise
            except (NonFiniteError, ValueError) as error:
                raise CatchUpError(f"round {link.round}: {error}") from None
            await apply(update, certificate)
        return len(onward)

    async def _snapshot(
        self, donor: str, chain: list[Certificate], local: LocalState, adopt: Adopt, others: Sequence[str],
        witnesses: Sequence[str],
    ) -> CaughtUp:  # fmt: skip
        """Verify the state that the donor's chain leads to, chunk by chunk, from every peer that has it."""
        donors = [donor, *others[: DONORS_AT_ONCE - 1]]
        # all write their files at the same time, that is of the same round
        preparing = [asyncio.ensure_future(self._prepare(other, local)) for other in donors[1:]]
        # the connection takes several round trips, and needs no answer
        early = None if local.valid else self._preopened(donor)  # a peer with a state may need no other
        genesis = local.history.genesis
        try:
            meta, digests = await self._offer(donor, local)
            if len(chain) < meta.round:  # rounds have been committed since the chain was read
                chain += await self._onward(donor, chain, genesis, meta.round - len(chain) + ONWARD_LINKS)
            chain, after = chain[: meta.round], chain[meta.round :]
            if not chain or chain[-1].link.id != meta.lineage_id:
                raise CatchUpError(f"{donor}: its chain does not lead to its snapshot of round {meta.round}")
            open_stream = self._open if early is None else early.open
            if after:
                _compare(donor, digests, meta, after[0].link.state_digest)
            else:
                link, offered = chain[-1].link, {donor: state_digest(digests, meta.numel, meta.num_buffers)}
                patience_s = self.timing.state_patience_s + meta.numel / HASHED_PER_S
                said = await self.said(link, [*donors, *members_of(link, witnesses)], patience_s, offered)
                donors = donors_matching_quorum(donors, link, said)
            path, served = await self._chunks(donors, meta, digests, open_stream)
        finally:
            try:
                await cancel_and_wait(preparing)
            finally:
                if early is not None:
                    await early.close()
        await adopt(path, chain)
        return CaughtUp(donor=donor, replayed=0, snapshot_round=meta.round, chunks=served)

    async def _state_digest(self, peer_id: str, link: Link) -> str | None:
        request = HistoryRequest(what="state", run_id=self._run_id, from_round=link.round + 1, digest=link.id)
        async with self._asking(peer_id, request) as stream:
            digest = await self._body(stream, DIGEST_BYTES)
        return digest.hex() if digest is not None and len(digest) == DIGEST_BYTES else None

    async def _prepare(self, donor: str, local: LocalState) -> None:
        with contextlib.suppress(ProtocolError, StreamClosedError):
            await self._offer(donor, local)

    async def _offer(
        self, donor: str, local: LocalState, wanted: str | None = None
    ) -> tuple[SnapshotMeta, list[bytes]]:
        """What the donor can serve, and the digests of its chunks, as it says: the rest of what an interrupted fetch
        has begun, or its newest; for a peer that compares lineages it must be the donor's present one.
        """
        begun = None if wanted else await asyncio.to_thread(PartialFile.begun, self._folder)
        request = HistoryRequest(
            what="snapshot", run_id=self._run_id, digest=begun.lineage_id if begun is not None else wanted,
            from_round=LATEST if local.valid else 0,
        )  # fmt: skip
        state = local.state
        async with self._asking(donor, request) as stream:
            meta = await self._receive_meta(stream)
            if (meta.numel, meta.num_buffers) != (state.numel, len(state.buffers)):
                raise CatchUpError(f"{donor} has {meta.numel} parameters; this run has {state.numel}")
            num_chunks = len(chunk_lengths(meta))
            if meta.num_chunks != num_chunks:
                raise CatchUpError(f"{donor} has {meta.num_chunks} chunks; this run has {num_chunks}")
            joined = await self._body(stream, 32 * num_chunks) or b""
        return meta, [joined[start : start + 32] for start in range(0, len(joined), 32)]

    async def _onward(
        self, donor: str, chain: Sequence[Certificate], genesis: str, most: int
    ) -> list[Certificate]:
        """At most `most` certificates of the donor that follow a chain from genesis, checked; none if its own chain is
        another one, or no longer.
        """
        parent, round = (chain[-1].link.id if chain else genesis), len(chain)
        links = await self.links(donor, round, most)
        if not links or links[0].link.parent != parent:
            return []
        seen = Counter(member.peer_id for one in chain for member in one.link.roster)
        await check_links(links, self._run_id, parent, round, self._limits, seen)
        return links

    async def links(self, donor: str, from_round: int, count: int) -> list[Certificate]:
        """At most `count` certificates of the donor's chain from a round on, as it says: `ChainScout` checks them.

        Raises:
            ProtocolError: malformed.
            StreamClosedError: the donor went away, or sends slower than `LEAST_LINK_RATE` after the first seconds.
        """
        links: list[Certificate] = []
        request = HistoryRequest(what="chain", run_id=self._run_id, from_round=from_round)
        until = asyncio.get_running_loop().time() + self.timing.claim_s
        try:
            async with asyncio.timeout_at(until) as patience, self._asking(donor, request) as stream:
                while len(links) < count and (link := await self._body(stream, MAX_MESSAGE_BYTES)) is not None:
                    links.append(parse_json(Certificate, link))
                    patience.reschedule(until + len(links) / LEAST_LINK_RATE)
        except TimeoutError:
            raise StreamClosedError(donor, f"sent {len(links)} links in {self.timing.claim_s:g} s and more") from None
        return links

    async def _update(self, donor: str, certificate: Certificate, state: OuterState) -> bytearray | None:
        digest = certificate.link.update_digest
        limit = state.update_bytes(len(certificate.link.roster))
        payload = bytearray()
        request = HistoryRequest(what="update", run_id=self._run_id, digest=digest)
        async with self._asking(donor, request, bulk=limit > BULK_BYTES) as stream:
            while (content := await self._body(stream, FRAME_BYTES)) is not None:
                payload += content
                if len(payload) > limit:
                    raise CatchUpError(f"{donor} sent an update of more than {limit} bytes")
        if not payload:
            return None
        if hashing.digest(payload).hex() != digest:
            raise CatchUpError(f"{donor} sent an update with another digest than round {certificate.link.round}'s")
        return payload

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

    async def _open(self, donor: str) -> FrameStream:
        return await self._node.open(donor, history_name(self._run_id), "history", bulk=True)

    def _asking(
        self, donor: str, request: HistoryRequest, bulk: bool = False
    ) -> contextlib.AbstractAsyncContextManager[FrameStream]:
        return open_request(self._node, donor, history_name(self._run_id), "history", request, bulk=bulk)

    def _preopened(self, donor: str) -> PreopenedStream:
        return PreopenedStream(self._open, donor, self.timing.preopened_kept_s, self._node.clock)

    async def _receive_meta(self, stream: FrameStream) -> SnapshotMeta:
        """Wait for a donor that reports that it is writing its snapshot."""
        kind, longest_s, clock = Kind.BUSY, self.timing.writing_s, self._node.clock
        until, limits = clock() + longest_s, {Kind.META: MAX_MESSAGE_BYTES, Kind.BUSY: 0, Kind.END: 0}
        while kind is Kind.BUSY:
            if clock() > until:
                raise StreamClosedError(stream.remote, f"has been writing its snapshot for {longest_s:g} s")
            kind, body = await stream.receive(limits, timeout_s=self.timing.frame_timeout_s)
        if kind is Kind.END:
            raise CatchUpError(f"{stream.remote} has no snapshot")
        return parse_json(SnapshotMeta, body)

    async def _body(self, stream: FrameStream, limit: int) -> bytes | None:
        """The next DATA body, None at END."""
        kind, body = await stream.receive({Kind.DATA: limit, Kind.END: 0}, timeout_s=self.timing.frame_timeout_s)
        return body if kind is Kind.DATA else None


def _compare(donor: str, digests: list[bytes], meta: SnapshotMeta, certified: str) -> None:
    if state_digest(digests, meta.numel, meta.num_buffers) != certified:
        raise CatchUpError(f"{donor} serves another state than the certified {certified[:12]}")
