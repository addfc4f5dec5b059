from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.lineage import (
    VOTE_DOMAIN,
    Certificate,
    Link,
    Member,
    RosterLimits,
    chain_weight,
    check_chain,
    heavier,
    quorum,
)
from peer.protocol.manifest import TrustSpec
from peer.protocol.weights import WeightRule

RUN = "1" * 64
GENESIS = "0" * 64
PEERS = [Identity.generate() for _ in range(4)]


def link(members=PEERS, *, round=0, parent=GENESIS, tokens=100, run_id=RUN, **changes):
    roster = tuple(Member(peer_id=identity.peer_id, tokens=tokens) for identity in members)
    values = {"update_digest": "2" * 64, "state_digest": "3" * 64, **changes}
    return Link(run_id=run_id, round=round, parent=parent, roster=roster, **values)


def sign(one, signers, domain=VOTE_DOMAIN):
    statement = bytes.fromhex(one.id)
    return {identity.peer_id: identity.sign(domain, statement).hex() for identity in signers}


def certificate(one, signers=PEERS):
    return Certificate(link=one, signatures=sign(one, signers))


def make_chain(length):
    chain, parent = [], GENESIS
    for round in range(length):
        chain.append(certificate(link(round=round, parent=parent)))
        parent = chain[-1].link.id
    return chain


def test_quorum_is_the_least_count_of_at_least_two_thirds():
    assert [quorum(n) for n in range(1, 17)] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 10, 11]
    for n in range(1, 65):
        assert 3 * quorum(n) >= 2 * n > 3 * (quorum(n) - 1)


def test_a_certificate_needs_two_thirds_of_the_roster():
    one = link()
    for count in (4, 3):
        certificate(one, PEERS[:count]).check()
    for count in (2, 1, 0):
        with pytest.raises(ProtocolError, match=f"{count} signatures; 3 are needed"):
            certificate(one, PEERS[:count]).check()


def test_strangers_and_wrong_signatures_void_a_certificate():
    one, two = link(), sign(link(), PEERS[:2])
    third = PEERS[2].peer_id
    stranger = Identity.generate()
    wrong = {
        "stranger": sign(one, [stranger]),
        "another's signature": {third: two[PEERS[0].peer_id]},
        "another domain": sign(one, [PEERS[2]], "join"),
        "another link": sign(link(round=1), [PEERS[2]]),
        "zeros": {third: "0" * 128},
        "the same member spelt differently": {PEERS[0].peer_id + "-": two[PEERS[0].peer_id]},
    }
    for extra in wrong.values():
        for signed in (two, sign(one, [PEERS[0], PEERS[1], PEERS[3]])):  # one too few, and enough of them
            with pytest.raises(ProtocolError, match="no valid signature of"):
                Certificate(link=one, signatures={**signed, **extra}).check()


def test_a_member_cannot_sit_twice():
    with pytest.raises(ValidationError, match="names a peer twice"):
        link([PEERS[0], PEERS[1], PEERS[0]])


@pytest.mark.parametrize("tokens", [0, -1, 2**40])
def test_the_weight_of_a_member_is_bounded(tokens):
    with pytest.raises(ValidationError, match="tokens"):
        link(tokens=tokens)


def test_the_link_id_changes_with_every_field():
    roster = PEERS[:3]
    variants = [
        link(roster),
        link(PEERS[:2]),
        link(roster[::-1]),
        link(roster, tokens=101),
        link(roster, run_id="a" * 64),
        link(roster, fragment=1),
        link(roster, round=1),
        link(roster, parent="a" * 64),
        link(roster, update_digest="a" * 64),
        link(roster, state_digest="a" * 64),
        link(roster, residuals=("a" * 64,) * 3),
        link(roster, residuals=("a" * 64, "a" * 64, "b" * 64)),
    ]
    assert len({one.id for one in variants}) == len(variants)
    first = variants[0]
    changed = {name for one in variants for name in Link.model_fields if getattr(one, name) != getattr(first, name)}
    assert changed == set(Link.model_fields)
    assert link(roster).id == first.id


