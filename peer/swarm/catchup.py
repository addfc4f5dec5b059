"""Catching up from a donor that is not trusted: replay missed updates, or take a verified snapshot."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from peer.errors import ProtocolError
from peer.outer.compress.base import NonFiniteError
from peer.outer.state import OuterState, Update, state_digest
from peer.protocol.lineage import Certificate, RosterLimits, chain_weight, check_chain, heavier
from peer.protocol.records import PeerRecord, parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, HistoryRequest, Kind, SnapshotMeta
from peer.swarm.history import SLICE_BYTES, History, chunk_lengths, history_name
from peer.swarm.node import Node
from peer.swarm.streams import Stream, StreamClosedError

log = logging.getLogger(__name__)
FRAME_TIMEOUT_S = 30.0  # a 4 MiB chunk: at least 140 kB/s
Apply = Callable[[Update, Certificate], Awaitable[None]]
Adopt = Callable[[Path, list[Certificate]], Awaitable[None]]


class CatchUpError(ProtocolError):
    """A donor could not or would not give what its record promised."""


class NotHeavierError(CatchUpError):
    """The donor's lineage is valid, but does not beat ours: nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where this peer stands, and what its state must look like."""

    state: OuterState
    history: History
    valid: bool


@dataclass(frozen=True, kw_only=True)
class CaughtUp:
    """How a peer caught up; `donor` is None when it left half-way."""

    donor: str | None
    replayed: int
    snapshot_round: int | None


def ahead(peers: dict[str, PeerRecord], standing: Standing, distrusted: set[str]) -> list[str]:
    """Peers whose lineage beats ours by their own account, the heaviest first."""
    weight, lineage_id = standing.history.weight, standing.state.lineage_id
    better = [
        peer_id
        for peer_id, record in peers.items()
        if peer_id not in distrusted
        and record.lineage_id != lineage_id
        and record.state != "joining"
        and (not standing.valid or heavier(record.lineage_weight, record.lineage_id, weight, lineage_id))
    ]
    return sorted(better, key=lambda peer_id: (-peers[peer_id].lineage_weight, peers[peer_id].lineage_id, peer_id))


