"""The requests of one peer to donors, one function each: answers are well formed, and otherwise not checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from peer.outer.state.outer_state import OuterState
from peer.protocol import hashing
from peer.protocol.lineage import Certificate, Link, shares_of
from peer.protocol.records import parse_json
from peer.protocol.tokenizer_spec import TokenizerFile
from peer.protocol.wire import MAX_MESSAGE_BYTES, HistoryRequest, Kind, SnapshotMeta
from peer.swarm.catchup.chain_scout import LEAST_LINK_RATE
from peer.swarm.catchup.chunk_download import CatchUpError
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.history_server import FRAME_BYTES, history_name
from peer.swarm.catchup.partial_file import PartialFile
from peer.swarm.net.node import BULK_BYTES, Node
from peer.swarm.net.preopened import PreopenedStream
from peer.swarm.net.request import open_request
from peer.swarm.net.stream import FrameStream, StreamClosedError, StreamTimeoutError
from peer.swarm.state.snapshot_file import chunk_lengths

LATEST = 2**53 - 1
DIGEST_BYTES = 32
SLOWEST_FRAME_BYTES = 4 * 2**20  # what must arrive within `frame_timeout_s`


class DonorRequests:
    """Asks donors for the history of one run.

    Raises:
        ProtocolError: each request, for a malformed answer.
        StreamClosedError: each request, when the donor cannot be reached or went away.
    """

    def __init__(self, node: Node, run_id: str) -> None:
        self._node, self._run_id = node, run_id

    async def offer(
        self, donor: str, local: LocalState, folder: Path, wanted: str | None = None
    ) -> tuple[SnapshotMeta, list[bytes]]:
        """What the donor can serve, and the digests of its chunks, as it says: the rest of what an interrupted fetch
        has begun, or its newest; for a peer that compares lineages it must be the donor's present one.

        Args:
            folder: where an interrupted fetch may lie.
        """
        begun = None if wanted else await asyncio.to_thread(PartialFile.begun, folder)
        request = HistoryRequest(
            what="snapshot", run_id=self._run_id, digest=begun.lineage_id if begun is not None else wanted,
            from_round=LATEST if local.valid else 0,
        )  # fmt: skip
        state = local.state
        async with self._asking(donor, request) as stream:
            meta = await self._receive_meta(stream)
            if (meta.fragments, meta.num_buffers) != (state.fragments.sizes, len(state.buffers)):
                there, here = _in_words(meta.fragments), _in_words(state.fragments.sizes)
                raise CatchUpError(f"{donor} has {there}; this run has {here}")
            num_chunks = len(chunk_lengths(meta))
            if meta.num_chunks != num_chunks:
                raise CatchUpError(f"{donor} has {meta.num_chunks} chunks; this run has {num_chunks}")
            joined = await self._body(stream, 32 * num_chunks) or b""
        return meta, [joined[start : start + 32] for start in range(0, len(joined), 32)]

    async def links(self, donor: str, from_round: int, count: int) -> list[Certificate]:
        """At most `count` certificates of the donor's chain from a round on, as it says: `ChainScout` checks them.

        Raises:
            ProtocolError: malformed.
            StreamClosedError: the donor went away, or sends slower than `LEAST_LINK_RATE` after the first seconds.
        """
        links: list[Certificate] = []
        request = HistoryRequest(what="chain", run_id=self._run_id, from_round=from_round)
        until = asyncio.get_running_loop().time() + self._node.timing.claim_s
        try:
            async with asyncio.timeout_at(until) as patience, self._asking(donor, request) as stream:
                while len(links) < count and (link := await self._body(stream, MAX_MESSAGE_BYTES)) is not None:
                    links.append(parse_json(Certificate, link))
                    patience.reschedule(until + len(links) / LEAST_LINK_RATE)
        except TimeoutError:
            reason = f"sent {len(links)} links in {self._node.timing.claim_s:g} s and more"
            raise StreamTimeoutError(donor, reason) from None
        return links

    async def update(self, donor: str, certificate: Certificate, state: OuterState) -> bytearray | None:
        """The certified update; None if the donor does not have it."""
        digest, roster = certificate.link.update_digest, certificate.link.roster
        limit = state.fragments.at(certificate.link.round).wire.among(shares_of(roster)).update_bytes(len(roster))
        request = HistoryRequest(what="update", run_id=self._run_id, digest=digest)
        payload = await self._content(donor, request, limit)
        if not payload:
            return None
        if hashing.digest(payload).hex() != digest:
            raise CatchUpError(f"{donor} sent an update with another digest than round {certificate.link.round}'s")
        return payload

    async def file(self, donor: str, file: TokenizerFile) -> bytearray:
        """One of the tokenizer's files, as the donor says; empty if it does not have it.

        Raises:
            ProtocolError: malformed.
            StreamClosedError: the donor went away, is busy, or is slower than `frame_timeout_s` allows.
        """
        request = HistoryRequest(what="file", run_id=self._run_id, digest=file.digest)
        longest_s = self._node.timing.frame_timeout_s * (1 + file.size / SLOWEST_FRAME_BYTES)
        try:
            async with asyncio.timeout(longest_s):
                return await self._content(donor, request, file.size)
        except TimeoutError:
            raise StreamClosedError(donor, f"did not send {file.size} bytes in {longest_s:g} s") from None

    async def state_digest(self, peer_id: str, link: Link) -> str | None:
        """That of the state after a link, as the peer says; None if it does not know."""
        request = HistoryRequest(what="state", run_id=self._run_id, from_round=link.round + 1, digest=link.id)
        async with self._asking(peer_id, request) as stream:
            digest = await self._body(stream, DIGEST_BYTES)
        return digest.hex() if digest is not None and len(digest) == DIGEST_BYTES else None

    async def open(self, donor: str) -> FrameStream:
        """A stream for much data."""
        return await self._node.open(donor, history_name(self._run_id), "history", bulk=True)

    def preopened(self, donor: str) -> PreopenedStream:
        """Such a stream, opened before it is needed."""
        return PreopenedStream(self.open, donor, self._node.timing.preopened_kept_s, self._node.clock)

    def _asking(
        self, donor: str, request: HistoryRequest, bulk: bool = False
    ) -> contextlib.AbstractAsyncContextManager[FrameStream]:
        return open_request(self._node, donor, history_name(self._run_id), "history", request, bulk=bulk)

    async def _content(self, donor: str, request: HistoryRequest, limit: int) -> bytearray:
        """The bodies of an answer, one after the other: at most `limit` bytes."""
        content = bytearray()
        async with self._asking(donor, request, bulk=limit > BULK_BYTES) as stream:
            while (body := await self._body(stream, FRAME_BYTES)) is not None:
                content += body
                if len(content) > limit:
                    raise CatchUpError(f"{donor} sent {request.what} {request.digest} of more than {limit} bytes")
        return content

    async def _receive_meta(self, stream: FrameStream) -> SnapshotMeta:
        """Wait for a donor that reports that it is writing its snapshot."""
        kind, longest_s, clock = Kind.BUSY, self._node.timing.writing_s, self._node.clock
        until, limits = clock() + longest_s, {Kind.META: MAX_MESSAGE_BYTES, Kind.BUSY: 0, Kind.END: 0}
        while kind is Kind.BUSY:
            if clock() > until:
                raise StreamTimeoutError(stream.remote, f"has been writing its snapshot for {longest_s:g} s")
            kind, body = await stream.receive(limits, timeout_s=self._node.timing.frame_timeout_s)
        if kind is Kind.END:
            raise CatchUpError(f"{stream.remote} has no snapshot")
        return parse_json(SnapshotMeta, body)

    async def _body(self, stream: FrameStream, limit: int) -> bytes | None:
        """The next DATA body, None at END."""
        limits = {Kind.DATA: limit, Kind.END: 0, Kind.BUSY: 0}
        kind, body = await stream.receive(limits, timeout_s=self._node.timing.frame_timeout_s)
        if kind is Kind.BUSY:
            raise StreamClosedError(stream.remote, "is busy")
        return body if kind is Kind.DATA else None


def _in_words(fragments: Sequence[int]) -> str:
    return f"{sum(fragments)} parameters" + (f" in {len(fragments)} fragments" if len(fragments) > 1 else "")
