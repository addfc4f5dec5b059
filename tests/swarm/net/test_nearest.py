"""Of the nodes near to a key, few are asked, each in its turn, and the next where one is silent."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hivemind.dht.node import Blacklist
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from peer.protocol.records import peers_key
from peer.swarm.net.dht import BoundedDHT, node_id_of
from peer.swarm.net.dht_validator import key_id
from peer.swarm.net.nearest import ASKED, ASKED_FIRST, SEARCH_EVERY, WIDELY_EVERY, Nearest, beside
from peer.swarm.net.record_store import RecordStore
from tests.swarm.net.published import ALICE, identity_of

KEY = DHTID.generate(source=b"key")
REPLICAS, MOST = 5, 20
NODES = [PeerID.from_base58(identity_of(seed).peer_id) for seed in range(1, 31)]
BY_DISTANCE = sorted(NODES, key=lambda peer: KEY.xor_distance(node_id_of(str(peer))))


def pairs(peers):
    return [(node_id_of(str(peer)), peer) for peer in peers]


@pytest.fixture
def near():
    made = Nearest(KEY, REPLICAS, MOST)
    assert made.due()
    made.found(pairs(NODES))
    return made


def test_the_nearest_are_kept_whatever_order_they_come_in(near):
    assert near.nodes == BY_DISTANCE[:MOST]
    assert near.replicas == BY_DISTANCE[:REPLICAS]
    late = Nearest(KEY, REPLICAS, MOST)
    for peer in reversed(BY_DISTANCE):
        late.learn(pairs([peer]))
    assert late.nodes == near.nodes


def asked_by(near):
    """Of the replicas, and of the others, how many a read asks."""
    asked = set(near.to_ask())
    return tuple(len(asked & set(nodes)) for nodes in (near.replicas, near.nodes[REPLICAS:]))


def test_several_are_asked_until_one_has_answered_and_then_few_in_turn(near):
    assert near.widely()
    assert not near.due()
    assert asked_by(near) == ASKED_FIRST
    near.answered = True
    assert asked_by(near) == ASKED
    reads = Counter(peer for _ in range(300) for peer in near.to_ask())
    assert set(reads) == set(near.nodes), "each is asked now and then"
    while not near.due():
        assert asked_by(near) == ASKED
    assert asked_by(near) == ASKED_FIRST


def test_one_that_is_silent_makes_room_for_the_next_until_it_is_heard_of_again(near):
    near.silent(BY_DISTANCE[0])
    assert near.replicas == BY_DISTANCE[1 : REPLICAS + 1]
    near.silent(BY_DISTANCE[0])  # asked twice at the same time
    near.learn(pairs(BY_DISTANCE[:1]))
    assert near.replicas == BY_DISTANCE[:REPLICAS]


def test_a_search_comes_first_when_no_node_is_known_and_now_and_then():
    near = Nearest(KEY, REPLICAS, MOST)
    assert near.due()
    assert near.due(), "it has found none"
    near.found(pairs(NODES))
    assert [near.due() for _ in range(2 * SEARCH_EVERY)] == 2 * [*[False] * (SEARCH_EVERY - 1), True]


def test_the_introducers_are_asked_at_each_fourth_read_and_whenever_reads_are_slow(near):
    assert [near.widely() for _ in range(WIDELY_EVERY)] == [True] * WIDELY_EVERY, "until one has answered"
    near.answered = True
    assert [near.widely() for _ in range(2 * WIDELY_EVERY)] == 2 * [True, *[False] * (WIDELY_EVERY - 1)]
    near.slow = True  # four of them would take longer than a record lives
    assert [near.widely() for _ in range(WIDELY_EVERY)] == [True] * WIDELY_EVERY


def test_a_search_asks_for_a_key_that_has_no_records_and_the_same_neighbours():
    other = beside(KEY)
    assert other != KEY
    assert beside(other) == KEY
    apart = [KEY.xor_distance(node_id) - other.xor_distance(node_id) for node_id, _ in pairs(NODES)]
    assert {abs(each) for each in apart} == {1}


NAME = peers_key("a" * 64)
PLACE = DHTID.from_bytes(key_id(NAME))
NEAREST = sorted(NODES, key=lambda peer: PLACE.xor_distance(node_id_of(str(peer))))


class Swarm:
    """The protocol of a node that is told what it has asked; `silent` nodes do not answer."""

    bucket_size, plain, wait_timeout = MOST, frozenset(), 30.0

    def __init__(self):
        self.routing_table, self.storage = RoutingTable(DHTID.generate(), MOST, 5), RecordStore(ALICE.peer_id)
        self.finds, self.stores, self.silent, self.stuck = [], [], set(), set()
        self.named = dict(pairs(NODES))

    async def call_find(self, peer, keys):
        self.finds.append((peer, keys[0]))
        if keys[0] in self.stuck:
            await asyncio.Event().wait()
        if peer in self.silent:
            return None
        self.routing_table.add_or_update_node(node_id_of(str(peer)), peer)
        return {keys[0]: (None, self.named)}

    async def call_store(self, peer, *_):
        self.stores.append(peer)
        return self.silent_answer if peer in self.silent else [True]

    silent_answer = None


@pytest.fixture
def dht():
    made = BoundedDHT(_initialized_with_create=True)
    made.protocol, made.node_id, made.peer_id = Swarm(), DHTID.generate(), PeerID(b"own")
    made.num_replicas, made.num_workers = REPLICAS, 2
    made.blacklist = Blacklist(base_time=5.0, backoff_rate=2.0)
    for node_id, peer in pairs(NEAREST[25:28]):
        made.protocol.routing_table.add_or_update_node(node_id, peer)
    return made


def asked_of(dht):
    """The nodes that were asked for the records since this was last asked."""
    asked = [peer for peer, key in dht.protocol.finds if key == PLACE]
    dht.protocol.finds.clear()
    return asked


async def test_a_read_asks_few_and_a_search_no_node_for_records(dht):
    assert await dht.get(NAME) is None
    assert len(asked_of(dht)) == sum(ASKED_FIRST)
    for _ in range(SEARCH_EVERY - 1):
        await dht.get(NAME)
        assert len(dht.protocol.finds) == sum(ASKED)
        assert set(asked_of(dht)) <= set(NEAREST[:MOST])
    await dht.get(NAME)  # with a search
    searched = [peer for peer, key in dht.protocol.finds if key == beside(PLACE)]
    assert set(searched) >= set(NEAREST[:MOST])


@pytest.mark.parametrize("answer", [None, []])
async def test_a_record_goes_to_the_five_nearest_and_past_those_that_take_none(dht, answer):
    dht.protocol.silent_answer = answer
    assert await dht.store(NAME, b"no record", 0.0, subkey="own")
    assert set(dht.protocol.stores) == set(NEAREST[:REPLICAS])
    dht.protocol.silent = set(NEAREST[:2])
    for node_id, _ in pairs(NEAREST[:2]):  # as hivemind does with those that are silent
        del dht.protocol.routing_table[node_id]
    dht.protocol.stores.clear()
    await dht.store(NAME, b"no record", 0.0, subkey="own")
    dht.protocol.stores.clear()
    assert await dht.store(NAME, b"no record", 0.0, subkey="own")
    assert set(dht.protocol.stores) == set(NEAREST[2 : REPLICAS + 2])


@pytest.mark.parametrize("use", ["get", "store"])
async def test_where_all_that_were_asked_are_gone_a_search_finds_others(dht, use):
    arguments = (NAME,) if use == "get" else (NAME, b"no record", 0.0)
    await getattr(dht, use)(*arguments)
    dht.protocol.silent = set(NEAREST[:MOST])
    for node_id, _ in pairs(NEAREST[:MOST]):
        del dht.protocol.routing_table[node_id]
    dht.protocol.finds.clear()
    dht.protocol.stores.clear()
    await getattr(dht, use)(*arguments)
    assert {key for _, key in dht.protocol.finds} >= {beside(PLACE)}


async def test_a_search_that_takes_long_is_given_up_and_not_repeated_at_once(dht):
    """Seven slow nodes near to a key made each read and each write a search, and no record was read at all."""
    for _ in range(SEARCH_EVERY):
        await dht.get(NAME)
    dht.protocol.stuck, dht.protocol.wait_timeout = {beside(PLACE)}, 0.05
    dht.protocol.finds.clear()
    async with asyncio.timeout(5.0):
        await dht.get(NAME)
    assert len(asked_of(dht)) == sum(ASKED_FIRST), "those that were known"
    await dht.get(NAME)
    assert {key for _, key in dht.protocol.finds} == {PLACE}


async def test_after_a_slow_read_the_next_one_asks_the_introducers(dht):
    introducer = PeerID.from_base58(identity_of(40).peer_id)
    dht.introducers = [str(introducer)]
    for wait_timeout in (30.0, 0.0, 30.0):  # whatever takes any time is slow
        dht.protocol.wait_timeout = wait_timeout
        await dht.get(NAME)
        if wait_timeout:
            assert introducer in asked_of(dht)
        else:
            assert introducer not in asked_of(dht)


async def test_nodes_that_others_name_and_that_do_not_answer_take_no_place(dht):
    fakes = [PeerID(bytes([number]) * 32) for number in range(200)]
    dht.protocol.silent = set(fakes)
    dht.protocol.named |= dict(pairs(fakes))
    await dht.get(NAME)
    assert not set(dht._nearest[PLACE.to_bytes()].nodes) & set(fakes)


async def test_of_a_key_without_records_no_search_follows(dht):
    await dht.get(NAME)
    dht.protocol.finds.clear()
    await dht.get(NAME)
    assert {key for _, key in dht.protocol.finds} == {PLACE}


async def test_each_write_and_each_fourth_read_goes_to_the_introducers_too(dht):
    introducer = PeerID.from_base58(identity_of(40).peer_id)
    dht.introducers, reads = [str(introducer)], []
    for _ in range(2 * WIDELY_EVERY):
        await dht.get(NAME)
        reads.append(introducer in asked_of(dht))
    assert reads == 2 * [True, *[False] * (WIDELY_EVERY - 1)]
    await dht.store(NAME, b"no record", 0.0, subkey="own")
    assert introducer in dht.protocol.stores
