"""The live peers of a run: signed peer records in the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from peer.errors import ProtocolError
from peer.protocol.identity_work import NO_WORK, IdentityWork
from peer.protocol.manifest import RunManifest
from peer.protocol.records import (
    MAX_PEER_RECORD_BYTES,
    MAX_RECORD_BYTES,
    PEER_TTL_S,
    PeerRecord,
    dump_json,
    open_sealed,
    parse_json,
    peers_key,
    seal,
)
from peer.swarm.net.gate import Gate
from peer.swarm.net.node import Node
from peer.swarm.runtime.expiring import BoundedMap
from peer.system.clock import Clock

log = logging.getLogger(__name__)
MAX_RECORDS_READ = 1024  # of one key
MAX_PEERS = 512  # of one run
_SERIALS = 4096
_MILLION = 10**6


class Directory:
    """The peers of one run as the DHT shows them.

    Args:
        clock: wall-clock seconds, as record expiry is.

    Attributes:
        banned: whose records are not shown.
        work: what the run asks of identities; records without it are not shown.
        gate: of a run that is for invited peers: records without a valid pass are not shown.
        known: whose records are read first, and shown whatever strangers there are: the peers of committed rounds.
    """

    def __init__(self, node: Node, run_id: str, clock: Clock = time.time) -> None:
        self._node, self._run_id, self._clock = node, run_id, clock
        self._records: dict[str, PeerRecord] = {}
        self._announce_now = asyncio.Event()
        self.changed = asyncio.Event()
        self.banned: Callable[[str], bool] = lambda _: False
        self.known: Callable[[str], bool] = lambda _: False
        self.work = NO_WORK
        self.gate: Gate | None = None
        self._serials: BoundedMap[str, int] = BoundedMap(_SERIALS)
        self._opened: dict[str, tuple[bytes, PeerRecord | str]] = {}  # of the last read
        self._serial = int(clock() * _MILLION)
        if node.records is not None:
            node.records.serve(
                run_id, lambda peer_id: self.known(peer_id), lambda peer_id, nonce: self.work.shown(peer_id, nonce)
            )

    @classmethod
    def of(cls, node: Node, manifest: RunManifest, gate: Gate | None) -> Directory:
        """That of a run, with what it asks of those who are shown."""
        directory = cls(node, manifest.run_id)
        directory.work, directory.gate = IdentityWork(manifest.run_id, manifest.trust.work_bits), gate
        return directory

    @property
    def peers(self) -> dict[str, PeerRecord]:
        """Verified, unexpired records by peer id, without this peer and the banned."""
        return {peer_id: record for peer_id, record in self._records.items() if self._shown(peer_id, record)}

    def record(self, peer_id: str) -> PeerRecord | None:
        """One of `peers`, which takes a while to build where there are hundreds."""
        record = self._records.get(peer_id)
        return record if record is not None and self._shown(peer_id, record) else None

    def _shown(self, peer_id: str, record: PeerRecord) -> bool:
        if record.expires_at <= self._clock() or peer_id == self._node.peer_id or self.banned(peer_id):
            return False
        return self.gate is None or not self.gate.void(peer_id)

    @property
    def reachable(self) -> dict[str, PeerRecord]:
        """Those of them that this peer can open streams to: a client reaches no other client that no relay serves."""
        return {p: r for p, r in self.peers.items() if not (self._node.client and r.client and not r.relayed)}

    def announce(self, describe: Callable[[], PeerRecord]) -> None:
        """Publish `describe()` every two seconds from now on; `announce_soon` makes that one second."""
        self._node.spawn(self._announce_forever(describe), essential=True)

    def announce_soon(self) -> None:
        """Something has changed that others should hear of."""
        self._announce_now.set()

    def follow(self) -> None:
        """Read the directory every two seconds from now on."""
        self._node.spawn(self._refresh_forever(), essential=True)

    def expiry(self) -> float:
        """When a record made now expires."""
        return self._clock() + PEER_TTL_S

    @property
    def fresh(self) -> bool:
        """Whether a peer announced itself recently; false after a suspend, or when this machine lost the others."""
        return bool(self.made_within(self._node.timing.fresh_s))

    def made_within(self, seconds: float) -> set[str]:
        """The peers whose record was made in the last `seconds`, by their clocks: they are there now."""
        now = self._clock()
        return {p for p, r in self.peers.items() if abs(now - (r.expires_at - PEER_TTL_S)) < seconds}

    async def refresh(self) -> None:
        """Read all records of the run once; if the DHT does not answer, those that are here stay until they expire."""
        found = await read_records(self._node, peers_key(self._run_id))
        if found is None:
            return
        records: dict[str, PeerRecord] = {}
        before, self._opened = self._opened, {}
        # the known first, then those that were here before: a crowd of strangers takes no place of theirs
        for owner in sorted(found, key=lambda owner: (not self.known(owner), owner not in self._records)):
            if len(records) >= MAX_PEERS:
                break
            try:
                records[owner] = self._open(owner, self._read(owner, found[owner], before.get(owner)))
            except ProtocolError as error:
                log.warning("ignoring a directory record: %s", error)
        if records.keys() - self._records.keys():
            self.changed.set()
        self._records = records
        peers = self.peers
        clients = frozenset(peer_id for peer_id, record in peers.items() if record.client)
        self._node.hear_of(self._run_id, clients, {peer_id: record.addresses for peer_id, record in peers.items()})

    def _read(
        self, owner: str, blob: bytes, before: tuple[bytes, PeerRecord | str] | None
    ) -> PeerRecord:
        """What a record says; each is looked at once, since strangers may have a thousand of them told every time."""
        read = before[1] if before is not None and before[0] == blob else self._look(owner, blob)
        self._opened[owner] = blob, read
        if isinstance(read, str):
            raise ProtocolError(read)
        return read

    def _look(self, owner: str, blob: bytes) -> PeerRecord | str:
        """The record, or why it is none."""
        try:
            signer, payload = open_sealed("peer", blob, MAX_PEER_RECORD_BYTES)
            record = parse_json(PeerRecord, payload)
        except ProtocolError as error:
            return str(error)
        if signer != owner or record.run_id != self._run_id:
            return f"record of {signer} under {owner}, run {record.run_id[:12]}"
        if not self.work.shown(owner, record.work):
            return f"record of {owner}, whose identity has not done the run's work"
        return record

    def _open(self, owner: str, record: PeerRecord) -> PeerRecord:
        """The record of a peer, or the newer one that was here already."""
        newest = self._serials.get(owner, 0)
        if record.serial < newest:
            if owner in self._records:
                return self._records[owner]
            raise ProtocolError(f"record {record.serial} of {owner}, which had sent {newest}")
        if self.gate is not None:  # by the newest record's pass alone: a peer may have had another before
            self.gate.admit(owner, record.invitation)
        self._serials[owner] = record.serial
        return record

    def sealed(self, record: PeerRecord) -> bytes:
        """A record of this peer as it is published, with the next serial."""
        self._serial += 1
        serial = record.model_copy(update={"serial": self._serial})
        return seal(self._node.identity, "peer", dump_json(serial))

    async def _announce_forever(self, describe: Callable[[], PeerRecord]) -> None:
        key = peers_key(self._run_id)
        while True:
            self._announce_now.clear()
            record = describe()
            await write_record(self._node, key, self.sealed(record), record.expires_at)
            pause_s = self._node.timing.announce_pause_s
            await asyncio.sleep(pause_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._announce_now.wait(), self._node.timing.refresh_period_s - pause_s)

    async def _refresh_forever(self) -> None:
        while True:
            await self.refresh()
            if self._node.client:
                await self._node.look_for_relay()
                await self._node.dial(self.reachable)
            await asyncio.sleep(self._node.timing.refresh_period_s)


async def read_records(node: Node, key: str) -> dict[str, bytes] | None:
    """Sealed records under a DHT key by subkey, at most MAX_RECORDS_READ, without malformed ones; None if there are
    none, or no node answers.
    """
    try:
        found = await asyncio.wait_for(node.dht.get(key, latest=True), node.timing.dht_timeout_s)
    except TimeoutError:
        log.warning("the DHT did not answer within %g s", node.timing.dht_timeout_s)
        return None
    if found is None:  # so it answers, too, where no node of it can be reached
        return None
    records: dict[str, bytes] = {}
    for owner, item in found.value.items():
        if len(records) >= MAX_RECORDS_READ:
            break
        if isinstance(owner, str) and isinstance(item.value, bytes) and len(item.value) <= MAX_RECORD_BYTES:
            records[owner] = item.value
    return records


async def write_record(node: Node, key: str, blob: bytes, expires_at: float, owner: str | None = None) -> bool:
    """Store a sealed record; `owner` differs from this peer when it repeats another peer's record."""
    try:
        stored = await asyncio.wait_for(
            node.dht.store(key, blob, expires_at, subkey=owner or node.peer_id), node.timing.dht_timeout_s
        )
    except TimeoutError:
        return False
    return bool(stored)
