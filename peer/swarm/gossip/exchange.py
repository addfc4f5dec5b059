"""One gossip round with others: agree on the members, exchange all contributions, then all confirm that they hold them.

Each member opens a stream to every other one and sends, in order: its join; the members that it has seen come; its
contribution; END once it holds all contributions. A member applies the round when all have said END. Whatever fails
before ends the round of this group: its members then make it alone, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.outer.round import RoundAborted
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, GossipJoin, GossipRoster, Kind, RejectMessage
from peer.swarm.gossip.inbox import GossipInbox, GossipInboxes, round_name
from peer.swarm.net.node import BULK_BYTES, Node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait

log = logging.getLogger(__name__)
Frame = Callable[[int], Awaitable[bytes]]
Take = Callable[[int, Sequence[Payload]], Awaitable[None]]


class GossipExchange:
    """One peer's side of a round.

    Args:
        node, inboxes: the network, and the members that join this peer.
        sizes: bytes of each frame of a contribution.
        heard: called with a peer and its last round, when it says so.

    Attributes:
        absent: the peers of the roster that are not among the `members`, and why.
    """

    def __init__(
        self, node: Node, inboxes: GossipInboxes, join: GossipJoin, sizes: Sequence[int],
        heard: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        self._node, self._inboxes, self._join, self._sizes, self._heard = node, inboxes, join, sizes, heard
        self._others = [peer_id for peer_id in join.roster if peer_id != node.peer_id]
        self._lanes: dict[str, FrameStream] = {}
        self._here: dict[str, GossipInbox] = {}
        self._absent: dict[str, str] = {}
        self._past: set[str] = set()
        self.absent: Mapping[str, str] = {}
        self._tasks: list[asyncio.Future[Any]] = []
        self._over = False
        self._deadline = float("inf")

    # -- members -----------------------------------------------------------------------------------------------------

    async def members(self, patience_s: float, fewest: int = 2) -> tuple[str, ...]:
        """The members of the roster with which this peer continues, itself included, in the roster's order.

        Args:
            fewest: with fewer members, this peer makes the round alone: no aggregator could judge them.

        Raises:
            RoundAborted: no member joined, or they continue with others; `behind` if one is at a later round.
        """
        self._tasks += [asyncio.ensure_future(self._come_to(peer_id)) for peer_id in self._others]
        began = self._node.clock()
        self._deadline = began + patience_s
        while True:
            self._inboxes.changed.clear()
            self._look()
            waiting = [p for p in self._others if p not in self._absent and not (p in self._here and p in self._lanes)]
            if not waiting or self._node.clock() >= self._deadline:
                break
            with contextlib.suppress(asyncio.TimeoutError):
                left = max(0.0, self._deadline - self._node.clock())
                await asyncio.wait_for(self._inboxes.changed.wait(), min(self._node.timing.recheck_s, left))
        for peer_id in waiting:
            self._absent[peer_id] = f"{peer_id} did not come within {self._node.clock() - began:.0f} s"
        chosen = tuple(peer_id for peer_id in self._join.roster if peer_id not in self._absent)
        if len(chosen) < fewest:
            why = "; ".join(self._absent.values())
            raise RoundAborted("match", why, next(iter(self._absent)), behind=bool(self._past))
        self.absent = dict(self._absent)  # streams that end later belong to the round
        await self._agree(chosen)
        return chosen

    def tokens(self, peer_id: str) -> int:
        """What a member claims to weigh."""
        return self._join.tokens if peer_id == self._node.peer_id else self._here[peer_id].join.tokens

    async def _come_to(self, peer_id: str) -> None:
        """Open a stream to a member, and hear whether it has no place for this peer."""
        try:
            bulk = sum(self._sizes) > BULK_BYTES
            stream = await self._node.open(peer_id, round_name(self._join.run_id), "round", bulk=bulk)
            if self._over:
                stream.close()
                return
            await stream.send_message(Kind.JOIN, self._join)
            self._lanes[peer_id] = stream
            self._inboxes.changed.set()
            _, body = await stream.receive({Kind.REJECT: MAX_MESSAGE_BYTES})
            reject = parse_json(RejectMessage, body)
            self._heard(peer_id, reject.round)
            if reject.reason == "behind":
                self._past.add(peer_id)
            why = {"behind": f"is past round {self._join.round}", "follow": "sees another group"}
            self._absent.setdefault(peer_id, f"{peer_id} {why.get(reject.reason, 'takes no part in rounds now')}")
        except (StreamClosedError, ProtocolError) as error:
            self._absent.setdefault(peer_id, str(error))
        self._inboxes.changed.set()

    def _look(self) -> None:
        """Admit the members that have joined, and note with which members each continues."""
        for peer_id in self._others:
            inbox = self._inboxes.waiting.get(peer_id)
            if inbox is not None and not inbox.seated.done() and inbox.join.round == self._join.round:
                if inbox.join.roster != self._join.roster:
                    self._absent.setdefault(peer_id, f"{peer_id} sees another group")
                    inbox.turn_away("follow")
                elif peer_id not in self._here:
                    self._here[peer_id] = inbox
                    inbox.seat(self._sizes)
            elif inbox is not None and inbox.join.round > self._join.round:
                self._past.add(peer_id)
                self._absent.setdefault(peer_id, f"{peer_id} is at round {inbox.join.round}")
        for peer_id, inbox in self._here.items():
            if inbox.lost is not None:
                if not inbox.roster.done() or inbox.roster.exception() is not None:
                    self._past.add(peer_id)  # it joined, abandoned the round, and makes the next one
                self._absent.setdefault(peer_id, inbox.lost.reason)
        self._note_rosters({p: i.roster.result() for p, i in self._here.items() if i.roster.done() and i.lost is None})

    def _note_rosters(self, rosters: Mapping[str, GossipRoster]) -> None:
        """Shorten the wait for members that another one has given up on; drop members that exclude one that is here.

        A roster counts for its sender only: otherwise a Byzantine member could isolate each of the others.
        """
        for peer_id, roster in rosters.items():
            left_out = [p for p in self._join.roster if p not in roster.members and p not in self._absent]
            if any(p == self._node.peer_id or p in self._here for p in left_out):
                self._absent.setdefault(peer_id, f"{peer_id} continues with others")
            elif left_out:
                self._deadline = min(self._deadline, self._node.clock() + self._node.timing.last_wait_s)

    async def _agree(self, chosen: tuple[str, ...]) -> None:
        """Send the list of chosen members to all that have joined, and receive theirs from the chosen."""
        others = [peer_id for peer_id in chosen if peer_id != self._node.peer_id]
        message = GossipRoster(members=chosen)
        try:
            telling = [self._tell(peer_id, message, peer_id in chosen) for peer_id in tuple(self._lanes)]
            hearing = [asyncio.shield(self._here[peer_id].roster) for peer_id in others]
            told = await asyncio.wait_for(asyncio.gather(*hearing, *telling), self._node.timing.roster_wait_s)
        except TimeoutError:
            late = [peer_id for peer_id in others if not self._here[peer_id].roster.done()]
            raise RoundAborted("match", f"{', '.join(late)} named no members", late[0] if late else None) from None
        except StreamClosedError as error:
            raise RoundAborted("match", str(error), error.remote) from None
        for peer_id, roster in zip(others, told, strict=False):
            if roster is not None and set(roster.members) != set(chosen):
                raise RoundAborted("match", f"{peer_id} continues with others", peer_id)

    async def _tell(self, peer_id: str, message: GossipRoster, chosen: bool) -> None:
        try:
            await self._lanes[peer_id].send_message(Kind.ROSTER, message)
        except StreamClosedError:
            if chosen:  # a member that is left out need not receive it
                raise

    # -- contributions -----------------------------------------------------------------------------------------------

    async def exchange(self, members: Sequence[str], frame: Frame, take: Take, timeout_s: float) -> None:
        """Send this peer's contribution, take all; returns once all hold everything.

        Args:
            members: as `members` returned them.
            frame: index -> this peer's own frame.
            take: (index, a frame of each member in their order) is called once for each slice, in order.

        Raises:
            RoundAborted: a member left, was too slow, or sent a malformed payload.
        """
        others = [peer_id for peer_id in members if peer_id != self._node.peer_id]
        held = asyncio.get_running_loop().create_future()
        work: list[asyncio.Future[None]] = [asyncio.ensure_future(self._take(members, frame, take, held))]
        work += [asyncio.ensure_future(self._send(self._lanes[peer_id], frame, held)) for peer_id in others]
        work += [self._here[peer_id].complete for peer_id in others]
        try:
            done, late = await asyncio.wait(work, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()
            if late:
                missing = [peer_id for peer_id in others if not self._here[peer_id].complete.done()]
                names = ", ".join(missing) or "a member"
                raise RoundAborted(
                    "exchange", f"{names} was not done within {timeout_s:.0f} s", missing[0] if missing else None
                )
        except StreamClosedError as error:
            raise RoundAborted("exchange", str(error), error.remote) from None
        finally:
            await cancel_and_wait(work)

    async def _send(self, stream: FrameStream, frame: Frame, held: asyncio.Future[None]) -> None:
        for index in range(len(self._sizes)):
            await stream.send(Kind.CONTRIBUTION, await frame(index))
        await asyncio.shield(held)
        await stream.send(Kind.END)

    async def _take(self, members: Sequence[str], frame: Frame, take: Take, held: asyncio.Future[None]) -> None:
        for index in range(len(self._sizes)):
            frames = []
            for peer_id in members:
                own = peer_id == self._node.peer_id
                frames.append(await frame(index) if own else await self._here[peer_id].frames[index])
            await take(index, frames)
            for peer_id in members:  # a frame is freed as soon as it is mixed
                if peer_id != self._node.peer_id:
                    self._here[peer_id].spent(index)
        held.set_result(None)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def close(self, whole: bool) -> None:
        """Leave; if the round is not whole, the others learn of it at once, by the end of their streams."""
        self._over = True
        await cancel_and_wait(self._tasks)
        for stream in self._lanes.values():
            if whole:
                self._node.spawn(stream.finish(self._node.timing.finish_timeout_s))
            else:
                stream.close()
        for inbox in self._here.values():
            inbox.end(RoundAborted("exchange", "the round is over"))
