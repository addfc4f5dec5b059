"""One libp2p host with its hivemind DHT node, inside this process's asyncio loop.

hivemind's own `DHT` class forks a second process for the same node. We keep the node in the agent's loop: one process
and one pipe less to fail, no futures across processes, 40 MB less, and heavy arithmetic runs in threads anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer.errors import ProtocolError, in_words
from peer.protocol.address import Reach, reach_of
from peer.protocol.identity import Identity
from peer.protocol.records import HOST_PATTERN, MAX_HOST_ADDRESSES
from peer.swarm.net.daemon import NodeConfig, stop_daemon
from peer.swarm.net.direct import DirectTransport
from peer.swarm.net.gate import Gate
from peer.swarm.net.line import Line
from peer.swarm.net.pipe import ZeroCopyProtocol
from peer.swarm.net.record_store import RecordStore
from peer.swarm.net.strangers import StrangerStreams
from peer.swarm.net.stream import FrameStream, StreamClosedError, StreamTimeoutError, Traffic
from peer.swarm.runtime.admission import Admission
from peer.swarm.runtime.tasks import cancel_and_wait, log_failure
from peer.swarm.runtime.timing import Timing
from peer.system.clock import Clock, boot_clock

T = TypeVar("T")
log = logging.getLogger(__name__)
Handler = Callable[[FrameStream], Awaitable[None]]
DIALS_AT_ONCE = 16
MAX_STREAMS_PER_PEER = 32
MAX_STREAMS = 512
MAX_OF_STRANGERS = 256
MAX_STREAMS_PER_STRANGER = 16
MAX_ADDRESSES = 16
BULK_BYTES = 1 << 20  # for less, opening a connection of its own takes longer than it saves
CIRCUIT = "/p2p-circuit"
NO_ROUTE = "routing: not found"  # libp2p's words


@dataclass
class Node:
    """A running host. Create with `start_node`.

    Attributes:
        client: this machine accepts no connection; it dials the others.
        traffic: byte counters by purpose ("round", "history", "audit").
        refuses: whose streams are closed unread.
        strange: which peers have no part in the run so far: they hold some of the places for streams.
        gates: of runs that are for invited peers.
        relayed: a client that others can reach through a relay, as of the last `look_for_relay`.
        clients: those of the others that accept none, as far as the directory has heard.
        announced: where others say that they listen, by peer id.
        direct: direct connections for large transfers; None: there are none.
        records: what this node holds of the DHT; None: it has no DHT.
        line: the limits that a person has set for this machine; None: there are none.
        clock: by which this peer measures time: seconds, those among them in which the machine was suspended.
    """

    config: NodeConfig
    identity: Identity
    p2p: Any
    dht: Any
    maddrs: tuple[str, ...]
    client: bool = False
    relayed: bool = False
    clients: frozenset[str] = frozenset()
    announced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    refuses: Callable[[str], bool] = lambda _: False
    strange: Callable[[str], bool] = lambda _: False
    gates: tuple[Gate, ...] = ()
    direct: DirectTransport | None = None
    records: RecordStore | None = None
    line: Line | None = None
    clock: Clock = boot_clock
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _trouble: str = ""
    _broken: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: dict[str, tuple[frozenset[str], Mapping[str, tuple[str, ...]]]] = field(default_factory=dict)
    _streams: Admission = field(default_factory=lambda: Admission(MAX_STREAMS, MAX_STREAMS_PER_PEER))
    _of_strangers: StrangerStreams = field(
        default_factory=lambda: StrangerStreams(MAX_OF_STRANGERS, MAX_STREAMS_PER_STRANGER)
    )
    _handlers: dict[str, tuple[str, Handler]] = field(default_factory=dict)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def resting(self) -> bool:
        """Whether it opens and serves no streams, at these hours."""
        return self.line is not None and self.line.resting

    @property
    def timing(self) -> Timing:
        """Its durations."""
        return self.config.timing

    @property
    def introducers(self) -> tuple[str, ...]:
        """Ids of the peers whose addresses a person gave."""
        return tuple(dict.fromkeys(address.rsplit("/", 1)[-1] for address in self.config.initial_peers))

    @property
    def host_addresses(self) -> tuple[str, ...]:
        """Where it listens, as its record says: loopback only where there is no other; a client accepts none."""
        if self.client:
            return ()
        own = [address.split("/p2p/")[0] for address in self.maddrs]
        told = [address for address in own if re.fullmatch(HOST_PATTERN, address)]
        apart = [address for address in told if reach_of(address) is not Reach.LOOPBACK]
        return tuple((apart or told)[:MAX_HOST_ADDRESSES])

    def spawn(self, work: Coroutine[Any, Any, T], essential: bool = False) -> asyncio.Task[T]:
        """Run `work` until it ends or the node closes; what escapes it is logged with its traceback.

        Args:
            essential: the node is of no use without it: `closed` returns once it has failed.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            error = log_failure(task)
            if error is not None and essential:
                self._trouble = self._trouble or f"a task that it cannot do without failed: {in_words(error)}"
                self._broken.set()

        task.add_done_callback(ended)
        return task

    async def serve(self, name: str, purpose: str, handler: Handler) -> None:
        """Answer streams that other peers open under `name`; once the handler has returned, the stream
        closes as soon as the other end has read what was said last and closed.
        """
        self.traffic.setdefault(purpose, Traffic())
        self._handlers[name] = purpose, handler

        async def answer(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.accept(str(info.peer_id), name, ZeroCopyProtocol.adopt(reader, writer))

        await self.p2p.add_binary_stream_handler(name, answer)

    async def accept(self, remote: str, name: str, pipe: ZeroCopyProtocol) -> None:
        """Serve one stream that another peer has opened, through libp2p or directly."""
        if name not in self._handlers or self.resting or self.refuses(remote):
            pipe.close()
            return
        purpose, handler = self._handlers[name]
        stream = FrameStream(remote, pipe, self.traffic[purpose], self.line)
        try:
            with self._of_strangers.of(stream) if self.strange(remote) else self._streams.of(remote) as admitted:
                if not admitted:
                    raise ProtocolError(f"too many open streams: {self._streams.usage(remote)}")
                if (gate := self._gate(name)) is not None:
                    await gate.check(stream, self.timing.first_frame_s)
                await handler(stream)
                if stream.spoke:
                    await stream.finish(self.timing.finish_timeout_s)
        except StreamTimeoutError as error:
            log.info("%s: %s", name, error)
        except StreamClosedError as error:
            log.debug("%s: %s", name, error)
        except TimeoutError:
            log.info("%s: %s was too slow", name, remote)
        except ProtocolError as error:
            log.warning("%s: dropped a stream: %s", name, error)
        except asyncio.CancelledError:
            raise
        except Exception:  # root of a task: one bad stream must not take the listener down
            log.exception("%s: handler failed for %s", name, remote)
        finally:
            stream.close()

    async def open(
        self, peer_id: str, name: str, purpose: str, timeout_s: float | None = None, bulk: bool = False
    ) -> FrameStream:
        """Open a stream to a peer; raises StreamClosedError when it cannot be reached in time (None: `open_timeout_s`).

        Args:
            bulk: more than BULK_BYTES will be sent: take a direct connection where there is one.
        """
        if self.resting:
            raise StreamClosedError(peer_id, "this peer rests at these hours")
        try:
            calling = asyncio.ensure_future(self._call(peer_id, name, bulk))
            calling.add_done_callback(lambda call: call.cancelled() or call.exception())  # it may fail while cancelled
            pipe = await asyncio.wait_for(calling, timeout_s or self.timing.open_timeout_s)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise StreamClosedError(peer_id, f"cannot be reached: {in_words(error)}") from None
        stream = FrameStream(peer_id, pipe, self.traffic.setdefault(purpose, Traffic()), self.line)
        if (gate := self._gate(name)) is not None:
            await gate.show(stream)
        return stream

    def _gate(self, name: str) -> Gate | None:
        return next((gate for gate in self.gates if gate.guards(name)), None)

    def hear_of(self, run_id: str, clients: frozenset[str], announced: Mapping[str, tuple[str, ...]]) -> None:
        """What the directory of one run shows: which of its peers accept no connection, and where the others listen."""
        self._heard[run_id] = clients, announced
        self.clients = frozenset().union(*(clients for clients, _ in self._heard.values()))
        self.announced = {peer_id: places for _, told in self._heard.values() for peer_id, places in told.items()}

    async def _call(self, peer_id: str, name: str, bulk: bool) -> ZeroCopyProtocol:
        while not self.client and peer_id in self.clients and peer_id not in await self.connected():
            await asyncio.sleep(self.timing.client_recheck_s)  # a client dials all; a relay would reach it as well
        if bulk and self.direct is not None:
            pipe = await self.direct.open(peer_id, name)
            if pipe is not None:
                return pipe
        remote = PeerID.from_base58(peer_id)
        try:
            _, reader, writer = await self.p2p.call_binary_stream_handler(remote, name)
        except P2PDaemonError as error:
            if NO_ROUTE not in str(error) or not self.announced.get(peer_id):
                raise
            await self._connect(peer_id)
            _, reader, writer = await self.p2p.call_binary_stream_handler(remote, name)
        return ZeroCopyProtocol.adopt(reader, writer)

    async def _connect(self, peer_id: str) -> None:
        """Connect at the addresses that the peer announces, or at those that libp2p's routing finds.

        libp2p hands on no address outside of the public and the private ranges, and so finds no route to such a peer.
        """
        addresses = [Multiaddr(address) for address in self.announced.get(peer_id, ())]
        await self.p2p._client.connect(PeerID.from_base58(peer_id), addresses)

    async def connected(self) -> set[str]:
        """Ids of the peers that this host is connected to."""
        return {str(info.peer_id) for info in await self.p2p.list_peers()}

    async def dial(self, peer_ids: Iterable[str]) -> None:
        """Make sure of a connection to each of these; a client does, so that they can open streams to it."""
        try:
            missing = set(peer_ids) - await asyncio.wait_for(self.connected(), self.timing.open_timeout_s)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError):
            return
        await asyncio.gather(*(self._dial(peer_id) for peer_id in list(missing)[:DIALS_AT_ONCE]))

    async def _dial(self, peer_id: str) -> None:
        try:
            async with asyncio.timeout(self.timing.open_timeout_s):
                await self._connect(peer_id)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            log.info("cannot dial %s: %s", peer_id, in_words(error))

    async def look_for_relay(self) -> None:
        """Find out whether libp2p has found a relay for this client, which takes it some minutes."""
        try:
            maddrs = await asyncio.wait_for(self.p2p.get_visible_maddrs(latest=True), self.timing.open_timeout_s)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError):
            return
        relayed = any(CIRCUIT in str(address) for address in maddrs)
        if relayed != self.relayed:
            log.info("other clients reach this one through a relay" if relayed else "no relay serves this client now")
        self.relayed = relayed

    async def addresses(self) -> tuple[str, ...]:
        """Full addresses of the peers that this host is connected to, at most MAX_ADDRESSES."""
        try:
            connected = await asyncio.wait_for(self.p2p.list_peers(), self.timing.open_timeout_s)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError):
            return ()
        found = [f"{info.addrs[0]}/p2p/{info.peer_id}" for info in connected if info.addrs]
        return tuple([address for address in found if CIRCUIT not in address][:MAX_ADDRESSES])

    async def connect(self, address: str) -> bool:
        """Make sure of a connection to a known address and of a place in each other's routing tables."""
        peer_id = PeerID.from_base58(Multiaddr(address)["p2p"])
        try:
            base = Multiaddr(address.rsplit("/p2p/", 1)[0])
            await asyncio.wait_for(self.p2p._client.connect(peer_id, [base]), self.timing.open_timeout_s)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError):
            return False
        return bool(await self.dht.meet(peer_id))

    async def keep_connected(self) -> None:
        """Come back to the bootstrap nodes whenever they come back; they may restart at any time."""
        known = tuple(a for a in self.config.initial_peers if not a.endswith(self.peer_id))
        lost: set[str] = set()
        while True:
            for address in known:
                reached = await self.connect(address)
                if reached and address in lost:
                    lost.discard(address)
                    log.info("reached %s again", address)
                elif not reached and address not in lost:
                    lost.add(address)
                    log.warning("lost %s; continuing without it and retrying", address)
            await asyncio.sleep(self.timing.reconnect_period_s)

    async def closed(self) -> str:
        """Return once this host can no longer work, with the reason."""
        ending, breaking = (asyncio.ensure_future(work) for work in (self.p2p._child.wait(), self._broken.wait()))
        try:
            await asyncio.wait({ending, breaking}, return_when=asyncio.FIRST_COMPLETED)
            return self._trouble or f"its libp2p daemon ended with code {ending.result()}"
        finally:
            await cancel_and_wait([ending, breaking])

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if self.direct is not None:
            await self.direct.close()
        if self.p2p._child.returncode is None:
            with contextlib.suppress(asyncio.TimeoutError):  # it asks the daemon, which may be what does not answer
                await asyncio.wait_for(self.dht.shutdown(), self.timing.daemon_end_s)
        await stop_daemon(self.p2p, self.timing)