class Fetcher:
    """Fetches history from one donor. Nothing it returns is trusted before it is checked here.

    Args:
        folder: where an incoming snapshot is written until it is verified.
        limits: what the run allows in a roster.
    """

    def __init__(self, node: Node, run_id: str, folder: Path, limits: RosterLimits) -> None:
        self._node, self._run_id, self._folder, self._limits = node, run_id, folder, limits

    async def catch_up(self, donor: str, standing: Standing, apply: Apply, adopt: Adopt) -> CaughtUp:
        """Bring the state to the donor's tip.

        Raises:
            CatchUpError, ProtocolError: the donor's data does not verify, or its lineage is not heavier.
            StreamClosedError: it went away.
        """
        state, history = standing.state, standing.history
        if standing.valid:
            onward = await self._chain(donor, len(history.chain), state.lineage_id)
            replayed = await self._replay(donor, onward, state, apply)
            if onward and replayed == len(onward):
                return CaughtUp(donor=donor, replayed=replayed, snapshot_round=None)
        return await self._snapshot(donor, standing, adopt)

    async def genesis(self, donor: str, standing: Standing, adopt: Adopt) -> None:
        """Take the initial state from a donor: its digest is the genesis that the manifest names."""
        async with self._asking(donor, HistoryRequest(what="snapshot", run_id=self._run_id)) as stream:
            meta = await _receive_meta(stream)
            if meta.round != 0:
                raise CatchUpError(f"{donor} holds round {meta.round}, not the genesis")
            path = await self._receive_chunks(stream, meta, standing, standing.history.genesis)
        await adopt(path, [])

    async def _replay(self, donor: str, onward: list[Certificate], state: OuterState, apply: Apply) -> int:
        """Apply certified updates one by one; -> how many the donor still had."""
        for count, certificate in enumerate(onward):
            link = certificate.link
            payload = await self._update(donor, certificate, state)
            if payload is None:
                return count
            update = Update.split(payload, state.numel, len(link.roster), state.compressor)
            try:
                digest = await asyncio.to_thread(state.preview, update)
            except NonFiniteError as error:
                raise CatchUpError(f"round {link.round}: {error}") from None
            if digest != link.state_digest:
                raise CatchUpError(f"round {link.round} leads to {digest[:12]}, certified {link.state_digest[:12]}")
            await apply(update, certificate)
        return len(onward)

    async def _snapshot(self, donor: str, standing: Standing, adopt: Adopt) -> CaughtUp:
        """Verify the donor's chain from genesis, then its state chunk by chunk."""
        history = standing.history
        async with self._asking(donor, HistoryRequest(what="snapshot", run_id=self._run_id)) as stream:
            meta = await _receive_meta(stream)
            chain = (await self._chain(donor, 0, history.genesis))[: meta.round]
            if not chain or chain[-1].link.id != meta.lineage_id:
                raise CatchUpError(f"{donor}: its chain does not lead to its snapshot of round {meta.round}")
            if standing.valid and not heavier(
                chain_weight(chain), meta.lineage_id, history.weight, standing.state.lineage_id
            ):
                raise NotHeavierError(f"the chain of {donor} is not heavier than ours")
            path = await self._receive_chunks(stream, meta, standing, chain[-1].link.state_digest)
        await adopt(path, chain)
        return CaughtUp(donor=donor, replayed=0, snapshot_round=meta.round)

    async def _chain(self, donor: str, from_round: int, parent: str) -> list[Certificate]:
        """The donor's certificates from a round on, each checked before the next is read; none if the first does not
        follow `parent`: the donor is on another lineage, or no further than this peer.
        """
        chain: list[Certificate] = []
        request = HistoryRequest(what="chain", run_id=self._run_id, from_round=from_round)
        async with self._asking(donor, request) as stream:
            while (piece := await _piece(stream, MAX_MESSAGE_BYTES)) is not None:
                certificate = parse_json(Certificate, piece)
                if not chain and certificate.link.parent != parent:
                    return []
                check_chain([certificate], self._run_id, parent, from_round + len(chain), self._limits)
                parent = certificate.link.id
                chain.append(certificate)
        return chain

    async def _update(self, donor: str, certificate: Certificate, state: OuterState) -> bytes | None:
        digest = certificate.link.update_digest
        limit = state.compressor.wire_bytes(state.numel) + 64 * len(certificate.link.roster)
        payload = bytearray()
        request = HistoryRequest(what="update", run_id=self._run_id, digest=digest)
        async with self._asking(donor, request) as stream:
            while (piece := await _piece(stream, SLICE_BYTES)) is not None:
                payload += piece
                if len(payload) > limit:
                    raise CatchUpError(f"{donor} sent an update of more than {limit} bytes")
        if not payload:
            return None
        if hashlib.sha256(payload).hexdigest() != digest:
            raise CatchUpError(f"{donor} sent an update with another digest than round {certificate.link.round}'s")
        return bytes(payload)

    async def _receive_chunks(self, stream: Stream, meta: SnapshotMeta, standing: Standing, expected: str) -> Path:
        """Write the snapshot to a file, each chunk checked on arrival; -> its path."""
        state, donor = standing.state, stream.remote
        if (meta.numel, meta.num_buffers) != (state.numel, len(state.buffers)):
            raise CatchUpError(f"{donor} has {meta.numel} parameters; this run has {state.numel}")
        lengths = chunk_lengths(meta)
        joined = await _piece(stream, 32 * len(lengths))
        digests = [(joined or b"")[start : start + 32] for start in range(0, len(joined or b""), 32)]
        if state_digest(digests, meta.numel, meta.num_buffers) != expected:
            raise CatchUpError(f"{donor} serves another state than the certified {expected[:12]}")
        path = self._folder / "incoming.bin"
        with path.open("wb") as file:
            for length, digest in zip(lengths, digests, strict=True):
                piece = await _piece(stream, length)
                if piece is None or len(piece) != length or hashlib.sha256(piece).digest() != digest:
                    raise CatchUpError(f"{donor} sent a damaged chunk of its snapshot")
                file.write(piece)
        return path

    def _asking(self, donor: str, request: HistoryRequest) -> _Asking:
        return _Asking(self._node, donor, history_name(self._run_id), request)


class _Asking:
    """`async with`: a stream to a donor with the request sent."""

    def __init__(self, node: Node, donor: str, name: str, request: HistoryRequest) -> None:
        self._node, self._donor, self._name, self._request = node, donor, name, request
        self._stream: Stream | None = None

    async def __aenter__(self) -> Stream:
        self._stream = await self._node.open(self._donor, self._name, "history")
        await self._stream.send_message(Kind.REQUEST, self._request)
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        assert self._stream is not None
        self._stream.close()


async def _receive_meta(stream: Stream) -> SnapshotMeta:
    kind, body = await _bounded(stream, {Kind.META: MAX_MESSAGE_BYTES, Kind.END: 0})
    if kind is Kind.END:
        raise CatchUpError(f"{stream.remote} has no snapshot")
    return parse_json(SnapshotMeta, body)


async def _piece(stream: Stream, limit: int) -> bytes | None:
    """The next DATA body, None at END."""
    kind, body = await _bounded(stream, {Kind.DATA: limit, Kind.END: 0})
    return body if kind is Kind.DATA else None


async def _bounded(stream: Stream, limits: dict[Kind, int]) -> tuple[Kind, bytes]:
    try:
        return await asyncio.wait_for(stream.receive(limits), FRAME_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise StreamClosedError(stream.remote, f"sent nothing for {FRAME_TIMEOUT_S:g} s") from None
