"""The live peers of a run: signed peer records and manifests in the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from peer.errors import ProtocolError, UserError
from peer.protocol.manifest import RunManifest
from peer.protocol.records import (
    MANIFEST_KEY,
    MANIFEST_TTL_S,
    PEER_TTL_S,
    PeerRecord,
    dump_json,
    open_manifest,
    open_sealed,
    parse_json,
    peers_key,
    seal,
)
from peer.swarm.net.node import Node

log = logging.getLogger(__name__)
MAX_PEERS_READ = 4096


class Directory:
    """The peers of one run as the DHT shows them.

    Args:
        node: the DHT node.
        run_id: whose peers.
        clock: wall-clock seconds, as record expiry is.

    Attributes:
        banned: whose records are not shown.
    """

    def __init__(self, node: Node, run_id: str, clock: Callable[[], float] = time.time) -> None:
        self._node, self._run_id, self._clock = node, run_id, clock
        self._records: dict[str, PeerRecord] = {}
        self._announce_now = asyncio.Event()
        self.changed = asyncio.Event()
        self.banned: Callable[[str], bool] = lambda _: False

    @property
    def peers(self) -> dict[str, PeerRecord]:
        """Verified, unexpired records by peer id, without this peer and the banned."""
        now, own_id = self._clock(), self._node.peer_id
        return {p: r for p, r in self._records.items() if r.expires_at > now and p != own_id and not self.banned(p)}

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
        now = self._clock()
        made = (record.expires_at - PEER_TTL_S for record in self.peers.values())
        fresh_s = self._node.timing.fresh_s
        return any(now - fresh_s < at < now + fresh_s for at in made)

    async def refresh(self) -> None:
        """Read all records of the run once; if the DHT does not answer, those that are here stay until they expire."""
        records: dict[str, PeerRecord] = {}
        found = await read_records(self._node, peers_key(self._run_id))
        if found is None:
            return
        for owner, blob in found.items():
            try:
                signer, payload = open_sealed("peer", blob)
                record = parse_json(PeerRecord, payload)
                if signer != owner or record.run_id != self._run_id:
                    raise ProtocolError(f"record of {signer} under {owner}, run {record.run_id[:12]}")
            except ProtocolError as error:
                log.warning("ignoring a directory record: %s", error)
                continue
            records[owner] = record
        if records.keys() - self._records.keys():
            self.changed.set()
        self._records = records
        self._node.clients = frozenset(peer_id for peer_id, record in self.peers.items() if record.client)

    async def _announce_forever(self, describe: Callable[[], PeerRecord]) -> None:
        key = peers_key(self._run_id)
        while True:
            self._announce_now.clear()
            record = describe()
            blob = seal(self._node.identity, "peer", dump_json(record))
            await write_record(self._node, key, blob, record.expires_at)
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
    """Sealed records under a DHT key by subkey, without malformed ones; None if there are none, or no node answers."""
    try:
        found = await asyncio.wait_for(node.dht.get(key, latest=True), node.timing.dht_timeout_s)
    except TimeoutError:
        log.warning("the DHT did not answer within %g s", node.timing.dht_timeout_s)
        return None
    if found is None:  # so it answers, too, where no node of it can be reached
        return None
    if not isinstance(found.value, dict):
        return {}
    items = list(found.value.items())[:MAX_PEERS_READ]
    return {owner: item.value for owner, item in items if isinstance(owner, str) and isinstance(item.value, bytes)}


async def write_record(node: Node, key: str, blob: bytes, expires_at: float, owner: str | None = None) -> bool:
    """Store a sealed record; `owner` differs from this peer when it repeats another peer's record."""
    try:
        stored = await asyncio.wait_for(
            node.dht.store(key, blob, expires_at, subkey=owner or node.peer_id), node.timing.dht_timeout_s
        )
    except TimeoutError:
        return False
    return bool(stored)


async def publish_manifest_forever(node: Node, sealed: bytes, organiser: str, rng: random.Random) -> None:
    """Keep a signed manifest in the DHT. Every peer does, so that the run can be joined while its bootstrap is away."""
    while True:
        await write_record(node, MANIFEST_KEY, sealed, time.time() + MANIFEST_TTL_S, owner=organiser)
        await asyncio.sleep(node.timing.manifest_period_s * rng.uniform(0.5, 1.0))


async def find_manifest(
    node: Node, organisers: set[str], run_id: str | None
) -> tuple[str, RunManifest, bytes]:
    """-> (organiser, manifest, its sealed bytes).

    Args:
        organisers: peer ids in the addresses that the person gave: a manifest signed by one of them is preferred.
        run_id: accept only the manifest with this hash.

    Raises:
        UserError: none found in time, hash mismatch, an incompatible version, or several runs to choose from.
    """
    timeout_s = node.timing.manifest_timeout_s
    deadline = node.clock() + timeout_s
    while True:
        found: dict[str, tuple[RunManifest, bytes]] = {}
        incompatible: UserError | None = None
        for owner, blob in (await read_records(node, MANIFEST_KEY) or {}).items():
            try:
                signer, manifest = open_manifest(blob)
            except ProtocolError as error:
                log.warning("ignoring a manifest: %s", error)
                continue
            except UserError as error:
                if owner in organisers:
                    raise  # the run that was asked for: waiting cannot mend it
                incompatible = error
                continue
            if signer == owner:
                found[owner] = (manifest, blob)
        if found:
            return _choose(found, organisers, run_id)
        if node.clock() >= deadline:
            raise incompatible or UserError(
                f"the swarm answered, but holds no manifest (waited {timeout_s:g} s)",
                "is the address that of an Atoll bootstrap or of a peer that is training?",
            )
        await asyncio.sleep(node.timing.recheck_s)


def _choose(
    found: dict[str, tuple[RunManifest, bytes]], organisers: set[str], run_id: str | None
) -> tuple[str, RunManifest, bytes]:
    if run_id is not None:
        matching = {o: f for o, f in found.items() if f[0].run_id == run_id}
        if not matching:
            seen = ", ".join(sorted(manifest.run_id for manifest, _ in found.values()))
            raise UserError(
                f"manifest hash mismatch: the swarm runs {seen}, not {run_id}",
                "check --run-id, or leave it out to trust the address alone",
            )
        found = matching
    preferred = {o: f for o, f in found.items() if o in organisers} or found
    if len(preferred) > 1:
        choices = "\n".join(f"--run-id {m.run_id}  ({m.name}, by {o})" for o, (m, _) in preferred.items())
        raise UserError(f"the swarm holds {len(preferred)} runs; say which one", choices)
    organiser, (manifest, blob) = next(iter(preferred.items()))
    return organiser, manifest, blob
