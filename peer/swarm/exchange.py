"""The butterfly exchange of one round over raw binary streams, and the votes that commit it.

Every member opens one stream to every other and sends on it, in order: HELLO, its PART for that reducer, the REDUCED
part that it made (encoded once, the same bytes for all), its VOTE. What arrives goes to this round's inbox, checked;
nothing touches the outer state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from peer.errors import AtollError, ProtocolError
from peer.outer.compress.base import Compressor, PayloadError
from peer.outer.compress.feedback import Residual
from peer.outer.recipes import Recipe
from peer.outer.round import Due, Exchanged, Group, RoundAborted, reduce_part
from peer.outer.state import OuterState, Update
from peer.protocol.identity import verify
from peer.protocol.lineage import VOTE_DOMAIN, Certificate, Link, quorum
from peer.protocol.wire import AbortMessage, HelloMessage, Kind, VoteMessage
from peer.swarm.inbox import Session
from peer.swarm.node import Node
from peer.swarm.streams import Stream, StreamClosedError

log = logging.getLogger(__name__)
T = TypeVar("T")
HELLO_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 1.0
MIN_BUDGET_S = 10.0
FIRST_RATE = 1e6
EARLY_STREAMS = 64


class Exchange:
    """All exchanges of this peer; routes inbound streams to the session of their group.

    Args:
        node: the network.
        run_id: names the stream handler.
        timeout_s: the manifest's cap on one round.
        recipe: what a reducer makes of the contributions to its part, and whether losses are fed back.
        numel: elements of the outer state.
        clock: monotonic seconds.
    """

    def __init__(
        self, node: Node, run_id: str, timeout_s: float, recipe: Recipe, numel: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._aggregator = recipe.aggregator
        # Feedback on both legs: of what this peer contributes, and of what it reduces for all.
        self._lost = None if recipe.feedback is None else Residual(recipe.feedback, numel)
        self._lost_in_reducing = None if recipe.feedback is None else Residual(recipe.feedback.on_return, numel)
        self._node, self._timeout_s, self._clock = node, timeout_s, clock
        self._name = f"atoll/{run_id[:16]}/round"
        self._session: Session | None = None
        self._arrived = asyncio.Condition()
        self._early = 0
        self._rate = FIRST_RATE

    async def start(self) -> None:
        await self._node.serve(self._name, "round", self._on_stream)

    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged:
        """Send and reduce; returns the update, identical on all members. Raises RoundAborted."""
        began = self._clock()
        log.info("round %d: group of %d", state.round + 1, len(group.members))
        session = Session(group, state.numel, state.compressor, began + self._timeout_s)
        session.deadline = began + self._budget_s(session)
        async with self._arrived:
            self._session = session
            self._arrived.notify_all()
        try:
            payloads = await asyncio.to_thread(state.encode_contribution, due.snapshot, session.bounds, self._lost)
        except AtollError as error:
            raise RoundAborted("exchange", f"own contribution: {error}", culprit=group.me) from None
        await self._bounded(session, self._send_parts(session, payloads), "while sending parts")
        own = payloads[group.index]
        payloads.clear()  # a byte a parameter, not needed while reducing
        parts = await self._collect(session, "part", own)
        weights = [member.tokens for member in group.members]
        reduced, cosine = await self._reduce(session, parts, weights, session.bounds[group.index])
        await self._bounded(session, self._send_all(session, Kind.REDUCED, reduced), "while sending the mean")
        pieces = await self._collect(session, "reduced", reduced)
        update = await asyncio.to_thread(_checked_update, session, tuple(pieces), state.numel)
        self._learn_rate(session, self._clock() - began)
        return Exchanged(update, cosine)

    async def commit(self, group: Group, link: Link) -> Certificate:
        """Sign the link, collect the others' votes; returns once two thirds agree. Raises RoundAborted."""
        session = self._session
        assert session is not None
        assert session.group is group
        signature = self._node.identity.sign(VOTE_DOMAIN, bytes.fromhex(link.id)).hex()
        vote = VoteMessage(link_id=link.id, signature=signature)
        sending = asyncio.ensure_future(self._send_vote(session, vote))
        signatures = {group.me: signature}
        waiting = {asyncio.ensure_future(self._vote_of(session, peer_id, link)) for peer_id in group.others}
        try:
            while len(signatures) < quorum(len(group.members)):
                if not waiting:
                    raise RoundAborted("commit", self._disagreement(session, link, signatures))
                left = session.deadline - self._clock()
                done, waiting = await asyncio.wait(
                    waiting, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise RoundAborted("commit", f"{len(signatures)} of {len(group.members)} votes by the deadline")
                signatures.update(task.result() for task in done if task.result() is not None)  # type: ignore[misc]
            await asyncio.wait({sending}, timeout=max(0.0, session.deadline - self._clock()))
        finally:
            sending.cancel()
            for task in waiting:
                task.cancel()
        return Certificate(link=link, signatures=signatures)

    async def release(self, group: Group, abort: RoundAborted | None) -> None:
        """End the session. After an abort, tell the others at once so that nobody waits for the deadline."""
        session = self._session
        if session is None or session.group is not group:
            return
        self._session = None
        for residual in (self._lost, self._lost_in_reducing):
            if residual is not None:
                await asyncio.to_thread(residual.commit if abort is None else residual.revert)
        if abort is not None:
            message = AbortMessage(reason=abort.reason[:300], culprit=abort.culprit)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._tell_abort(session, message), ABORT_TIMEOUT_S)
        for stream in session.outbound.values():
            self._node.spawn(stream.finish())
        for inbox in session.inboxes.values():
            inbox.fail(abort or RoundAborted("commit", "the round is over"))

    def _budget_s(self, session: Session) -> float:
        """Time for exchange and commit: four times what such bytes took lately, within the manifest's cap."""
        expected_s = 2.0 * session.wire_bytes / self._rate
        return min(self._timeout_s, MIN_BUDGET_S + 4.0 * expected_s)

    def _learn_rate(self, session: Session, seconds: float) -> None:
        rate = 2.0 * session.wire_bytes / max(seconds, 1e-3)
        self._rate = 0.7 * self._rate + 0.3 * rate if self._rate != FIRST_RATE else rate

    async def _reduce(
        self, session: Session, parts: list[bytes], weights: list[int], bounds: tuple[int, int]
    ) -> tuple[bytes, float | None]:
        start, stop = bounds
        numel = stop - start
        lost = self._lost_in_reducing
        encode = None if lost is None else lambda n, read: lost.encode(session.compressor, start, start + n, read)
        for member, payload in zip(session.group.members, parts, strict=True):
            try:
                await asyncio.to_thread(_check_payload, session.compressor, payload, numel)
            except PayloadError as error:
                raise RoundAborted("exchange", f"malformed contribution: {error}", culprit=member.peer_id) from None
        try:
            return await asyncio.to_thread(
                reduce_part, parts, weights, numel, session.compressor, self._aggregator, encode
            )
        except ValueError as error:  # a gate dropped everybody, or the aggregate left fp32's range
            raise RoundAborted("exchange", f"no aggregate: {error}") from None

    async def _on_stream(self, stream: Stream) -> None:
        hello = await asyncio.wait_for(stream.receive_message(Kind.HELLO, HelloMessage), HELLO_TIMEOUT_S)
        session = await self._session_of(hello.group_id)
        inbox = session.inboxes.get(stream.remote) if session is not None else None
        if inbox is None or inbox.part.done():
            raise ProtocolError(f"{stream.remote} speaks for group {hello.group_id[:12]}, which it is not expected in")
        await inbox.fill(stream)

    async def _session_of(self, identifier: str) -> Session | None:
        """The session of a group; a stream may arrive a little before this member's own roster does."""

        def known() -> bool:
            return self._session is not None and self._session.group.id == identifier

        if not known():
            if self._early >= EARLY_STREAMS:
                raise ProtocolError(f"{self._early} streams wait for unknown groups; the limit is {EARLY_STREAMS}")
            self._early += 1
            try:
                async with self._arrived:
                    await asyncio.wait_for(self._arrived.wait_for(known), HELLO_TIMEOUT_S)
            except asyncio.TimeoutError:
                return None
            finally:
                self._early -= 1
        return self._session

    async def _send_parts(self, session: Session, payloads: list[bytes]) -> None:
        async def to_one(index: int, peer_id: str) -> None:
            stream = await self._node.open(peer_id, self._name, "round")
            session.outbound[peer_id] = stream
            await stream.send_message(Kind.HELLO, HelloMessage(group_id=session.group.id))
            await stream.send(Kind.PART, payloads[index])

        members = enumerate(session.group.members)
        await _all(to_one(index, member.peer_id) for index, member in members if index != session.group.index)

    async def _send_all(self, session: Session, kind: Kind, body: bytes) -> None:
        await _all(stream.send(kind, body) for stream in session.outbound.values())

    async def _send_vote(self, session: Session, vote: VoteMessage) -> None:
        results = await asyncio.gather(
            *(stream.send_message(Kind.VOTE, vote) for stream in session.outbound.values()), return_exceptions=True
        )
        for failure in results:
            if isinstance(failure, BaseException):
                log.info("vote not delivered: %s", failure)

    async def _tell_abort(self, session: Session, message: AbortMessage) -> None:
        sends = (stream.send_message(Kind.ABORT, message) for stream in session.outbound.values())
        await asyncio.gather(*sends, return_exceptions=True)

    async def _collect(self, session: Session, stage: str, own: bytes) -> list[bytes]:
        """One payload per member in roster order, this peer's own included.

        Whoever gives up before it has sent its mean ends the exchange at once, whatever this member waits for now.
        """
        futures = {peer_id: getattr(inbox, stage) for peer_id, inbox in session.inboxes.items()}
        work = _completed(futures.values(), [inbox.reduced for inbox in session.inboxes.values()])
        await self._bounded(session, work, f"waiting for the {stage}", futures)
        return [
            own if member.peer_id == session.group.me else futures[member.peer_id].result()
            for member in session.group.members
        ]

    async def _bounded(
        self,
        session: Session,
        work: Awaitable[Any],
        doing: str,
        futures: dict[str, asyncio.Future[bytes]] | None = None,
    ) -> None:
        try:
            await asyncio.wait_for(work, max(0.0, session.deadline - self._clock()))
        except asyncio.TimeoutError:
            late = sorted(peer_id for peer_id, future in (futures or {}).items() if not future.done())
            whose = f" of {', '.join(late)}" if late else ""
            culprit = late[0] if late else None
            raise RoundAborted("exchange", f"deadline passed {doing}{whose}", culprit) from None
        except StreamClosedError as error:
            raise RoundAborted("exchange", str(error), culprit=error.remote) from None

    async def _vote_of(self, session: Session, peer_id: str, link: Link) -> tuple[str, str] | None:
        """(peer id, signature) if that member signed the same link, else None."""
        try:
            vote = await session.inboxes[peer_id].vote
        except RoundAborted as abort:
            log.info("no vote of %s: %s", peer_id, abort.reason)
            return None
        if vote.link_id != link.id:
            log.warning("%s computed another link: %s, not %s", peer_id, vote.link_id[:12], link.id[:12])
            return None
        if not verify(peer_id, VOTE_DOMAIN, bytes.fromhex(link.id), bytes.fromhex(vote.signature)):
            log.warning("%s signed its vote wrongly", peer_id)
            return None
        return peer_id, vote.signature

    @staticmethod
    def _disagreement(session: Session, link: Link, signatures: dict[str, str]) -> str:
        missing = [peer_id for peer_id in session.group.others if peer_id not in signatures]
        return (
            f"{len(signatures)} of {len(session.group.members)} signed link {link.id[:12]}; "
            f"{quorum(len(session.group.members))} are needed; without {', '.join(missing)}"
        )


def _check_payload(compressor: Compressor, payload: bytes, numel: int) -> None:
    Update((payload,), numel, compressor)


def _checked_update(session: Session, pieces: tuple[bytes, ...], numel: int) -> Update:
    try:
        return Update(pieces, numel, session.compressor)
    except PayloadError:
        for member, piece, (start, stop) in zip(session.group.members, pieces, session.bounds, strict=True):
            try:
                _check_payload(session.compressor, piece, stop - start)
            except PayloadError as error:
                raise RoundAborted("exchange", f"malformed mean: {error}", culprit=member.peer_id) from None
        raise


async def _completed(wanted: Iterable[asyncio.Future[T]], watched: Iterable[asyncio.Future[T]]) -> None:
    """Wait for all of `wanted`; the first failure, of one that is only `watched` too, is raised."""
    missing = set(wanted)
    waiting = missing.union(watched)
    while missing:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
        missing -= done


async def _all(works: Iterable[Awaitable[Any]]) -> None:
    """Await all; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
