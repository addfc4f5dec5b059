"""The peers believed to be live, at this lineage id, and leading: the directory, corrected by own observations."""

from __future__ import annotations

import asyncio
import hashlib

from peer.swarm.group.local_peer import LocalPeer
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.runtime.expiring import ExpiringSet

MAX_ANNOUNCED = 64


class Membership:
    """Directory records lag by seconds; the last roster, answers and broken streams do not.

    Args:
        me: this peer, as seen by itself; a peer that it refuses is neither expected nor followed.

    Attributes:
        changed: set whenever what a leader waits for has changed, or there may be another leader.
    """

    def __init__(self, node: Node, run_id: str, directory: Directory, me: LocalPeer) -> None:
        timing, clock = node.timing, node.clock
        self._own_id, self._run_id, self._directory = node.peer_id, run_id, directory
        self._me = me
        self.changed = asyncio.Event()
        self.company: tuple[str, ...] = ()
        self._gone: ExpiringSet[str] = ExpiringSet(clock, timing.gone_for_s)
        self._silent: ExpiringSet[str] = ExpiringSet(clock, timing.gone_for_s)
        self._disbelieved: ExpiringSet[str] = ExpiringSet(clock)
        self._excluding: ExpiringSet[str] = ExpiringSet(clock, timing.gone_for_s)
        self._seen: ExpiringSet[str] = ExpiringSet(clock, timing.seen_period_s)
        self._doubted: ExpiringSet[str] = ExpiringSet(clock, timing.relay_doubt_s)
        self._announced: ExpiringSet[str] = ExpiringSet(clock, timing.announced_for_s)
        self._companions: tuple[str, frozenset[str]] = ("", frozenset())

    def expected(self) -> list[str]:
        """Live peers that train, according to the directory, and those that have just announced themselves."""
        passed_over = self._gone.keys() | self._disbelieved.keys()
        training = [peer_id for peer_id, record in self._directory.peers.items() if record.state == "training"]
        there = (peer_id for peer_id in dict.fromkeys([*training, *self._announced]) if peer_id not in passed_over)
        return [peer_id for peer_id in there if not self._me.refuses(peer_id)]

    def leader(self) -> str:
        """The lowest hash among this peer and those that are known to be at its lineage id: no client, and none that is
        in probation, unless there are no others.
        """
        lineage_id, known = self._me.position().lineage_id, self._known()
        peers = self._directory.peers
        level = [p for p in self.expected() if p in known or (p in peers and peers[p].lineage_id == lineage_id)]
        open_to_all = [p for p in level if not (p in peers and peers[p].client)]  # building `peers` takes a while
        if not self._me.client:
            open_to_all.append(self._own_id)
        return min(open_to_all or [self._own_id], key=self._rank)

    def solitary(self, peer_id: str) -> bool:
        """Whether this peer is a client that no other client reaches, not even through a relay."""
        record = self._directory.record(peer_id) if peer_id != self._own_id else None
        if record is None:
            return self.is_client(peer_id)
        return record.client and (not record.relayed or peer_id in self._doubted)

    def doubt_relay(self, peer_id: str) -> None:
        """A round failed through this peer: if it is a client, it may be that its relay does not serve it."""
        if self.is_client(peer_id):
            self._doubted.add(peer_id)

    def is_client(self, peer_id: str) -> bool:
        """Whether this peer accepts no connection, by its own account."""
        if peer_id == self._own_id:
            return self._me.client
        record = self._directory.record(peer_id)
        return record is not None and record.client

    def learn(self, *peer_ids: str) -> None:
        """These have shown that they are at this lineage id."""
        self._companions = (self._me.position().lineage_id, self._known().union(peer_ids))

    def hears_of(self, leader: str, lineage_id: str | None, known: bool = False) -> bool:
        """A peer at `lineage_id` says that this one leads there. -> whether it is known; if so, and at this lineage id,
        it is followed, even if the directory does not show it yet, or forgot it while this machine was suspended.

        Args:
            known: follow it as if it were known.
        """
        listed = leader == self._own_id or self._directory.record(leader) is not None
        met = known or leader in self.company
        if lineage_id == self._me.position().lineage_id and (listed or met):
            self.learn(leader)
            if not listed:
                self.expect(leader)
        return listed or met

    def announced(self, peer_id: str) -> None:
        """This peer wants to take part and is behind: it is live, and will soon have caught up."""
        self.seen(peer_id)
        self.expect(peer_id)

    def seen(self, peer_id: str) -> None:
        """This peer has answered, or asked: it is live, although it was silent or unreachable a moment ago. The failure
        suspicion is lifted, but not too often.
        """
        self._silent.pop(peer_id, None)
        if peer_id in self._gone and peer_id not in self._seen:
            self._seen.add(peer_id)
            del self._gone[peer_id]

    def expect(self, peer_id: str, seconds: float | None = None) -> None:
        """Expect this peer, whatever the directory says of it, unless it is avoided."""
        if len(self._announced) < MAX_ANNOUNCED or peer_id in self._announced or peer_id in self.company:
            self._announced.add(peer_id, seconds)

    def rate(self, peer_id: str) -> float:
        """Tokens a second that this peer claims to train; 0 where that is not known."""
        if peer_id == self._own_id:
            return self._me.slot.tokens_per_s
        record = self._directory.record(peer_id)
        return record.tokens_per_s if record is not None else 0.0

    def outranks(self, one: str, other: str) -> bool:
        """Whether `one` leads if both can."""
        return self._rank(one) < self._rank(other)

    def avoided(self) -> frozenset[str]:
        """The peers that train, according to the directory, and are avoided because they are silent."""
        return frozenset(self._gone) & {p for p, record in self._directory.peers.items() if record.state == "training"}

    def avoid(self, peer_id: str, *, silent: bool = True) -> None:
        """Neither follow nor expect this peer for seconds, unless it is seen: it is silent, or cannot be reached; or it
        has answered that it makes no rounds now.
        """
        self._gone.add(peer_id)
        if silent:
            self._silent.add(peer_id)

    def excluded_by(self, peer_id: str) -> None:
        """This leader has answered that it gives this peer no seat now."""
        self._excluding.add(peer_id)

    @property
    def excluding(self) -> int:
        """How many leaders have answered so lately."""
        return len(self._excluding)

    def there(self) -> list[str]:
        """The peers that the directory shows, without the one that is silent. If several are, it may be this machine
        that is cut off, and none is left out.
        """
        peers = list(self._directory.peers)
        silent = self._silent.keys() & set(peers)
        return [peer_id for peer_id in peers if peer_id not in silent] if len(silent) == 1 else peers

    def disbelieve(self, peer_id: str, seconds: float) -> None:
        """Neither follow nor expect this peer, whatever it does: it made an unprovable claim, or wasted time."""
        self._disbelieved.add(peer_id, max(seconds, self._disbelieved.left_s(peer_id)))

    def believe(self, peer_id: str) -> None:
        """Lift `disbelieve`: it was in a round meanwhile."""
        self._disbelieved.pop(peer_id, None)

    def disbelieves(self, peer_id: str) -> bool:
        """Whether this peer is neither followed nor expected now, whatever it does."""
        return peer_id in self._disbelieved

    def passes_over(self, peer_id: str) -> bool:
        """Whether this peer neither follows nor expects that one now: it avoids or disbelieves it."""
        return peer_id in self._gone or self.disbelieves(peer_id)

    def others_than(self, leader: str) -> int:
        """How many peers could form a group with this one, without that leader; unrelayed clients count as one."""
        others = [peer_id for peer_id in self.expected() if peer_id != leader]
        solitary = sum(map(self.solitary, others))
        return len(others) - solitary + min(solitary, 0 if self.solitary(self._own_id) else 1)

    def _known(self) -> frozenset[str]:
        lineage_id, companions = self._companions
        return companions if lineage_id == self._me.position().lineage_id else frozenset()

    def _rank(self, peer_id: str) -> tuple[bool, bytes]:
        """Identities are free: those that have made few rounds lead no others."""
        return self._me.newcomer(peer_id), hashlib.sha256(f"{self._run_id} leads {peer_id}".encode()).digest()
