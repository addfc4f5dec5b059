"""hivemind's DHT with bounds: what it stores, what it tells, what it reads, and who is in its routing table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import hivemind.dht.node
import msgpack  # type: ignore[import-untyped]
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol as UnboundedProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from peer.errors import ProtocolError, in_words
from peer.swarm.net.dht_validator import key_id
from peer.swarm.net.nearest import Nearest, beside
from peer.swarm.net.record_store import MAX_ANSWER_BYTES, RecordStore
from peer.swarm.runtime.expiring import BoundedMap

log = logging.getLogger(__name__)
MAX_CALL_RECORDS = 32
MAX_CALL_KEYS = 8
MAX_BLACKLISTED = 4096
SEARCHERS = 8  # nodes that a search asks at the same time
MAX_KEYS = 64  # of which the nodes near to them are remembered
FIELDS = 3  # of a record in an answer
MAX_RECORDS_TAKEN = 512  # of one answer
MAX_CHECKED = 128  # of these, whose signatures were not checked before
CHECKED_AT_ONCE = 16  # before other work of the loop
MAX_REFUSED = 32  # of these: each costs the check of a signature


def _entries(packed: bytes) -> Iterator[tuple[str, Any, float]]:
    """The records of an answer as hivemind packs them: owner, value, expiry. Raises ProtocolError, before it reads more
    than there can be.
    """
    try:
        answer = msgpack.unpackb(packed, max_ext_len=MAX_ANSWER_BYTES)
        _, _, entries = msgpack.unpackb(answer.data, max_array_len=MAX_RECORDS_TAKEN)
    except Exception as error:  # msgpack raises a wide family on hostile bytes
        raise ProtocolError(f"no answer: {in_words(error)}") from None
    for entry in entries if isinstance(entries, list) else [None] * (MAX_REFUSED + 1):
        owner, value, expires_at = entry if isinstance(entry, list) and len(entry) == FIELDS else (None, None, None)
        if isinstance(owner, str) and isinstance(expires_at, float):
            yield owner, value, expires_at
        else:
            yield "", None, 0.0


def node_id_of(peer_id: str) -> DHTID:
    """The one place in the key space that a peer may take."""
    return DHTID.generate(source=peer_id.encode())


class DHTProtocol(UnboundedProtocol):  # type: ignore[misc]  # its name is part of the names of its calls
    """Answers calls of other nodes, and makes them, within limits.

    A node whose id is not that of its peer id gets no place in the routing table: one identity is one node. No answer
    and no call moves more than so many records, and records go into a `RecordStore`, those that were read as well.
    """

    storage: RecordStore
    plain: frozenset[PeerID] = frozenset()  # nodes of hivemind that this one was introduced by

    async def add_p2p_handlers(self, p2p: Any, *args: Any, **options: Any) -> None:
        self._bound(p2p)  # before the first call of another node
        await super().add_p2p_handlers(p2p, *args, **options)

    @classmethod
    async def create(cls, *args: Any, **options: Any) -> DHTProtocol:
        protocol: DHTProtocol = await super().create(*args, **options)
        protocol._bound(protocol.p2p)
        return protocol

    def _bound(self, p2p: Any) -> None:
        if not isinstance(self.storage, RecordStore):
            self.storage = RecordStore(str(p2p.peer_id))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Hold records that another node hands in, one by one; whole dictionaries of them are refused."""
        await self._met(request.peer, context.remote_id)
        sender = str(context.remote_id)
        offered = list(zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=True))
        self.storage.churned += sum(len(value) for _, _, value, _ in offered)
        kept = [self.storage.put(*record, sender) for record in offered[:MAX_CALL_RECORDS]]
        kept += [False] * (len(offered) - len(kept))
        return dht_pb2.StoreResponse(store_ok=kept, peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Tell another node what this one holds under a few keys, and which nodes are near to them."""
        await self._met(request.peer, context.remote_id)
        response = dht_pb2.FindResponse(results=[], peer=self.node_info)
        asking = node_id_of(str(context.remote_id))
        told = set[bytes]()
        for key in request.keys[:MAX_CALL_KEYS]:
            found = self.storage.answer(key) if key not in told else None
            told.add(key)
            result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            if found is not None:
                result = dht_pb2.FindResult(
                    type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(found),
                    expiration_time=found.latest_expiration_time,
                )  # fmt: skip
            near = self.routing_table.get_nearest_neighbors(DHTID.from_bytes(key), k=self.bucket_size, exclude=asking)
            result.nearest_node_ids.extend(node_id.to_bytes() for node_id, _ in near)
            result.nearest_peer_ids.extend(peer_id.to_bytes() for _, peer_id in near)
            response.results.append(result)
        return response

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """See hivemind's; a node id that is none is no answer."""
        try:
            node_id: DHTID | None = await super().call_ping(peer, validate, strict)
        except (AssertionError, ValueError) as error:
            log.debug("%s answers no ping: %r", peer, error)
            return None
        return node_id

    async def call_find(
        self, peer: PeerID, keys: Collection[DHTID]
    ) -> dict[DHTID, tuple[None, dict[DHTID, PeerID]]] | None:
        """Ask a node for keys; its records go into the store. -> The nodes that it names; None: no answer."""
        keys = list(keys)
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            for key, result in zip(keys, response.results, strict=True):
                await self._take(key, result, plain=peer in self.plain)
            named = {key: (None, self._named(result)) for key, result in zip(keys, response.results, strict=True)}
            await self._met(response.peer, peer)
        except Exception as error:  # root of a call: whatever a stranger's answer breaks, it is no answer
            log.debug("%s answers no find: %r", peer, error)
            await self.update_routing_table(None, peer, responded=False)
            return None
        return named

    async def _take(self, key: DHTID, result: Any, *, plain: bool) -> None:
        """Put the records of an answer into the store.

        Args:
            plain: of a node that checks none of what others hand in.

        Raises:
            ProtocolError: it holds more than it can, or, of a node that checks them, records that are none.
        """
        if result.type != dht_pb2.FOUND_DICTIONARY or len(result.value) > MAX_ANSWER_BYTES:
            return
        self.storage.churned += len(result.value)
        place, refused, checked = key.to_bytes(), 0, 0
        for number, (owner, value, expires_at) in enumerate(_entries(result.value), start=1):
            if number % CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if self.storage.full_for(place, owner):  # whatever it is
                continue
            subkey = MSGPackSerializer.dumps(owner)
            new = isinstance(value, bytes) and not self.storage.read_before(place, subkey, value)
            checked += new
            if checked > MAX_CHECKED:  # the others with the next answer
                return
            if not isinstance(value, bytes) or not self.storage.put(place, subkey, value, expires_at, ""):
                if isinstance(value, bytes) and self.storage.signed(place, subkey, value):
                    checked += new * (MAX_CHECKED // MAX_REFUSED - 1)  # such as of a peer that has not worked
                else:
                    refused += 1
            if refused > MAX_REFUSED and not plain:
                raise ProtocolError(f"more than {MAX_REFUSED} of its records are none")

    def _named(self, result: Any) -> dict[DHTID, PeerID]:
        """The nodes in an answer whose ids are those of their peer ids."""
        pairs = list(zip(result.nearest_node_ids, result.nearest_peer_ids, strict=True))[: self.bucket_size]
        named = [(DHTID.from_bytes(node_id), PeerID(peer_id)) for node_id, peer_id in pairs]
        return {node_id: peer_id for node_id, peer_id in named if node_id == node_id_of(str(peer_id))}

    async def _met(self, info: Any, peer: PeerID) -> None:
        if info.node_id:
            await self.update_routing_table(DHTID.from_bytes(info.node_id), peer)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        own_place = node_id_of(str(peer_id))
        if (node_id is None and responded) or node_id not in (None, own_place):
            return
        await super().update_routing_table(own_place, peer_id, responded)
        table = self.routing_table
        spare = table.buckets[table.get_bucket_index(own_place)].replacement_nodes
        while len(spare) > self.bucket_size:  # hivemind keeps any number
            del table[next(iter(spare))]


hivemind.dht.node.DHTProtocol = DHTProtocol  # `DHTNode` has no parameter for it


class BoundedDHT(DHTNode):  # type: ignore[misc]
    """A node of that DHT.

    It also writes to the peers that it was introduced by, and reads from them now and then, so that nodes which crowd
    around a key hide no peer from those that share an introducer.

    An introducer may be a plain node of hivemind, run by someone who has no part in the swarm. It has another place in
    the key space than its peer id, so it is in no routing table here; it is asked for each key instead.

    Attributes:
        introducers: peer ids of these.
    """

    introducers: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._nearest: BoundedMap[bytes, Nearest] = BoundedMap(MAX_KEYS)

    async def meet(self, peer: PeerID) -> bool:
        """Take a place in each other's routing tables; of a plain node: meet those that it knows. False: no answer."""
        node_id = await self.protocol.call_ping(peer)
        self.protocol.plain -= {peer}
        if node_id in (None, node_id_of(str(peer))):
            return node_id is not None
        self.protocol.plain |= {peer}
        named = await self.protocol.call_find(peer, [self.node_id]) or {}
        others = {other for _, found in named.values() for other in found.values()} - {self.peer_id}
        await asyncio.gather(*(self.protocol.call_ping(other) for other in others))
        return True

    async def get(self, key: str, **_: Any) -> ValueWithExpiration | None:
        """All records under a key, by subkey, as nodes near to it tell and this node has heard; None if there are none.

        A node that was asked and is silent is passed over until it is heard of again; if all are, a search follows.
        """
        place, began = DHTID.from_bytes(key_id(key)), asyncio.get_running_loop().time()
        near = self._nearest_to(place)
        widely = near.widely()
        for searching in (near.due(), True):
            if searching:
                await self._search(place, near)
            asked = {*near.to_ask(), *self._also_asked(widely=widely)}
            answers = await asyncio.gather(*(self._call_find_with_blacklist(peer, [place]) for peer in asked))
            for peer, answer in zip(asked, answers, strict=True):
                if not answer:
                    near.silent(peer)
            near.answered = near.answered or any(answers)
            if searching or any(answers):
                break
        near.slow = asyncio.get_running_loop().time() > began + self.protocol.wait_timeout / 3
        if len(self.blacklist.ban_counter) > MAX_BLACKLISTED:
            self.blacklist.clear()
        return self.held(place)

    def held(self, place: DHTID) -> ValueWithExpiration | None:
        """What this node has of a key, by subkey; None if there is nothing."""
        found = self.protocol.storage.records(place.to_bytes())
        values = {o: ValueWithExpiration(MSGPackSerializer.loads(value), at) for o, (value, at) in found.items()}
        return ValueWithExpiration(values, max(at for _, at in found.values())) if found else None

    async def store(self, key: str, value: bytes, expiration_time: float, subkey: Any = None, **_: Any) -> bool:
        """Hand a record to the nodes near to its key; True if one of them holds it, or there is none."""
        place, packed = DHTID.from_bytes(key_id(key)), MSGPackSerializer.dumps(value)
        near = self._nearest_to(place)
        held = self.protocol.storage.store(place, packed, expiration_time, subkey=subkey)
        for searching in (near.due(), True):
            if searching:
                await self._search(place, near)
            told = {*near.replicas, *self._also_asked()}
            handed = (self.protocol.call_store(peer, [place], [packed], expiration_time, [subkey]) for peer in told)
            answers = await asyncio.gather(*handed)
            for peer, answer in zip(told, answers, strict=True):
                if not answer:
                    near.silent(peer)
            if searching or any(answers):
                break
        return any(answer and answer[0] for answer in answers) or (held and not told)

    def _nearest_to(self, place: DHTID) -> Nearest:
        new = Nearest(place, self.num_replicas, self.protocol.bucket_size)
        near = self._nearest.setdefault(place.to_bytes(), new)
        near.learn(self.protocol.routing_table.get_nearest_neighbors(place, k=self.protocol.bucket_size))
        return near

    async def _search(self, place: DHTID, near: Nearest) -> None:
        """Look for the nodes nearest to a key, for as long as two answers may take; else those that are known remain.

        Only nodes that have answered count: any node may name others that do not exist, and with ids of its choice.
        """
        query, table = beside(place), self.protocol.routing_table
        with contextlib.suppress(TimeoutError):
            searching = self.find_nearest_nodes([query], exclude_self=True, num_workers=SEARCHERS)
            found = await asyncio.wait_for(searching, 2 * self.protocol.wait_timeout)
            near.found((node_id, peer) for node_id, peer in found[query].items() if node_id in table)
        near.learn(table.get_nearest_neighbors(place, k=self.protocol.bucket_size))

    def _also_asked(self, *, widely: bool = True) -> list[PeerID]:
        found = set(self.protocol.plain)
        for peer_id in self.introducers if widely else ():
            with contextlib.suppress(ValueError):
                found.add(PeerID.from_base58(peer_id))
        return list(found)
