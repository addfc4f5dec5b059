"""Reducers with error feedback: honest ones are never convicted, whatever happens to them, and each lie shows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.protocol.evidence import MAX_EVIDENCE_BYTES, Evidence
from peer.protocol.records import dump_json
from peer.swarm.round.reducer_residual import origins
from peer.swarm.trust.verdict import ElsewhereError, NoEvidenceError, RightError
from tests.swarm.workshop import Workshop

OFFENCES = (
    "commit", "abandon", "missed", "another attempt", "without me", "restart", "a shorter lineage", "another lineage",
    "lost",
)  # fmt: skip


def act(shop, offence):
    """One round, or what may happen in its place."""
    roster = shop.gather(with_me=offence != "without me")
    if offence == "without me":
        shop.link(roster)
        return
    if offence == "restart":
        shop.restart()
        return
    if offence.endswith("lineage"):
        del shop.chain[max(0, len(shop.chain) - (2 if offence == "a shorter lineage" else 1)) :]
        shop.link(shop.gather(with_me=False))
        return
    kept = shop.reduce(roster)
    if offence == "commit":
        shop.commit(roster, kept)
        return
    if offence == "lost":  # the lineage that it is committed in is left at once
        shop.residual.commit()
        shop.link(shop.gather(with_me=False))
        return
    shop.residual.revert()
    if offence == "missed":  # the others had a certificate
        shop.link(roster, kept)
    elif offence == "another attempt":  # of two that the reducer gave up, the first was committed
        second = shop.reduce(roster)
        shop.residual.revert()
        assert second.seal.residual != kept.seal.residual
        shop.link(roster, kept)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), offences=st.lists(st.sampled_from(OFFENCES), max_size=12))
def test_no_honest_reducer_is_convicted_whatever_happens_to_it(seed, offences):
    shop = Workshop(seed)
    for offence in offences:
        act(shop, offence)
    kept = shop.reduce(shop.gather())
    for index in shop.slices(kept):
        evidence, payloads = shop.evidence(kept, index)
        assert shop.judge.needs(evidence) == [len(payload) for payload in payloads]
        assert len(dump_json(evidence)) < MAX_EVIDENCE_BYTES
        with pytest.raises(RightError):
            shop.judge.judge(evidence, payloads)


def committed(shop, rounds, **how):
    """Rounds of groups that come and go; -> what was kept of each."""
    past = []
    for _ in range(rounds):
        roster = shop.gather(**how)
        past.append(shop.reduce(roster))
        shop.commit(roster, past[-1])
    return past


def test_what_a_reducer_was_left_with_outlives_rounds_that_it_gave_up_or_missed():
    shop = Workshop(1)
    committed(shop, 6, others=3)
    for offence in ("abandon", "without me", "missed", "abandon", "missed"):
        act(shop, offence)
    kept = shop.reduce(shop.gather(others=3))
    assert kept.residual.since == 0
    assert len(shop.chain) == 9
    assert all(values.any() for values in kept.residual.before)


@pytest.mark.parametrize("offence", ["restart", "a shorter lineage", "another lineage", "another attempt", "lost"])
def test_who_cannot_carry_on_begins_anew_and_says_so(offence):
    shop = Workshop(2)
    committed(shop, 6, others=3)
    act(shop, "abandon")  # so that it has seen the last of them
    act(shop, offence)
    kept = shop.reduce(shop.gather(others=3))
    assert kept.residual.since == len(shop.chain)
    assert not any(values.any() for values in kept.residual.before)
    assert not any(shop.evidence(kept, index)[0].finding.residue.carried for index in shop.slices(kept))


def test_origins_are_the_rounds_in_which_a_reducer_last_had_each_cell():
    shop = Workshop(3)
    committed(shop, 8)
    numel, cell, me = shop.wire.numel, shop.wire.cell, shop.me.peer_id
    found = origins(shop.chain, me, 0, 0, numel, shop.judge.recomputer.shard)
    assert [found[0].start, found[-1].stop] == [0, numel]
    assert all(one.stop == other.start for one, other in itertools.pairwise(found))
    last = [None] * -(-numel // cell)
    for certificate in shop.chain:
        start, stop = shop.wire.bounds(len(certificate.link.roster))[certificate.link.place(me)]
        last[start // cell : -(-stop // cell)] = [certificate.link] * len(range(start, stop, cell))
    for origin in found:
        assert {id(link) for link in last[origin.start // cell : -(-origin.stop // cell)]} == {id(origin.link)}
    assert origins(shop.chain, me, 8, 0, numel, shop.judge.recomputer.shard) == [(0, numel, None)]
    assert origins(shop.chain, "stranger", 0, 0, numel, shop.judge.recomputer.shard) == [(0, numel, None)]


LIES = {
    "one value": lambda mean: mean.index_put((torch.tensor(7),), mean.abs().max() * 2.0 + 1.0),
    "flipped": lambda mean: -mean,
    "zero": lambda mean: torch.zeros_like(mean),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reducer_that_feeds_its_residual_something_else_is_convicted(lie):
    shop = Workshop(5)
    committed(shop, 4, others=3)
    roster = shop.gather(others=3)
    kept = shop.reduce(roster, lie=LIES[lie])
    evidence, payloads = shop.evidence(kept, 0)
    verdict = shop.judge.judge(evidence, payloads)
    assert (verdict.culprit, verdict.offence.split(",")[0]) == (shop.me.peer_id, "reduced falsely")
    with pytest.raises(RightError):  # nothing was wrong with the other slice
        shop.judge.judge(*shop.evidence(kept, 1))


def test_a_reducer_that_keeps_what_it_was_not_left_with_is_convicted_in_that_round_and_in_no_other():
    shop = Workshop(6)
    committed(shop, 4, others=3)
    encode = shop.residual._residual.encode

    def poisoned(codec, start, stop, read):
        payload = encode(codec, start, stop, read)
        shop.residual._residual.vector[start + 5] += 1.0
        return payload

    shop.residual._residual.encode = poisoned
    roster = shop.gather(others=3)
    lied = shop.reduce(roster)
    shop.residual._residual.encode = encode
    verdict = shop.judge.judge(*shop.evidence(lied, 0))
    assert "kept a false residual, in round 5, slice 0" in verdict.offence
    shop.commit(roster, lied)
    for kept in committed(shop, 4, others=3):
        for index in shop.slices(kept):
            with pytest.raises(RightError):
                shop.judge.judge(*shop.evidence(kept, index))
    assert shop.judge.judge(*shop.evidence(lied, 0)) == verdict  # however old it is


def test_who_changed_its_residual_between_rounds_has_nothing_to_show_that_fits():
    shop = Workshop(7)
    committed(shop, 6, others=3)
    shop.residual._residual.vector += 0.5
    kept = shop.reduce(shop.gather(others=3))
    with pytest.raises(NoEvidenceError, match="a residual that the reducer was not left with") as caught:
        shop.judge.judge(*shop.evidence(kept, 0))
    assert type(caught.value) is NoEvidenceError  # not that it is right: an audit counts as not shown


def test_who_says_that_it_begins_anew_begins_with_zeros():
    shop = Workshop(7)
    committed(shop, 6, others=3)
    shop.residual._since = 6
    kept = shop.reduce(shop.gather(others=3))
    evidence, payloads = shop.evidence(kept, 0)
    residue = evidence.finding.residue.model_copy(update={"carried": ()})
    evidence = Evidence(finding=evidence.finding.model_copy(update={"residue": residue}))
    with pytest.raises(NoEvidenceError, match="a residual that the reducer was not left with"):
        shop.judge.judge(evidence, payloads)


def test_who_signs_that_its_residual_begins_later_is_convicted():
    """Or its beginning anew, round after round, would be seen by nobody."""
    shop = Workshop(7)
    committed(shop, 3, others=3)
    begin = shop.residual.begin

    def later(*arguments, **options):
        attempt = begin(*arguments, **options)
        attempt.since = 2**53 - 1
        return attempt

    shop.residual.begin = later
    evidence, _ = shop.evidence(shop.reduce(shop.gather(others=3)), 0)
    assert "signed a residual that begins later, in round 4, slice 0" in shop.judge.judge(evidence).offence


def test_a_shard_without_a_cell_restores_nothing_of_another_attempt():
    """Where a model has fewer cells than a round has members."""
    shop = Workshop(10, numel=300, elements=512)  # two cells
    committed(shop, 6, others=1)
    shop.reduce(shop.gather(others=1))
    shop.residual.revert()
    roster = next(roster for roster in iter(lambda: shop.gather(others=5), None) if _part(shop, roster) == 0)
    kept = shop.reduce(roster)
    shop.residual.revert()
    shop.link(roster, kept)  # the others had a certificate
    kept = shop.reduce(shop.gather(others=1))
    for index in shop.slices(kept):
        with pytest.raises(RightError):
            shop.judge.judge(*shop.evidence(kept, index))


def _part(shop, roster):
    start, stop = shop.wire.bounds(len(roster))[roster.index(shop.me)]
    return stop - start


def altered(document, payloads):
    """Forgeries of evidence against an honest reducer, or a guilty one: each differs from it in one thing."""
    finding, residue = document["finding"], document["finding"]["residue"]
    *inputs, before, leaves = payloads

    def put(**changes):
        return {"finding": {**finding, "residue": {**residue, **changes}}}, payloads

    other = "0" * 64
    yield "another beginning", put(since=residue["since"] + 1)
    yield "another root", put(root=other)
    yield "another path", put(path=[other, *residue["path"][1:]])
    yield "a longer path", put(path=[*residue["path"], other])
    yield "no path", put(path=[])
    yield "no origins", put(carried=[])
    yield "one origin more", put(carried=[*residue["carried"], []])
    yield "another origin", put(carried=[[other, *path[1:]] for path in residue["carried"]])
    yield "no residual", ({"finding": {**finding, "residue": None}}, payloads)
    yield "another residual before", (document, [*inputs, bytes(len(before)), leaves])
    yield "another one after", (document, [*inputs, before, bytes(len(leaves))])
    yield "a shorter one", (document, [*inputs, before[:-4], leaves])
    yield "none", (document, inputs)


@pytest.mark.parametrize("lie", [None, LIES["one value"]])
def test_forged_evidence_convicts_nobody(lie):
    shop = Workshop(8)
    committed(shop, 6, others=4)
    kept = shop.reduce(shop.gather(others=4), lie)
    evidence, payloads = shop.evidence(kept, 0)
    assert evidence.finding.residue.carried
    for name, (forged, shown) in altered(evidence.model_dump(mode="json"), payloads):
        with pytest.raises(NoEvidenceError):
            assert shop.judge.judge(Evidence.model_validate(forged), shown) is None, name


def test_evidence_convinces_whoever_has_the_chain_and_nobody_judges_another_lineage():
    shop = Workshop(9)
    committed(shop, 5, others=3)
    roster = shop.gather(others=3)
    evidence, payloads = shop.evidence(shop.reduce(roster, LIES["flipped"]), 0)
    chain = list(shop.chain)
    del shop.chain[-1]
    with pytest.raises(ElsewhereError):
        shop.judge.judge(evidence, payloads)
    shop.link(shop.gather())
    for ask in (shop.judge.judge, shop.judge.needs):  # whoever offers it need not send any payloads
        with pytest.raises(ElsewhereError):
            ask(evidence)
    shop.chain = chain
    for _ in range(3):
        shop.link(shop.gather())
    assert shop.judge.judge(evidence, payloads).culprit == shop.me.peer_id
