"""A chain that grows on disk, not in memory, and that reads as a list of certificates does."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter

import pytest

from peer.protocol.chain import Chain, ChainTally, extended, shared_links, tally_of
from peer.protocol.fork_choice import ForkRule
from peer.protocol.lineage import Certificate, Link, Member
from peer.protocol.records import parse_json
from peer.swarm.state import certificate_file
from peer.swarm.state.certificate_file import NEWEST
from peer.swarm.state.chain import ChainStore
from tests.chain_files import read_chain

RUN, GENESIS = "1" * 64, "0" * 64
BYTES_A_ROUND = 150  # an id, a place, and what an array keeps in reserve; a certificate takes thousands
MEMBERS = [f"12D3KooW{name * 20}" for name in "ABCDEFGH"]


def links(count, chain=(), shift=0, digest="2"):
    """`count` links that follow a chain: three members each, others from round to round."""
    made, parent = [], chain[-1].link.id if chain else GENESIS
    for round in range(len(chain), len(chain) + count):
        who = dict.fromkeys(MEMBERS[(round // 5 + place + shift) % len(MEMBERS)] for place in range(3))
        roster = tuple(Member(peer_id=peer_id, tokens=10 + round % 7) for peer_id in who)
        link = Link(
            run_id=RUN, round=round, parent=parent, roster=roster, update_digest=digest * 64, state_digest="3" * 64
        )
        made.append(Certificate(link=link, signatures=dict.fromkeys(who, "4" * 128)))
        parent = link.id
    return made


@pytest.fixture
def store(tmp_path):
    return ChainStore(tmp_path / "history", GENESIS)


def grow(store, count):
    """Rounds that nothing outside of the store holds."""
    for _ in range(count):
        store.append(links(1, store.chain)[0])


def certificates_in_memory():
    gc.collect()
    return sum(type(one) is Certificate for one in gc.get_objects())


def test_a_round_reads_no_certificate_from_the_disk(store, monkeypatch):
    grow(store, 2 * NEWEST)
    read = []
    monkeypatch.setattr(certificate_file, "parse_json", lambda kind, line: read.append(line) or parse_json(kind, line))
    store.append(links(1, store.chain, digest="5")[0])
    store.keep_update(b"payload")
    assert not read
    assert store.chain[0].link.round == 0
    assert len(read) == 1


def test_a_long_chain_is_on_disk_and_not_in_memory(store):
    grow(store, 2 * NEWEST)
    held = certificates_in_memory()
    tracemalloc.start()
    try:
        grow(store, NEWEST)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        grow(store, NEWEST)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert certificates_in_memory() == held
    assert grown < BYTES_A_ROUND * NEWEST
    assert len(store.chain) == 4 * NEWEST == store.chain[-1].link.round + 1


def test_it_reads_as_a_list_does(store):
    whole = links(NEWEST + 50)
    for certificate in whole:
        store.append(certificate)
    chain = store.chain
    assert chain == whole == read_chain(store.chain_path)
    for part in (slice(None, 3), slice(40, 60), slice(-2, None), slice(60, 40), slice(len(whole), None)):
        assert chain[part] == whole[part]
        assert chain[10:][part] == whole[10:][part]
    assert [chain[0], chain[-1], chain[30]] == [whole[0], whole[-1], whole[30]]
    with pytest.raises(IndexError):
        chain[len(whole)]
    assert list(reversed(chain[:5])) == whole[4::-1]
    assert [store.lineage_id(round) for round in range(3)] == [GENESIS, whole[0].link.id, whole[1].link.id]
    assert [store.leads_through_id(whole[place].link.id) for place in (-1, -64, -65)] == [True, True, False]
    assert store.certified(len(whole) - 1) == "3" * 64
    more = links(4, whole, shift=1)
    longer = extended(chain, more)
    assert longer == whole + more
    assert longer[len(whole) - 2 : len(whole) + 2] == (whole + more)[len(whole) - 2 : len(whole) + 2]
    assert shared_links(longer, chain) == shared_links(whole + more, whole) == len(whole)
    assert shared_links(chain, links(60)) == 60
    assert shared_links(extended(chain[:60], links(3, whole[:60], shift=2)), chain) == 60


def test_a_tally_is_that_of_the_links_however_long_the_chain_is(store):
    whole = links(NEWEST + 50)
    for certificate in whole:
        store.append(certificate)
    rule = ForkRule(probation_rounds=5)
    for length in (0, 1, 7, 100, NEWEST, len(whole)):
        tally, plain = tally_of(store.chain[:length]), ChainTally().add(whole[:length])
        assert vars(tally) == vars(plain)
        assert rule.established(store.chain[:length]) == rule.established(whole[:length])
    more = links(4, whole[:80], shift=3)
    assert rule.established(extended(store.chain[:80], more)) == rule.established(whole[:80] + more)
    assert vars(tally_of(store.chain[20:30])) == vars(ChainTally().add(whole[20:30]))
    assert store.seen == Counter(member.peer_id for one in whole for member in one.link.roster)
    assert store.weight == sum(one.link.weight for one in whole)


def test_the_tip_is_judged_without_reading_the_chain(store, monkeypatch):
    for certificate in links(NEWEST + 50):
        store.append(certificate)
    monkeypatch.setattr("os.pread", None)
    rule = ForkRule(probation_rounds=5)
    assert len(rule.established(store.chain)) == len(MEMBERS)
    assert rule.carried(extended(store.chain, links(2, store.chain)), len(store.chain)) == len(store.chain) + 2


def test_what_was_read_of_a_chain_stays_when_another_one_takes_its_place(store):
    whole = links(NEWEST + 50)
    store.advance(whole)
    before = store.chain
    other = links(3, whole[:40], shift=2)
    store.advance(extended(before[:40], other))
    assert store.chain == whole[:40] + other == read_chain(store.chain_path)
    assert vars(tally_of(store.chain)) == vars(ChainTally().add(whole[:40] + other))
    assert before == whole
    assert isinstance(before, Chain)
    store.append(links(1, store.chain)[0])
    assert len(store.chain) == 44
    assert store.chain == read_chain(store.chain_path)


def test_a_long_chain_loads_from_a_file_that_may_only_be_read(store, tmp_path):
    whole = links(NEWEST + 20)
    store.advance(whole)
    checkpoint = tmp_path / "chain.jsonl"
    checkpoint.write_bytes(store.chain_path.read_bytes())
    checkpoint.chmod(0o400)
    other = ChainStore(tmp_path / "other", GENESIS)
    assert other.load(checkpoint, whole[NEWEST].link.id)
    assert other.chain == whole[: NEWEST + 1] == read_chain(other.chain_path)
    other.append(links(1, other.chain)[0])
    assert read_chain(other.chain_path) == other.chain
    assert read_chain(checkpoint) == whole


def test_a_file_that_was_cut_is_an_error_where_it_is_read_and_the_next_life_takes_what_is_left(store):
    whole = links(NEWEST + 50)
    store.advance(whole)
    content = store.chain_path.read_bytes()
    cut = content.index(b"\n", len(content) // NEWEST * 10) + 5
    with store.chain_path.open("r+b") as file:
        file.truncate(cut)
    left = len(read_chain(store.chain_path))
    assert 0 < left < 50
    assert store.chain[:left] == whole[:left]
    with pytest.raises(OSError, match=f"round {left} is damaged"):
        store.chain[left]
    assert store.chain[-NEWEST:] == whole[-NEWEST:]
    store.append(links(1, whole)[0])
    assert len(store.chain) == len(whole) + 1
    again = ChainStore(store.folder, GENESIS)
    assert not again.load(again.chain_path, store.lineage_id(len(whole) + 1))
    again.load_all()
    assert again.chain == whole[:left] == read_chain(again.chain_path)
