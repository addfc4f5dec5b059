"""Members that equivocate: how a group reacts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.evidence import Evidence, TwoJoins
from peer.protocol.records import seal
from peer.protocol.statements import Leaves, root_of, seal_reduced
from peer.protocol.wire import Kind
from peer.swarm.group.roster import JOIN_DOMAIN
from peer.swarm.trust.verdict import NoEvidenceError
from tests.swarm.circle import Circle
from tests.swarm.gathering import until


async def one_round(circle):
    locals_ = circle.locals()
    jobs = [circle.one_round(index, local, None) for index, local in enumerate(locals_)]
    return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 40.0)


async def test_whoever_joins_with_equivocation_is_named_and_banned_on_the_evidence_of_both_joins(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    await circle.round()
    byzantine, one, other = circle.seats
    stream = byzantine.exchange._group.outbound[one.peer_id]
    send = stream.send

    async def another_join(kind, body=b""):
        if kind is Kind.JOIN:
            group = byzantine.exchange._group.identifier
            body = byzantine.rosters.join(byzantine.position, byzantine.tokens + 1, group)[1]
        await send(kind, body)

    stream.send = another_join
    outcomes = await one_round(circle)
    assert all(isinstance(outcome, RoundAborted) for outcome in outcomes), outcomes
    assert byzantine.peer_id in {outcome.culprit for outcome in outcomes[1:]}
    await until(lambda: one.guard.banned(byzantine.peer_id) and other.guard.banned(byzantine.peer_id), 30.0)
    assert [seat.state.round for seat in circle.seats] == [1, 1, 1]
    for seat in (one, other):
        assert not any(seat.guard.refuses(honest.peer_id) for honest in (one, other))


async def test_joins_that_may_both_stand_show_nothing(network, tmp_path):
    circle = await Circle(network, 2, folder=tmp_path).start()
    honest, other = circle.seats
    judge, place, group = honest.guard._judge, honest.position, "a" * 64
    later = type(place)(place.round + 1, place.lineage_id, place.weight)
    join = honest.rosters.join(place, 5, group)[1].hex()
    pairs = {
        "to two leaders": [honest.rosters.join(place, tokens)[1].hex() for tokens in (5, 6)],
        "twice the same": [join, join],
        "in two groups": [join, honest.rosters.join(place, 6, "b" * 64)[1].hex()],
        "in two rounds": [join, honest.rosters.join(later, 6, group)[1].hex()],
        "of two peers": [join, other.rosters.join(place, 6, group)[1].hex()],
        "not signed": [join, join[:-2] + "00"],
        "no join": [join, seal(honest.node.identity, JOIN_DOMAIN, b"{}").hex()],
        "of another domain": [join, seal(honest.node.identity, "vote", bytes.fromhex(join)[117:]).hex()],
    }
    for name, (first, second) in pairs.items():
        with pytest.raises(NoEvidenceError):
            assert judge.judge(Evidence(finding=TwoJoins(first=first, second=second))) is None, name
    second = honest.rosters.join(place, 6, group)[1].hex()
    verdict = judge.judge(Evidence(finding=TwoJoins(first=join, second=second)))
    assert verdict.culprit == honest.peer_id


def telling_another_result(byzantine, send):
    """Its stream to one member: another reduced part than to the others, properly signed."""
    leaves = Leaves()

    async def tell(kind, body=b""):
        if kind is Kind.REDUCED:
            body = bytes(body[:-1]) + bytes([6 if body[-1] == 5 else 5])
            leaves.add(body)
        elif kind is Kind.SEAL_REDUCED:
            sitting = byzantine.exchange._buffers.sitting.result()
            body = seal_reduced(byzantine.node.identity, sitting, body[:32], root_of(leaves.digests)).body
        await send(kind, body)

    return tell


async def test_a_reducer_that_tells_two_results_is_banned_when_members_compare_them(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    byzantine, one, other = circle.seats
    stream = byzantine.exchange._group.outbound[one.peer_id]
    stream.send = telling_another_result(byzantine, stream.send)
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted), outcomes
    await until(lambda: one.guard.banned(byzantine.peer_id) and other.guard.banned(byzantine.peer_id), 30.0)
    assert "signed two results in round 2" in one.guard.bans.offence(byzantine.peer_id)
    assert not one.guard.refuses(other.peer_id)


async def test_a_residual_where_there_is_none_ends_the_round_and_counts_against_its_signer(network, tmp_path):
    """Or nothing that it reduced could be shown to be false: evidence is of what recipes without feedback sign."""
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    byzantine, one, _ = circle.seats
    sign = byzantine.exchange._strategy.sign

    async def another(buffers, leaves, outputs, payloads, residual):
        kept = await sign(buffers, leaves, outputs, payloads, residual)
        roots = kept.seal.inputs, root_of(kept.outputs), bytes(32)
        return replace(kept, seal=seal_reduced(byzantine.node.identity, kept.sitting, *roots))

    byzantine.exchange._strategy.sign = another
    outcomes = await one_round(circle)
    assert (outcomes[1].culprit, outcomes[1].reason) == (byzantine.peer_id, "it signed a residual where there is none")
    assert one.guard.strikes._pasts[byzantine.peer_id].offences == 1


async def test_whoever_shows_two_results_in_an_audit_is_convicted_too(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    byzantine, one, _ = circle.seats
    stream = byzantine.exchange._group.outbound[one.peer_id]
    stream.send = telling_another_result(byzantine, stream.send)
    await one_round(circle)
    await until(lambda: one.guard.banned(byzantine.peer_id), 30.0)  # it is shown one thing at a time
    heard = one.guard._audit_server._heard
    found = await one.guard._auditor.audit(heard, byzantine.peer_id, 0)
    assert (found.outcome, found.found.verdict.culprit) == ("false", byzantine.peer_id)


async def test_a_contribution_that_is_not_what_was_signed_ends_the_round_and_counts_against_its_sender(
    network, tmp_path
):
    circle = await Circle(network, 3, folder=tmp_path).start()
    await circle.round()
    byzantine, one, other = circle.seats
    stream = byzantine.exchange._group.outbound[one.peer_id]
    send = stream.send

    async def another_seal(kind, body=b""):
        await send(kind, body[:-1] + bytes([body[-1] ^ 1]) if kind is Kind.SEAL_SENT else body)

    stream.send = another_seal
    outcomes = await one_round(circle)
    assert outcomes[1].culprit == byzantine.peer_id
    assert "its signature does not fit the contribution" in outcomes[1].reason
    assert one.guard.strikes._pasts[byzantine.peer_id].offences == 1
    assert byzantine.peer_id not in other.guard.strikes._pasts  # it has only been told


async def test_whoever_says_that_its_joins_differ_and_shows_none_that_do_is_counted(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    await circle.round()
    byzantine, one, _ = circle.seats
    stream = byzantine.exchange._group.outbound[one.peer_id]
    send = stream.send

    async def another_group(kind, body=b""):
        await send(kind, bytes(32) + body[32:] if kind is Kind.SEAL_SENT else body)

    stream.send = another_group
    outcomes = await one_round(circle)
    assert isinstance(outcomes[1], RoundAborted)
    assert "has other joins" in outcomes[1].reason
    assert one.guard.strikes._pasts[byzantine.peer_id].offences == 1
    assert not one.guard.banned(byzantine.peer_id)
