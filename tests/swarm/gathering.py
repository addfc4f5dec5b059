"""Matchmakers over a `MemoryNetwork`, each with a directory and a position that the test sets."""

from __future__ import annotations

import asyncio
import hashlib
import itertools

import torch

from peer.outer.policy.straggler import WaitAll
from peer.outer.round import Due
from peer.protocol.identity import Identity
from peer.protocol.lineage import Position
from peer.protocol.manifest import RoundSpec
from peer.protocol.records import PeerRecord, dump_json, seal
from peer.protocol.weights import WeightRule
from peer.protocol.wire import JoinMessage, Kind
from peer.swarm.group.matchmaking import Matchmaker
from peer.swarm.group.roster import JOIN_DOMAIN, RosterAuthority
from tests.swarm.runs import RUN
from tests.swarm.virtual_time import now

NOMINAL = 1000
PARENT = "a" * 64
NEXT = "b" * 64
TURNS = 100
JOIN_NAME = f"atoll/{RUN[:16]}/join"
INVITE_NAME = f"atoll/{RUN[:16]}/invite"


def rank(peer_id):
    """The lowest leads."""
    return hashlib.sha256(f"{RUN} leads {peer_id}".encode()).digest()


def join_of(identity, **changes):
    """(the sealed join of a peer, the join)."""
    join = JoinMessage(**{"run_id": RUN, "round": 5, "parent": PARENT, "tokens": 10, **changes})
    return seal(identity, JOIN_DOMAIN, dump_json(join)), join


class PlainDirectory:
    """What the matchmaker reads of a directory."""

    def __init__(self):
        self.peers = {}
        self.later = {}
        self.fresh = True
        self.silent = set()

    def record(self, peer_id):
        return self.peers.get(peer_id)

    def made_within(self, seconds):  # noqa: ARG002
        return self.peers.keys() - self.silent

    async def refresh(self):
        self.peers.update(self.later)


class Itself:
    """A member, as seen by itself; the `LocalPeer` of its matchmaker."""

    def __init__(self, member, client):
        self._member, self.client, self.called, self.slot = member, client, False, self
        self.members = frozenset()

    def position(self):
        return self._member.position

    tokens_per_s = 0.0

    def due_in_s(self):
        return self._member.due_in_s

    def halfway(self):
        return self._member.halfway

    def request_now(self):
        self._member.hurried.set()

    def taking_part(self):
        return self._member.training

    def last_rosters(self, count):
        assert count == 0
        return []

    def followed(self, members):
        self._member.asked.append(members)
        return self._member.needed <= members

    def persistent_members(self):
        return self.members

    def newcomer(self, peer_id):
        return peer_id in self._member.newcomers

    def refuses(self, peer_id):
        return peer_id in self._member.refused

    def cost(self, *what):
        self._member.costs.append(what)

    def ahead(self):
        return next((donor for donor, _ in self._member.nudges), None)

    def nudge(self, *claim):
        self._member.nudges.append(claim)

    def expects(self, group):
        """Its streams are not under test."""

    def decline(self, group, abort):
        """Nobody is told."""


class Member:
    """One peer: a production matchmaker, everything around it played."""

    def __init__(self, node, rounds, client=False, straggler=WaitAll()):
        self.client, self.relayed = client, False
        self.node, self.directory = node, PlainDirectory()
        self.position = Position(5, PARENT, 100)
        self.halfway = True
        self.due_in_s, self.training, self.hurried, self.nudges = 0.0, True, asyncio.Event(), []
        self.costs, self.newcomers, self.refused = [], frozenset(), frozenset()
        self.needed, self.asked = frozenset(), []  # others follow rounds of these alone
        rosters = RosterAuthority(node.identity, RUN, rounds, WeightRule(nominal_tokens=NOMINAL))
        self.itself = Itself(self, client)
        self.matchmaker = Matchmaker(node, self.directory, rosters, self.itself, straggler)

    @property
    def peer_id(self):
        return self.node.peer_id

    def record(self, **changes):
        values = {
            "run_id": RUN, "nickname": "x", "state": "training", "round": self.position.round,
            "lineage_id": self.position.lineage_id, "lineage_weight": self.position.weight, "expires_at": 1e10,
            "client": self.client, "relayed": self.relayed,
        }  # fmt: skip
        return PeerRecord(**{**values, **changes})

    def match(self, tokens=100):
        return asyncio.wait_for(self.matchmaker.match(Due(1, tokens, torch.empty(0))), 20.0)

    def move(self, lineage_id):
        """One round further, without a group of this member's own."""
        self.position = Position(self.position.round + 1, lineage_id, self.position.weight + 100)
        self.matchmaker.moved()

    def commit(self, group, lineage_id):
        """One round further with this group."""
        self.position = Position(self.position.round + 1, lineage_id, self.position.weight + 100)
        self.matchmaker.committed(group)

    async def hand_in(self, leader, sealed):
        """Open a stream to a leader and hand in any bytes as a join."""
        stream = await self.node.open(leader.peer_id, JOIN_NAME, "round")
        await stream.send(Kind.JOIN, sealed)
        return stream


async def gather(network, count, *, wait=30.0, low=2, high=16, clients=(), straggler=WaitAll()):
    """`count` members who all know each other, in the order of their rank: the first leads.

    `clients` are the numbers of those that say that they accept no connection.
    """
    rounds = RoundSpec(min_group=low, max_group=high, straggler_wait_s=wait)
    identities = sorted((Identity.generate() for _ in range(count)), key=lambda identity: rank(identity.peer_id))
    members = [Member(network.node(one), rounds, number in clients, straggler) for number, one in enumerate(identities)]
    for member in members:
        await member.matchmaker.start()
        member.directory.peers = {other.peer_id: other.record() for other in members if other is not member}
    return members


async def until(condition, timeout_s=5.0):
    """Let everything in this loop go on until the condition holds."""
    deadline, turns = now() + timeout_s, itertools.count(1)
    while not condition():
        assert now() < deadline
        await asyncio.sleep(0 if next(turns) % TURNS else 0.001)  # in virtual time none passes between turns


async def together(*works):
    """What each comes to: a result, or an exception."""
    return await asyncio.gather(*works, return_exceptions=True)


def names(group):
    """The peer ids of its members."""
    return {member.peer_id for member in group.members}
