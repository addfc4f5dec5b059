"""The DHT records that this node holds: so many for each key, signer and sender, and so many bytes in all."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from peer.swarm.net.dht_validator import Claims, SealedRecordValidator
from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.runtime.malloc import give_back_free_memory
from peer.system.clock import Clock

MAX_RECORDS = {"peer": 1024, "report": 1024, "manifest": 64, "checkpoint": 64, "control": 64}  # of one key
MAX_RECORDS_OF_A_PEER = 32
MAX_FOREIGN_BYTES = 8 << 20  # of records of other runs than this node's
MAX_ANSWER_BYTES = 256 << 10
RECORD_OVERHEAD = 512  # bytes that Python needs for a record
FLOOD_BYTES = 4 << 20  # sixteen peers move half as much between two looks
_SERIALS = 4096


@dataclass(slots=True)
class StoredRecord:
    """One record as it travels; `sender` is empty if this node read it elsewhere."""

    value: bytes
    claims: Claims
    expires_at: float
    sender: str
    since: float

    @property
    def cost(self) -> int:
        return len(self.value) + RECORD_OVERHEAD


class RecordStore:
    """Takes the place of hivemind's storage, which holds whatever anyone hands in.

    Args:
        own_id: this peer, whose own records are never refused for a quota.
        clock: wall-clock seconds.

    Attributes:
        run_ids: the runs that this node serves; their records are never given up for those of others.
        known: the peers whose records go first, such as those of the committed rounds.
        churned: bytes that came in or were dropped since a caller last set this to zero.
    """

    def __init__(self, own_id: str, clock: Clock = time.time) -> None:
        self._own_id, self._clock = own_id, clock
        self._validator = SealedRecordValidator(clock)
        self._keys: dict[bytes, dict[str, StoredRecord]] = {}
        self._of_owner: Counter[str] = Counter()
        self._of_sender: Counter[str] = Counter()
        self._foreign_bytes = 0
        self._newest: BoundedMap[tuple[bytes, str], int] = BoundedMap(_SERIALS)
        self._swept_at = 0.0
        self._worked: dict[str, Callable[[str, int], bool]] = {}
        self.run_ids: set[str] = set()
        self.known: Callable[[str], bool] = lambda _: False
        self.churned = 0

    def serve(
        self, run_id: str, known: Callable[[str], bool], worked: Callable[[str, int], bool] = lambda *_: True
    ) -> None:
        """One more run is this node's, with its known peers, and what it asks of identities."""
        before = self.known
        self._worked[run_id] = worked
        self.run_ids.add(run_id)
        self.known = lambda peer_id: known(peer_id) or before(peer_id)

    def __len__(self) -> int:
        return sum(len(records) for records in self._keys.values())

    # hivemind's storage, as `DHTNode` uses it

    def store(self, key: DHTID, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        """Hold a record of this peer's own hand."""
        return self.put(key.to_bytes(), MSGPackSerializer.dumps(subkey), value, expiration_time, self._own_id)

    def get(self, _: DHTID) -> None:
        """Nothing: `BoundedDHT.get` reads `records` once the answers are in."""

    def items(self) -> Iterator[tuple[DHTID, Any]]:
        """Nothing: hivemind would hand all records to each new node, and their signers renew them all the time."""
        return iter(())

    # ours

    def put(self, key: bytes, subkey: bytes, value: bytes, expires_at: float, sender: str) -> bool:
        """Hold a record unless it is refused; False then, or if it is not newer than the one here.

        Args:
            key: 20 bytes.
            subkey, value: as hivemind packs them.
            expires_at: wall-clock seconds.
            sender: the peer that handed it in; empty if this node read it from the DHT.
        """
        self.sweep()
        read = self._validator.read(key, subkey, value, expires_at)
        if read is None or not expires_at > self._clock():
            return False
        owner, claims = read
        if not self._has_worked(owner, claims):
            return False
        if claims.kind in ("peer", "report") and sender not in ("", owner):
            return False  # only its signer hands it in: an identity costs at least a connection
        return self._hold(key, owner, StoredRecord(value, claims, expires_at, sender, self._clock()))

    def signed(self, key: bytes, subkey: bytes, value: bytes) -> bool:
        """Whether this is a record that its owner has signed, whatever becomes of it here. A node of another run cannot
        know what work this one asks for.
        """
        return self._validator.signed(key, subkey, value) is not None

    def _has_worked(self, owner: str, claims: Claims) -> bool:
        """Whether a peer of a run of this node's has done the work of an identity: else a thousand keys that cost
        nothing take the places of newcomers.
        """
        worked = self._worked.get(claims.run_id) if claims.kind == "peer" else None
        return worked is None or owner == self._own_id or worked(owner, claims.work)

    def read_before(self, key: bytes, subkey: bytes, value: bytes) -> bool:
        """See `SealedRecordValidator.read_before`."""
        return self._validator.read_before(key, subkey, value)

    def full_for(self, key: bytes, owner: str) -> bool:
        """Whether a record that this node reads elsewhere would be the first to go from under this key: none signed by
        such an owner needs to be looked at.
        """
        held = self._keys.get(key, {})
        if not held or owner in held or not self._last(owner):
            return False
        kind = next(iter(held.values())).claims.kind
        return len(held) >= MAX_RECORDS[kind]

    def records(self, key: bytes) -> dict[str, tuple[bytes, float]]:
        """Values, as hivemind packs them, and expiry of the records under a key; those that go first, first."""
        self.sweep(now=True)
        held = self._keys.get(key, {})
        return {owner: (held[owner].value, held[owner].expires_at) for owner in sorted(held, key=self._rank_in(held))}

    def answer(self, key: bytes) -> DictionaryDHTValue | None:
        """The records of a key that another node receives: the known peers, then a random choice of the others."""
        self.sweep()
        held = self._keys.get(key)
        if not held:
            return None
        told, room = DictionaryDHTValue(), MAX_ANSWER_BYTES
        for owner in sorted(random.sample(list(held), len(held)), key=self._last):
            entry = held[owner]
            room -= len(entry.value) + len(owner) + 32
            if room < 0:
                break
            told.store(owner, entry.value, entry.expires_at)
        return told

    def _last(self, owner: str) -> bool:
        return not (owner == self._own_id or self.known(owner))

    def _rank_in(self, held: dict[str, StoredRecord]) -> Callable[[str], tuple[bool, bool, float]]:
        """Of the records under one key, the known first, then those that were handed in, then the older ones."""
        return lambda owner: (self._last(owner), not held[owner].sender, held[owner].since)

    def _hold(self, key: bytes, owner: str, entry: StoredRecord) -> bool:
        held = self._keys.setdefault(key, {})
        before = held.get(owner)
        newest = self._newest.get((key, owner), 0)
        if before is not None and entry.claims.kind != "peer":  # a flood may have displaced the number
            newest = max(newest, before.claims.serial)
        if entry.claims.serial < newest or (before is not None and before.expires_at >= entry.expires_at
                                            and before.claims.serial >= entry.claims.serial):  # fmt: skip
            return False
        if before is not None:
            entry.since, entry.sender = before.since, entry.sender or before.sender
            self._drop(key, owner)
            held = self._keys.setdefault(key, {})
        elif not self._has_room(owner, entry):
            self._keys.pop(key) if not held else None
            return False
        self._add(key, owner, entry)
        if len(held) > MAX_RECORDS[entry.claims.kind]:
            worst = max(held, key=self._rank_in(held))
            self._drop(key, worst)
            if worst == owner:
                return False
        if entry.claims.kind != "peer":  # what a peer signs of itself expires by its own word
            self._newest[key, owner] = entry.claims.serial
        return True

    def _has_room(self, owner: str, entry: StoredRecord) -> bool:
        if owner == self._own_id or entry.sender == self._own_id:
            return True
        if self._of_owner[owner] >= MAX_RECORDS_OF_A_PEER:
            return False
        if entry.sender not in ("", owner) and self._of_sender[entry.sender] >= MAX_RECORDS_OF_A_PEER:
            return False
        return not self._foreign(entry) or self._foreign_bytes + entry.cost <= MAX_FOREIGN_BYTES

    def _foreign(self, entry: StoredRecord) -> bool:
        return entry.claims.run_id not in {"", *self.run_ids}

    def _add(self, key: bytes, owner: str, entry: StoredRecord) -> None:
        self._keys[key][owner] = entry
        self._count(owner, entry, 1)

    def _drop(self, key: bytes, owner: str) -> None:
        self._count(owner, self._keys[key].pop(owner), -1)
        if not self._keys[key]:
            del self._keys[key]

    def _count(self, owner: str, entry: StoredRecord, by: int) -> None:
        self.churned += entry.cost
        if self._foreign(entry):
            self._foreign_bytes += by * entry.cost
        for counter, name in ((self._of_owner, owner), (self._of_sender, entry.sender)):
            counter[name] += by
            if counter[name] <= 0:
                del counter[name]

    def sweep(self, now: bool = False) -> None:
        """Drop what has expired, once a second."""
        at = self._clock()
        if not now and 0 <= at - self._swept_at < 1.0:
            return
        self._swept_at = at
        ended = [(key, o) for key, held in self._keys.items() for o, entry in held.items() if entry.expires_at <= at]
        for key, owner in ended:
            self._drop(key, owner)


async def give_back_memory(store: RecordStore, period_s: float) -> None:
    """Drop what has expired, and after a flood of records give the memory back to the system, for ever."""
    while True:
        await asyncio.sleep(period_s)
        store.sweep(now=True)
        if store.churned > FLOOD_BYTES:
            store.churned = 0
            await asyncio.to_thread(give_back_free_memory)
