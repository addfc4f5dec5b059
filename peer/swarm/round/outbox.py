"""What one member sends in one round, a task for each other member; and the wait for what the others send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from peer.errors import AtollError
from peer.outer.round import RoundAborted
from peer.protocol.statements import Leaves
from peer.protocol.wire import Kind
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.round.deadline import DeadlineEstimator
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.strategy import Contribute, ExchangeStrategy
from peer.system.clock import Clock

log = logging.getLogger(__name__)
OpenStream = Callable[[str], Awaitable[FrameStream]]


def start_senders(
    buffers: RoundBuffers,
    work: ExchangeStrategy,
    contribute: Contribute,
    open_stream: OpenStream,
    first: tuple[Kind, bytes] | None,
) -> None:
    """Start a sender to each other member; what the present senders still have to say comes first.

    Args:
        first: a frame that comes before the rest.
    """

    async def to_one(peer_id: str, index: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        stream = await open_stream(peer_id)
        buffers.outbound[peer_id] = stream
        if first is not None:
            await stream.send(*first)
        leaves = Leaves()
        for start, stop in buffers.slices(index):
            await stream.send(Kind.CONTRIBUTION, await contribute(start, stop, leaves))
        await stream.send(Kind.SEAL_SENT, (await work.seal(buffers, peer_id, leaves)).body)
        for future in buffers.own.reduced:
            await stream.send(Kind.REDUCED, await asyncio.shield(future))
        await stream.send(Kind.SEAL_REDUCED, (await asyncio.shield(buffers.own.seal)).body)
        await stream.send_message(Kind.VOTE, await asyncio.shield(buffers.own.vote))

    before = buffers.senders
    buffers.senders = {
        peer_id: asyncio.ensure_future(to_one(peer_id, index, before.get(peer_id)))
        for index, peer_id in enumerate(buffers.order)
        if index != buffers.me
    }
    for task in buffers.senders.values():
        task.add_done_callback(_retrieve)


async def bounded(
    wanted: Sequence[asyncio.Future[Any]], buffers: RoundBuffers, clock: Clock, budget: DeadlineEstimator
) -> None:
    """Wait for all; any failure, also in sending, ends the exchange at once."""
    work = _completed(wanted, [*buffers.senders.values(), buffers.overtaken])
    try:
        await asyncio.wait_for(work, max(0.0, buffers.deadline - clock()))
    except TimeoutError:
        lack = buffers.lack()
        own = lack is None or lack.stage == "vote"
        if own or buffers.too_short(lack):
            budget.allow_longer(buffers.wire_bytes)
        names = sorted(lack.names) if lack is not None and not own else []
        whose = f"{lack.stage} of {', '.join(names)}" if lack is not None and not own else "own shard"
        reason = f"deadline passed waiting for the {whose}"
        raise RoundAborted("exchange", reason, names[0] if names else None) from None
    except StreamClosedError as error:
        raise RoundAborted("exchange", str(error), culprit=error.remote) from None
    except RoundAborted:
        raise
    except AtollError as error:
        raise RoundAborted("exchange", f"own contribution: {error}", culprit=buffers.order[buffers.me]) from None


async def _completed(wanted: Iterable[asyncio.Future[Any]], watched: Iterable[asyncio.Future[Any]]) -> None:
    """Wait for all of `wanted`; the first failure, of one that is only `watched` too, is raised."""
    missing = set(wanted)
    waiting = missing.union(watched)
    while missing:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
        missing -= done
    await asyncio.sleep(0)  # what is noted of the last ones is noted in the loop's next turn, see `done_at`


def _retrieve(task: asyncio.Task[None]) -> None:
    """A sender's failure is raised where the round waits; after the round it is ignored."""
    if not task.cancelled() and task.exception() is not None:
        log.debug("a sender ended: %s", task.exception())
