"""What a join may say of the data that its contribution was trained on."""

from __future__ import annotations

import pytest

from peer.errors import ProtocolError
from peer.protocol.identity import Identity
from peer.protocol.lineage import Position
from peer.protocol.manifest import RoundSpec
from peer.protocol.ranges import ClaimRule
from peer.protocol.weights import WeightRule
from peer.swarm.group.roster import RosterAuthority
from tests.swarm.gathering import PARENT, join_of
from tests.swarm.runs import RUN

ME, OTHER = Identity.generate(), Identity.generate()
HERE = Position(5, PARENT, 100)


@pytest.fixture
def authority() -> RosterAuthority:
    found = RosterAuthority(ME, RUN, RoundSpec(), WeightRule())
    found.claims = ClaimRule((4,), 6)
    return found


TOO_MUCH = {"0:0-7": "claims 7 parts of the data; at most 6", "0:60-65": "reach beyond 64", "0:3-3": "not in order"}


@pytest.mark.parametrize("ranges", TOO_MUCH)
def test_a_peer_whose_own_claim_would_be_refused_joins_without_it_and_says_so(authority, caplog, ranges):
    assert authority.join(HERE, 10, ranges="0:0-6")[0].ranges == "0:0-6"
    assert not caplog.records
    assert authority.join(HERE, 10, ranges=ranges)[0].ranges == ""
    assert TOO_MUCH[ranges] in caplog.text


@pytest.mark.parametrize("ranges", TOO_MUCH)
def test_joins_and_rosters_that_claim_too_much_are_refused(authority, ranges):
    sealed, _ = join_of(OTHER, ranges=ranges)
    with pytest.raises(ProtocolError, match=TOO_MUCH[ranges]):
        authority.open_join(sealed, OTHER.peer_id, HERE)
    mine, own = authority.join(HERE, 10)
    other = RosterAuthority(OTHER, RUN, RoundSpec(), WeightRule())  # a leader of another rule
    joins = {ME.peer_id: (own, mine), OTHER.peer_id: join_of(OTHER, ranges=ranges, nonce=mine.nonce)}
    message, _ = other.write(joins)
    with pytest.raises(ProtocolError, match=TOO_MUCH[ranges]):
        authority.read(message.model_dump_json().encode(), own, mine, OTHER.peer_id)
