"""Votes on what was exchanged."""

from __future__ import annotations

import asyncio

import pytest

from peer.outer.round import RoundAborted
from peer.protocol.lineage import VOTE_DOMAIN, quorum
from peer.protocol.wire import Kind, VoteMessage
from tests.swarm.table import Table, other_digest


async def commit(table, links):
    async def one(index):
        return await table.exchanges[index].commit(table.groups[index], links[index])

    jobs = [one(index) for index in range(len(links))]
    return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 20.0)


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_equal_links_get_a_certificate_that_checks(network, count):
    table = Table(network, count)
    outcomes = await table.all()
    links = [table.link(index, outcome.update) for index, outcome in enumerate(outcomes)]
    for certificate in await commit(table, links):
        certificate.check()
        assert certificate.link.id == links[0].id
        assert len(certificate.signatures) >= quorum(count)


async def test_below_quorum_nothing_commits(network):
    table = Table(network, 2)
    outcomes = await table.all()
    links = [
        table.link(0, outcomes[0].update),
        table.link(1, outcomes[1].update, state_digest=other_digest("another machine")),
    ]
    for abort in await commit(table, links):
        assert isinstance(abort, RoundAborted)
        assert (abort.phase, "1 of 2 signed link" in abort.reason) == ("commit", True)


async def test_the_majority_commits_without_the_one_that_disagrees(network):
    table = Table(network, 3)
    outcomes = await table.all()
    links = [table.link(index, outcome.update) for index, outcome in enumerate(outcomes)]
    links[2] = table.link(2, outcomes[2].update, state_digest=other_digest("another machine"))
    first, second, third = await commit(table, links)
    assert first.link.id == second.link.id == links[0].id
    assert table.nodes[2].peer_id not in first.signatures
    assert isinstance(third, RoundAborted)


@pytest.mark.parametrize("signature", ["forged", "of another domain"])
async def test_a_vote_without_a_valid_signature_does_not_count(network, signature):
    table = Table(network, 2, timeout_s=5.0)
    outcomes = await table.all()
    link, identity = table.link(0, outcomes[0].update), table.nodes[1].identity
    domain = "join" if signature == "of another domain" else VOTE_DOMAIN
    text = identity.sign(domain, bytes.fromhex(link.id)).hex() if signature != "forged" else "0" * 128
    vote = VoteMessage(link_id=link.id, signature=text)
    stream = table.exchanges[1]._buffers.outbound[table.nodes[0].peer_id]
    await stream.send_message(Kind.VOTE, vote)
    with pytest.raises(RoundAborted, match="1 of 2 signed"):
        await table.exchanges[0].commit(table.groups[0], link)


async def test_missing_votes_end_the_round_at_its_deadline(network):
    table = Table(network, 2, timeout_s=0.5)
    outcomes = await table.all()
    with pytest.raises(RoundAborted, match="1 of 2 votes by the deadline"):
        await table.exchanges[0].commit(table.groups[0], table.link(0, outcomes[0].update))


async def test_votes_that_lay_here_while_the_machine_slept_do_not_count(network):
    """The others have given the round up: to commit it now would be to yield it a moment later."""
    now = [0.0]
    table = Table(network, 3)
    for exchange in table.exchanges:
        exchange._clock = lambda: now[0]
    outcomes = await table.all()
    links = [table.link(index, outcome.update) for index, outcome in enumerate(outcomes)]
    sleeper = table.exchanges[2]
    awake = zip(table.exchanges[:2], table.groups, links, strict=False)
    others = await asyncio.gather(*(exchange.commit(group, link) for exchange, group, link in awake))
    assert [set(one.signatures) for one in others] == [{node.peer_id for node in table.nodes[:2]}] * 2
    votes = [inbox.vote for inbox in sleeper._buffers.inboxes.values()]
    await asyncio.wait_for(asyncio.wait(votes), 5.0)
    now[0] = sleeper._buffers.deadline + 10.0
    with pytest.raises(RoundAborted, match="1 of 3 votes by the deadline"):
        await sleeper.commit(table.groups[2], links[2])


async def votes_of(table, indices, took_s):
    """The commits of these members, two thirds of all, after a round that took so long; and the link of each."""
    now = [0.0]
    for exchange in table.exchanges:
        exchange._clock = lambda: now[0]
    outcomes = await table.all()
    now[0] = took_s
    for exchange in table.exchanges:
        exchange._buffers.deadline = 2.0 * took_s
    links = [table.link(index, outcome.update) for index, outcome in enumerate(outcomes)]
    commits = [asyncio.ensure_future(table.exchanges[i].commit(table.groups[i], links[i])) for i in indices]
    ids = {table.nodes[index].peer_id for index in indices}
    inboxes = [table.exchanges[index]._buffers.inboxes for index in indices]
    votes = [inbox.vote for each in inboxes for peer_id, inbox in each.items() if peer_id in ids]
    await asyncio.wait_for(asyncio.wait(votes), 5.0)
    return commits, links


@pytest.mark.parametrize("count", [3, 4, 5])
async def test_all_copies_of_a_link_carry_the_last_vote_too(network, count):
    """Fork choice weighs signers: what two copies say of a branch must be the same."""
    table = Table(network, count)
    commits, links = await votes_of(table, range(count - 1), 20.0)
    last = asyncio.ensure_future(table.exchanges[-1].commit(table.groups[-1], links[-1]))
    certificates = await asyncio.wait_for(asyncio.gather(*commits, last), 5.0)
    assert {frozenset(one.signatures) for one in certificates} == {frozenset(node.peer_id for node in table.nodes)}


async def test_a_member_that_does_not_vote_costs_a_tenth_of_the_round(network, monkeypatch):
    waits, wait = [], asyncio.wait

    async def counted(tasks, *, timeout=None, **more):
        waits.append(timeout)
        return await wait(tasks, timeout=timeout, **more)

    monkeypatch.setattr("peer.swarm.round.votes.asyncio.wait", counted)
    commits, _ = await votes_of(Table(network, 3), range(2), 5.0)
    certificates = await asyncio.wait_for(asyncio.gather(*commits), 5.0)
    assert [len(one.signatures) for one in certificates] == [2, 2]
    assert waits.count(0.5) == 2
