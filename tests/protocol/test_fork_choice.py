"""Which of two chains a peer follows: honest splits heal, and free keys move no peer."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError
from peer.protocol.chain import shared_links
from peer.protocol.checkpoints import Checkpoint, choose, open_checkpoint, seal_checkpoint
from peer.protocol.fork_choice import FINAL_LINKS, RECENT_LINKS, ForkRule, ForkVerdict, capped, signers
from peer.protocol.identity import Identity
from peer.protocol.lineage import Certificate, Link, Member, quorum
from peer.protocol.weights import WeightRule

RUN, GENESIS = "1" * 64, "0" * 64
RULE = ForkRule(probation_rounds=10)
WEIGHTS = WeightRule(nominal_tokens=64, largest_weight=3, probation_rounds=10, newcomers_thousandths=200)
SALT = itertools.count()


def extend(chain, rounds, members, *, tokens=64, absent=()):
    """The chain with more rounds of these members; the absent are in the roster and do not sign."""
    chain = list(chain)
    for _ in range(rounds):
        link = Link(
            run_id=RUN, round=len(chain), parent=chain[-1].link.id if chain else GENESIS,
            roster=tuple(Member(peer_id=peer_id, tokens=tokens) for peer_id in members),
            update_digest=f"{next(SALT):064x}", state_digest=GENESIS,
        )  # fmt: skip
        signed = {peer_id: "0" * 128 for peer_id in members if peer_id not in absent}
        chain.append(Certificate(link=link, signatures=signed))
    return chain


def judge(own, other, rule=RULE):
    shared = shared_links(own, other)
    return rule.judge(own[:shared], own[shared:], other[shared:])


def crowd(size):
    return [f"key{number}" for number in range(size)]


def test_a_crowd_of_keys_moves_no_peer_from_genesis():
    honest = extend([], 115, ["a", "b", "c"])
    forged = extend([], 300, crowd(16), tokens=10**6)
    assert judge(honest, forged) is ForkVerdict.KEEP


def test_a_crowd_and_one_former_member_do_not_outweigh_the_others():
    past = extend([], 40, ["a", "b", "c", "m"])
    honest = extend(past, 5, ["a", "b", "c"])
    for back in (0, 1, 10, 39):
        forged = extend(past[: len(past) - back], 300, ["m", *crowd(15)], tokens=10**6)
        assert judge(honest, forged) is ForkVerdict.KEEP
    assert judge(past, extend(past, 300, ["m", *crowd(15)])) is ForkVerdict.WEIGHTLESS  # no round followed


def test_a_member_that_signed_both_sides_counts_for_neither():
    past = extend([], 20, ["a", "b", "c"])
    one, two = extend(past, 3, ["a", "b"]), extend(past, 30, ["b", "c", "x"])
    assert judge(one, two) is not judge(two, one)  # a against c: a tie, which the lower id decides
    three = extend(past, 1, ["c"])
    assert judge(three, one) is ForkVerdict.FOLLOW
    assert judge(one, three) is ForkVerdict.KEEP


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))
def test_both_sides_of_an_honest_split_decide_alike(left, right, rounds, others):
    names = [f"p{number}" for number in range(8)]
    past = extend([], 15, names)
    one, two = extend(past, rounds, names[:left]), extend(past, others, names[8 - right :])
    verdicts = judge(one, two), judge(two, one)
    assert sorted(verdict.value for verdict in verdicts) == ["follow", "keep"]
    if left != right:
        assert (verdicts[0] is ForkVerdict.KEEP) == (left > right)  # however many rounds either has made


def test_a_peer_that_missed_rounds_follows_two_fifths_of_those_who_were_there():
    past = extend([], 30, ["a", "b", "c", "d"])
    assert judge(past, extend(past, 1, ["a", "b"])) is ForkVerdict.FOLLOW
    assert judge(past, extend(past, 50, ["a", *crowd(3)])) is ForkVerdict.WEIGHTLESS
    gone = extend(past, RECENT_LINKS, ["a", "b"])  # c and d have left since: a alone is half of those who stayed
    assert judge(gone, extend(gone, 1, ["a", "new"])) is ForkVerdict.FOLLOW
    # b dies, and a makes a round with a newcomer before the slow c is there
    uneven = extend(extend(extend([], 5, ["a", "b", "c"]), 2, ["a", "b"]), 2, ["a"])
    assert judge(uneven, extend(uneven, 1, ["a", "new"])) is ForkVerdict.FOLLOW
    three = extend([], 9, ["a", "b", "m"])  # but no third does: one could be malicious
    assert judge(three, extend(three, 50, ["m", *crowd(15)])) is ForkVerdict.WEIGHTLESS


def test_true_links_lend_nothing_to_forged_ones_after_them():
    past = extend([], 30, ["a", "b", "c", "m"])
    true = extend(past, 5, ["a", "b", "c", "m"])
    for known in (0, 30, 33, 35):
        for forged in (crowd(16), ["m", *crowd(15)]):
            assert RULE.carried(extend(true, 300, forged), known) == 35
    assert RULE.carried(true, 30) == 35
    assert RULE.carried(extend([], 50, crowd(16)), 0) == 50  # the first comer, where nothing else is known


def test_a_link_that_few_signed_holds_once_enough_others_have_signed_after_it():
    past = extend([], 30, ["a", "b", "c", "d"])
    assert RULE.carried(extend(past, 3, ["a"]), 30) == 30
    assert RULE.carried(extend(extend(past, 3, ["a"]), 1, ["b", "x"]), 30) == 34


def test_a_link_is_settled_once_most_have_signed_it_or_built_upon_it():
    names = [f"p{number}" for number in range(8)]
    past = extend([], 30, names)
    pair = extend(past, 2, names[:2])
    assert (RULE.settled([], 0), RULE.settled(past, 0), RULE.settled(pair, 0)) == (0, 30, 30)
    others = extend(pair, 1, names[2:5])  # five of eight stand behind the pair's links
    assert (RULE.settled(others, 0), RULE.settled(others, 31)) == (32, 32)
    assert RULE.settled(extend(past, 1, [*names[:4], *crowd(8)]), 0) == 30  # half of those who were there are not most
    assert RULE.settled(extend(past, 1, names[:5]), 30) == 31
    assert RULE.settled(extend(past, 30, names[:4]), 30) == 30  # another branch of the others may weigh as much
    assert RULE.settled(extend(past, 200, names[:2]), 30) == 230  # they have left
    assert RULE.settled(extend([], 1, names), 0) == 1
    assert ForkRule(private=True).settled(pair, 0) == 32


def test_of_a_branch_that_a_minority_has_made_only_its_own_links_hold():
    names = [f"p{number}" for number in range(8)]
    past = extend([], 30, names)
    branch = extend(past, 4, names[:3])
    assert RULE.carried(branch, 30, forked=True) == 34
    assert RULE.carried(extend(branch, 300, [names[7], *crowd(15)]), 30, forked=True) == 34
    assert RULE.carried(extend(past, 300, crowd(16)), 30, forked=True) == 30


def test_a_member_that_did_not_sign_supports_nothing():
    past = extend([], 30, ["a", "b", "c"])
    listed = extend(past, 5, ["m", "n", "o", "p", "q", "r", "a", "b", "c"], absent=("a", "b", "c"))
    assert signers(listed[30:]) == {"m", "n", "o", "p", "q", "r"}
    assert judge(past, listed) is ForkVerdict.WEIGHTLESS


def test_of_a_young_ancestor_a_third_of_its_rounds_establishes():
    assert RULE.established(extend([], 1, ["a"])) == {"a": 64}
    assert RULE.established([]) == {}
    late = extend(extend([], 7, ["a", "b"]), 2, ["a", "c"])
    assert set(RULE.established(late)) == {"a", "b"}  # seven of nine rounds; c was in two
    assert set(RULE.established(extend(late, 1, ["c"]))) == {"a", "b", "c"}


def test_many_small_identities_that_passed_probation_do_not_outweigh_three_old_ones():
    past = extend(extend([], 100, ["a", "b", "c"]), 10, ["a", "b", "c", *crowd(16)], tokens=8)
    honest, forged = extend(past, 1, ["a", "b", "c"]), extend(past, 50, crowd(16))
    assert judge(honest, forged) is ForkVerdict.KEEP
    assert judge(forged, honest) is ForkVerdict.FOLLOW
    assert judge(past, forged) is ForkVerdict.WEIGHTLESS


tokens = st.integers(1, 10**6)


@given(st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, max_size=60))
def test_a_crowd_with_less_than_half_of_what_the_others_contributed_outweighs_them_nowhere(honest, crowded):
    weights = {f"h{place}": weight for place, weight in enumerate(honest)}
    weights |= {f"key{place}": weight for place, weight in enumerate(crowded)}
    weights["h0"] += max(0, 2 * sum(crowded) + 1 - sum(honest))
    cut = capped(weights)
    ours = sum(weight for peer_id, weight in cut.items() if peer_id[0] == "h")
    assert 2 * ours > sum(cut.values())
    assert all(-(-weights[peer_id] // 2) <= weight <= weights[peer_id] for peer_id, weight in cut.items())


@given(st.lists(tokens, max_size=4), st.lists(tokens, min_size=1, max_size=5))
def test_a_quarter_of_the_tokens_never_extends_a_chain(honest, hostile):
    honest = [*honest, max(1, 3 * sum(hostile) - sum(honest))]
    past = []
    for name, weights in (("h", honest), ("m", hostile)):
        for place, weight in enumerate(weights):
            past = extend(past, 1, [f"{name}{place}"], tokens=weight)
    rule = ForkRule(probation_rounds=1)
    forged = extend(past, 2, [f"m{place}" for place in range(len(hostile))] + crowd(2))
    assert judge(past, forged, rule) is ForkVerdict.WEIGHTLESS
    assert rule.carried(forged, len(past)) == len(past)


@given(st.lists(tokens, min_size=4, max_size=12))
def test_no_identity_holds_more_than_a_third_but_for_one_that_is_cut_to_half(contributed):
    cut = capped({f"p{place}": weight for place, weight in enumerate(contributed)})
    for place, weight in enumerate(contributed):
        assert 3 * cut[f"p{place}"] <= sum(cut.values()) or cut[f"p{place}"] == -(-weight // 2)


def played(rosters):
    """A chain of these rosters with the weights that an open run gives to full claims."""
    chain, seen = [], Counter()
    for roster in rosters:
        weights = WEIGHTS.weigh([(peer_id, 64) for peer_id in roster], seen)
        link = Link(
            run_id=RUN, round=len(chain), parent=chain[-1].link.id if chain else GENESIS,
            roster=tuple(Member(peer_id=p, tokens=weight) for p, weight in zip(roster, weights, strict=True)),
            update_digest=f"{next(SALT):064x}", state_digest=GENESIS,
        )  # fmt: skip
        chain.append(Certificate(link=link, signatures=dict.fromkeys(roster, "0" * 128)))
        seen.update(roster)
    return chain


@pytest.mark.parametrize("rounds", [2, 3, 5, 10, 11, 12, 20, 30, 40])
@pytest.mark.parametrize("peers", ["abc", "abcd"])
def test_after_a_death_in_the_first_rounds_the_others_follow_each_other_at_once(peers, rounds):
    everyone = [peers] * rounds
    without_one_of_the_slow = ["a" + "".join(peers[1 + n % (len(peers) - 1)]) for n in range(rounds)]
    alone = min(5, rounds // 2)
    one_came_first = [peers[0]] * alone + [peers] * (rounds - alone)
    for rosters in (everyone, without_one_of_the_slow, one_came_first):
        past = played(rosters)
        for dead in peers:
            others = [peer_id for peer_id in peers if peer_id != dead]
            after = extend(past, 1, others)
            assert judge(past, after) is ForkVerdict.FOLLOW, (dead, rosters)
            assert RULE.carried(after, len(past)) == len(after)
            if rosters is everyone:
                silent = others[quorum(len(others)) :]
                assert judge(past, extend(past, 1, others, absent=silent)) is ForkVerdict.FOLLOW


def test_a_peer_gives_up_no_more_than_a_bounded_number_of_its_own_links():
    past = extend([], 10, ["a", "b", "c"])
    own, other = extend(past, FINAL_LINKS + 1, ["a"]), extend(past, 1, ["b", "c"])
    assert judge(own[:-1], other) is ForkVerdict.FOLLOW
    assert judge(own, other) is ForkVerdict.KEEP


def test_in_a_private_run_committed_tokens_decide():
    rule = ForkRule(private=True)
    one, two = extend([], 3, ["a"], tokens=10), extend([], 2, ["b"], tokens=20)
    assert judge(one, two, rule) is ForkVerdict.FOLLOW
    assert judge(two, one, rule) is ForkVerdict.KEEP
    assert judge(one, extend(one, 1, ["z"]), rule) is ForkVerdict.FOLLOW


# -- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_on(chain, round):
    return Checkpoint(run_id=RUN, round=round, lineage_id=chain[round - 1].link.id, serial=1, signed_at=0.0)


def chosen(checkpoint, own, other):
    shared = shared_links(own, other)
    return choose(RULE, checkpoint, own[:shared], own[shared:], other[shared:])


def test_no_peer_goes_back_behind_the_newest_checkpoint():
    past = extend([], 12, ["a", "b", "c", "d"])
    own, other = extend(past, 5, ["a"]), extend(past, 9, ["b", "c", "d"])
    assert chosen(None, own, other) is ForkVerdict.FOLLOW
    assert chosen(checkpoint_on(own, 13), own, other) is ForkVerdict.KEEP
    assert chosen(checkpoint_on(own, 12), own, other) is ForkVerdict.FOLLOW  # it lies on both
    assert chosen(checkpoint_on(own, 13), own, other[:12]) is ForkVerdict.KEEP  # too short to tell


def test_a_peer_that_is_not_on_the_checkpoint_follows_a_chain_that_is():
    one, two = extend([], 30, ["a", "b"]), extend([], 3, ["c", "d"])
    assert chosen(None, one, two) is ForkVerdict.KEEP
    assert chosen(checkpoint_on(two, 3), one, two) is ForkVerdict.FOLLOW
    assert chosen(checkpoint_on(two, 2), [], two) is ForkVerdict.FOLLOW
    assert chosen(checkpoint_on(two, 2), [], one) is ForkVerdict.KEEP


def test_two_groups_that_both_left_the_checkpoint_do_not_stay_apart():
    """All resumed from before it, half of them later: neither half has its state."""
    past = extend([], 12, ["a", "b", "c", "d"])
    checkpoint = checkpoint_on(extend(past, 3, ["a", "b", "c", "d"]), 15)
    one, two = extend(past, 6, ["a", "b"]), extend(past, 9, ["c", "d"])
    verdicts = {chosen(checkpoint, one, two), chosen(checkpoint, two, one)}
    assert verdicts == {ForkVerdict.FOLLOW, ForkVerdict.KEEP}
    assert chosen(checkpoint, past, one) is ForkVerdict.KEEP  # it may yet find a donor
    most = extend(past, 6, ["b", "c", "d"])
    assert chosen(checkpoint, one[:15], most) is ForkVerdict.FOLLOW
    assert chosen(checkpoint, most, extend(past, 9, crowd(9))) is ForkVerdict.KEEP


def test_a_checkpoint_is_read_from_the_keys_of_the_manifest_only():
    organiser, stranger = Identity.generate(), Identity.generate()
    checkpoint = Checkpoint(run_id=RUN, round=3, lineage_id="a" * 64, serial=7, signed_at=1.5)
    blob = seal_checkpoint(organiser, checkpoint)
    assert open_checkpoint(blob, RUN, {organiser.peer_id}) == (organiser.peer_id, checkpoint)
    with pytest.raises(ProtocolError, match="does not name"):
        open_checkpoint(seal_checkpoint(stranger, checkpoint), RUN, {organiser.peer_id})
    with pytest.raises(ProtocolError, match="checkpoint of run 1111"):
        open_checkpoint(blob, "2" * 64, {organiser.peer_id})
    with pytest.raises(ProtocolError, match="no valid signature"):
        open_checkpoint(blob[:-1] + b" ", RUN, {organiser.peer_id})
