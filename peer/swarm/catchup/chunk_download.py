"""The chunks of one snapshot from several donors at once, none of which is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from peer.errors import AtollError, ProtocolError
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm.catchup.partial_file import PartialFile
from peer.swarm.net.preopened import OpenStream
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import Timing
from peer.system.clock import awake_clock

log = logging.getLogger(__name__)
DONORS_AT_ONCE = 8
WINDOW = 2  # chunks requested on one stream: the donor reads the next while one is in flight
ALONE_CHUNKS = 2  # from a donor that remains alone
SLOW_FACTOR = 4.0
Distrust = Callable[[str, str], None]


class CatchUpError(ProtocolError):
    """A donor could not or would not give what its record promised."""


@dataclass(eq=False)
class DonorStream:
    """The requests to one donor.

    Attributes:
        asked: numbers of the chunks that it has been asked for and not sent, in order.
        since: when it could begin to send the first of them.
        took_s: how long it took for each of the last few.
        given_up: it is much slower than the others.
        second: of the two streams to a donor that serves alone.
        lone: there has been no other donor.
    """

    donor: str
    asked: deque[int] = field(default_factory=deque)
    since: float = 0.0
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    given_up: bool = False
    second: bool = False
    lone: bool = False
    stream: FrameStream | None = None


def much_slower(lane: DonorStream, lanes: Collection[DonorStream], now: float, idle: bool, floor_s: float) -> bool:
    """Whether a lane has kept a chunk waiting for much longer than chunks take elsewhere, and one of the others has not
    done the same meanwhile: if all are silent, this peer's line or disk stalls, and no donor is slow.

    Args:
        now: seconds without those in which this machine was suspended: no donor is slow for them.
        floor_s: a chunk that has taken less is not slow.
        idle: nothing is left to ask for: others could do what this lane has been asked for. Before that, a donor that
            has sent nothing yet may take its time: it may have to write its snapshot file first.
    """
    others = [other for other in lanes if other is not lane]
    elsewhere = [took for other in others for took in other.took_s]
    if not elsewhere or not lane.asked or not (lane.took_s or idle):
        return False
    limit_s = max(floor_s, SLOW_FACTOR * median(elsewhere))
    works = any(other.took_s and not (other.asked and now - other.since > limit_s / 2) for other in others)
    return works and now - lane.since > limit_s


class ChunkQueue:
    """What is still to be asked for.

    Attributes:
        todo: numbers of the chunks that no donor has been asked for.
        left: how many are missing, those among them that are on their way.
        work: set while there is something to ask for, or nothing is missing any more.
    """

    def __init__(self, missing: Sequence[int]) -> None:
        self.todo, self.left = deque(missing), len(missing)
        self.work, self.done = asyncio.Event(), asyncio.Event()
        self.work.set()

    def rest(self) -> None:
        """Stop work where all that is missing is on its way."""
        if not self.todo and self.left:
            self.work.clear()

    def give_back(self, indexes: deque[int]) -> None:
        """What one donor did not send is asked of others first of all."""
        if indexes:
            self.todo.extendleft(reversed(indexes))
            indexes.clear()
            self.work.set()

    def settle(self) -> None:
        """One more chunk is here, and right."""
        self.left -= 1
        if not self.left:
            self.done.set()
            self.work.set()


class ChunkDownload:
    """Fills a partial file from donors of its snapshot.

    A donor that sends anything wrong is distrusted; one that dies, does not have the snapshot any more, or is much
    slower than the others is left. What they owe is asked of the others.

    Args:
        file: open.
        distrust: called with a donor that lied, and how.
    """

    def __init__(
        self, open_stream: OpenStream, run_id: str, file: PartialFile, distrust: Distrust, timing: Timing
    ) -> None:
        self._timing = timing
        self._open, self._run_id, self._file, self._distrust = open_stream, run_id, file, distrust
        self._queue = ChunkQueue(file.missing)
        self._donors: deque[str] = deque()
        self._lanes: set[DonorStream] = set()
        self._alone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._losses: dict[str, AtollError] = {}
        self._progress_at = awake_clock()
        self.served: Counter[str] = Counter()

    async def run(self, donors: Sequence[str]) -> None:
        """Fetch all that is missing.

        Args:
            donors: the donors to ask, the best first; those beyond DONORS_AT_ONCE when others are dropped.

        Raises:
            ProtocolError, StreamClosedError: what was wrong with the first donor, when all are left.
        """
        self._donors.extend(donors)
        watching, beside = asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._work_beside())
        lone, count = len(donors) == 1, min(DONORS_AT_ONCE, len(donors))
        workers = {asyncio.ensure_future(self._work_on(lone)) for _ in range(count)}
        running = {beside, *workers}
        try:
            while running & workers or (self._alone.done() and not beside.done()):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    worker.result()
        finally:
            await cancel_and_wait([watching, beside, *workers])
        if self._queue.left:
            raise self._losses[donors[0]]

    async def _work_on(self, lone: bool) -> None:
        while self._queue.left and self._donors:
            await self._follow(DonorStream(self._donors.popleft(), lone=lone))

    async def _work_beside(self) -> None:
        """A second stream to a donor that serves alone, from the beginning or once it is left."""
        await self._follow(DonorStream(await self._alone, second=True))

    def _double(self, lane: DonorStream) -> None:
        """Ask for a second stream to this donor if it is alone: one of libp2p's does not fill a far line. A connection
        of its own does, and two would be in each other's way.
        """
        alone = len(self._lanes) == 1 and not self._alone.done()
        if alone and lane.stream is not None and not lane.stream.direct:
            self._alone.set_result(lane.donor)

    async def _follow(self, lane: DonorStream) -> None:
        """Ask one donor for chunks until none is missing; or until it is lost."""
        self._lanes.add(lane)
        try:
            while self._queue.left:
                await self._queue.work.wait()
                if self._queue.left and await self._ask(lane):
                    if lane.second:
                        return
                    await self._until_free(lane)
        except ProtocolError as error:
            if not isinstance(self._losses.get(lane.donor), ProtocolError):
                self._distrust(lane.donor, str(error))
            self._lose(lane, error)
        except StreamClosedError as error:
            reason = "is much slower than the other donors" if lane.given_up else str(error)
            self._lose(lane, StreamClosedError(lane.donor, reason.removeprefix(f"{lane.donor}: ")))
        finally:
            self._lanes.discard(lane)

    async def _ask(self, lane: DonorStream) -> bool:
        """Fetch chunks over one stream until there is nothing to ask for; True if the donor is busy."""
        lane.stream = await self._open(lane.donor)
        if lane.lone and self._queue.left > WINDOW:
            self._double(lane)
        buffers = [bytearray(max(length for _, length in self._file.places)) for _ in range(2)]
        checking: asyncio.Future[None] | None = None
        try:
            while await self._keep_asking(lane):
                body = await self._receive(lane, buffers[0])
                if body is None:
                    return True
                if checking is not None:
                    await checking
                checking = asyncio.ensure_future(self._check(lane, self._arrived(lane), body))
                buffers.reverse()
        finally:
            lane.stream.close()
            self._queue.give_back(lane.asked)
            if checking is not None:
                await checking  # a wrong chunk counts although its donor has left
        return False

    async def _keep_asking(self, lane: DonorStream) -> bool:
        """Ask for what there is, up to WINDOW chunks; False when nothing is asked for."""
        while self._queue.todo and len(lane.asked) < WINDOW:
            index = self._queue.todo.popleft()
            if not lane.asked:
                lane.since = awake_clock()
            lane.asked.append(index)
            request = HistoryRequest(
                what="chunks", run_id=self._run_id, digest=self._file.meta.lineage_id, indexes=(index,)
            )
            assert lane.stream is not None
            await lane.stream.send_message(Kind.REQUEST, request, self._timing.frame_timeout_s)
        self._queue.rest()
        return bool(lane.asked)

    async def _receive(self, lane: DonorStream, buffer: bytearray) -> memoryview | None:
        """The chunk that was asked for first, into `buffer`; None if the donor is busy."""
        assert lane.stream is not None
        length = self._file.places[lane.asked[0]][1]
        async with lane.stream.within(self._timing.frame_timeout_s):
            return await _receive(lane.stream, memoryview(buffer)[:length])

    def _arrived(self, lane: DonorStream) -> int:
        """Note that the first of the chunks has come; -> its number."""
        now = awake_clock()
        lane.took_s.append(now - lane.since)
        lane.since = self._progress_at = now
        return lane.asked.popleft()

    async def _check(self, lane: DonorStream, index: int, body: memoryview) -> None:
        """Keep a chunk that has arrived, or expose the donor that sent a wrong one."""
        if not await self._file.put(index, body):
            self._queue.give_back(deque([index]))
            raise CatchUpError(f"{lane.donor} sent a damaged chunk of its snapshot")
        self.served[lane.donor] += 1
        self._queue.settle()
        if self.served[lane.donor] >= ALONE_CHUNKS:
            self._double(lane)

    def _lose(self, lane: DonorStream, error: AtollError) -> None:
        log.info("no more chunks from %s: %s", lane.donor, error)
        self._losses.setdefault(lane.donor, error)

    async def _until_free(self, lane: DonorStream) -> None:
        """Wait a while, or until no chunk is missing; raises StreamClosedError if no donor sends anything for long."""
        if awake_clock() - self._progress_at > self._timing.busy_patience_s:
            raise StreamClosedError(lane.donor, f"has been busy for {self._timing.busy_patience_s:g} s")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._queue.done.wait(), self._timing.busy_retry_s)

    async def _watch(self) -> None:
        """Leave donors that are much slower than the others."""
        while True:
            began = awake_clock()
            await asyncio.sleep(self._timing.watch_period_s)
            now = awake_clock()
            if now - began > 2 * self._timing.watch_period_s:
                continue  # this process is slow: arrived data waits to be read
            idle, floor_s = not self._queue.todo, self._timing.slow_floor_s
            for lane in tuple(self._lanes):
                if lane.stream is not None and much_slower(lane, self._lanes, now, idle, floor_s):
                    lane.given_up = True
                    lane.stream.close()


async def _receive(stream: FrameStream, out: memoryview) -> memoryview | None:
    kind, length = await stream.receive_header({Kind.DATA: len(out), Kind.BUSY: 0, Kind.END: 0})
    if kind is Kind.END:
        raise StreamClosedError(stream.remote, "does not have the snapshot any more")
    if kind is Kind.BUSY:
        return None
    if length != len(out):
        raise CatchUpError(f"{stream.remote} sent a damaged chunk of its snapshot")
    await stream.receive_body(out)
    return out
