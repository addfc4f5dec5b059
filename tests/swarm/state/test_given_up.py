"""The data of a branch that a peer gives up for a heavier one is counted and shown."""

from __future__ import annotations

import json
from types import SimpleNamespace

from peer.protocol.lineage import Link, Member
from peer.run.coverage import given_up_in, in_words
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.given_up import GIVEN_UP_FILE, read_given_up
from tests.protocol.test_lineage import GENESIS, PEERS, RUN, certificate

SHARDS = (2, 4)  # of two sources: parts 0 to 32, and 32 to 96


def branch(*claims, tokens=100, after=()):
    """Rounds after others, each with the claim of its first member."""
    chain = list(after)
    for ranges in claims:
        parent = chain[-1].link.id if chain else GENESIS
        roster = tuple(Member(peer_id=one.peer_id, tokens=tokens, ranges="" if place else ranges)
                       for place, one in enumerate(PEERS))  # fmt: skip
        digests = {"update_digest": "2" * 64, "state_digest": "3" * 64}
        link = Link(run_id=RUN, round=len(chain), parent=parent, roster=roster, **digests)
        chain.append(certificate(link))
    return chain


def test_a_branch_that_is_given_up_is_counted_with_what_the_others_trained_too(tmp_path):
    shared = branch("0:0-4")
    own = branch("0:4-8,0:40-44", "", "0:8-12", after=shared)
    other = branch("0:4-6", "0:42-50", tokens=200, after=shared)
    store = ChainStore(tmp_path, GENESIS, SHARDS)
    for one in own:
        store.append(one)
    assert list(read_given_up(tmp_path)) == []
    store.advance(other)
    assert [(one.round, one.claims) for one in read_given_up(tmp_path)] == [(1, ("0:4-8,0:40-44",)), (3, ("0:8-12",))]
    found = given_up_in(tmp_path, store.coverage)
    assert found == {"rounds": 2, "parts": 12, "trained_twice": 4}  # 4-6 and 42-44
    store.advance([*other, *branch("0:8-12", after=other)[3:]])  # the same branch, longer: nothing is given up
    assert given_up_in(tmp_path, store.coverage) == {"rounds": 2, "parts": 12, "trained_twice": 8}
    document = {"run": "r", "rounds": 4, "given_up": found, **store.coverage.document()}
    said = "given up by this peer when a split healed: 2 rounds of 0.8 shards; the others also trained on 0.2 of them"
    assert said in in_words(json.loads(json.dumps(document)))


def test_a_damaged_note_is_passed_over_and_a_run_without_shards_has_none(tmp_path):
    (tmp_path / GIVEN_UP_FILE).write_bytes(b'{"round": 1}\n{"claims":["0:0-4"],"round":2}\nx')
    coverage = SimpleNamespace(holds=lambda _: (4, 1))
    assert given_up_in(tmp_path, coverage) == {"rounds": 1, "parts": 4, "trained_twice": 1}
    store = ChainStore(tmp_path / "free", GENESIS)
    for one in branch("", ""):
        store.append(one)
    store.advance(branch("", tokens=300))
    assert given_up_in(tmp_path / "free", coverage)["rounds"] == 0