def test_a_chain_links_from_its_parent_on():
    chain = make_chain(3)
    check_chain(chain, RUN, GENESIS, 0)
    check_chain(chain[1:], RUN, chain[0].link.id, 1)
    check_chain([], RUN, GENESIS, 0)
    assert chain_weight(chain) == 3 * 4 * 100


def test_a_chain_with_a_gap_another_start_or_another_run_is_refused():
    chain = make_chain(3)
    broken = {
        "gap": (chain[::2], RUN, GENESIS, 0),
        "order": (chain[::-1], RUN, GENESIS, 0),
        "twice": ([chain[0], chain[0]], RUN, GENESIS, 0),
        "another parent": (chain, RUN, "f" * 64, 0),
        "another first round": (chain, RUN, GENESIS, 1),
        "round number": ([certificate(link(round=5))], RUN, GENESIS, 0),
    }
    for arguments in broken.values():
        with pytest.raises(ProtocolError, match="does not follow"):
            check_chain(*arguments)
    with pytest.raises(ProtocolError, match="another run"):
        check_chain(chain, "f" * 64, GENESIS, 0)


def test_one_uncertified_link_voids_a_chain():
    chain = make_chain(3)
    chain[1] = Certificate(link=chain[1].link, signatures=sign(chain[1].link, PEERS[:2]))
    with pytest.raises(ProtocolError, match="round 1 has 2 signatures"):
        check_chain(chain, RUN, GENESIS, 0)


OPEN = RosterLimits(2, 4, WeightRule.of(TrustSpec(probation_rounds=2), 1000))


def open_chain(*rosters):
    """A chain whose rounds have these members and weights, by their places among PEERS."""
    chain, parent = [], GENESIS
    for round, roster in enumerate(rosters):
        members = tuple(Member(peer_id=PEERS[place].peer_id, tokens=tokens) for place, tokens in roster.items())
        one = link(round=round, parent=parent).model_copy(update={"roster": members})
        chain.append(certificate(one, [PEERS[place] for place in roster]))
        parent = one.id
    return chain


def test_a_chain_keeps_the_limits_of_an_open_run():
    fair = open_chain({0: 100, 1: 300}, {0: 100, 1: 100}, {0: 100, 1: 100, 2: 50}, {0: 100, 2: 26}, {0: 3, 2: 1, 3: 1})
    check_chain(fair, RUN, GENESIS, 0, OPEN)
    seen = Counter({PEERS[0].peer_id: 2, PEERS[1].peer_id: 2})
    check_chain(fair[2:], RUN, fair[1].link.id, 2, OPEN, seen)
    assert seen[PEERS[0].peer_id] == 5
    before = ({0: 100, 1: 100}, {0: 100, 1: 100})
    forged = {
        "weight of 301 for .*; the run allows 300": open_chain({0: 100, 1: 301}),
        "weight of 1001 for .*; the run allows 1000": open_chain({0: 1000, 1: 1001}),
        "weight of 100 for .*; the run allows 50": open_chain(*before, {0: 100, 1: 100, 2: 100}),
        "weight of 1000 for .*; the run allows 125": open_chain(*before, {2: 1000, 3: 1000}),
    }
    for reason, chain in forged.items():
        with pytest.raises(ProtocolError, match=reason):
            check_chain(chain, RUN, GENESIS, 0, OPEN)


LINEAGES = st.tuples(st.integers(0, 3), st.sampled_from(["a" * 64, "b" * 64, "c" * 64]))


@given(LINEAGES, LINEAGES, LINEAGES)
def test_fork_choice_is_a_strict_total_order(a, b, c):
    assert not heavier(*a, *a)
    if a != b:
        assert heavier(*a, *b) != heavier(*b, *a)
    if heavier(*a, *b) and heavier(*b, *c):
        assert heavier(*a, *c)


def test_fork_choice_takes_the_weight_then_the_lower_id():
    assert heavier(2, "f" * 64, 1, "0" * 64)
    assert not heavier(1, "0" * 64, 2, "f" * 64)
    assert heavier(1, "0" * 64, 1, "f" * 64)
