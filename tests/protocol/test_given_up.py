from __future__ import annotations

from peer.protocol.chain import GivenUp, given_up
from peer.protocol.lineage import Certificate, Link, Member

RUN = "a" * 64


def chain(*rosters: dict[str, int], start: str = "0" * 64) -> list[Certificate]:
    """Links with these rosters (peer id -> tokens), one after another; nobody signed, which does not matter here."""
    links, parent = [], start
    for number, roster in enumerate(rosters):
        members = tuple(Member(peer_id=peer_id, tokens=tokens) for peer_id, tokens in roster.items())
        link = Link(
            run_id=RUN, round=number, parent=parent, roster=members, update_digest="1" * 64, state_digest="2" * 64
        )
        links.append(Certificate(link=link, signatures={}))
        parent = link.id
    return links


BOTH = [{"me": 10, "you": 10}, {"me": 20, "you": 5}]


def test_what_only_the_old_chain_holds_is_given_up():
    before = chain(*BOTH, {"me": 7, "you": 3}, {"you": 4, "her": 4})
    after = chain(*BOTH, {"them": 100})
    assert given_up(before, after, "me") == GivenUp(from_round=3, rounds=2, tokens=18, own_tokens=7)
    assert str(given_up(before, after, "me")) == "2 rounds from 3 on, 18 tokens (7 ours)"


def test_a_longer_chain_gives_nothing_up():
    assert given_up(chain(*BOTH[:1]), chain(*BOTH), "me") == GivenUp(from_round=0, rounds=0, tokens=0, own_tokens=0)


def test_lineages_with_nothing_in_common():
    after = chain({"them": 1}, {"them": 1})
    assert given_up(chain(*BOTH), after, "me") == GivenUp(from_round=1, rounds=2, tokens=45, own_tokens=30)
