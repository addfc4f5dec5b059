"""The scenarios of hivemind's fault-tolerance and averaging tests, against our exchange: the same peers and faults.

hivemind's survivors keep an approximate mean of what reached them. Here a round is all or nothing: either everybody has
the exact weighted mean, bit for bit, or nobody's state has changed and the next round is without the culprits. There
are no client and auxiliary modes; every peer is a node. Source: learning-at-home/hivemind, tests named
`test_allreduce_fault_tolerance` and `test_averaging`.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

import pytest
import torch

from peer.outer.round import Group, RoundAborted
from peer.protocol.records import PeerRecord
from peer.protocol.wire import Kind, group_id
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.tasks import cancel_and_wait
from tests.outer.reference import reduced
from tests.swarm.donor import Joiner, ScriptedDonor, assert_same
from tests.swarm.gathering import gather, until
from tests.swarm.runs import NUMEL, RUN, Run
from tests.swarm.table import Table

PEERS = 5
SLICE = 256
ELEMENTS = 4000


class Fault(Enum):
    NONE = auto()
    FAIL_BEFORE = auto()
    FAIL_SENDING = auto()
    SLOW_SENDING = auto()
    FAIL_REDUCING = auto()
    SLOW_REDUCING = auto()
    CANCEL = auto()


HARMLESS = (Fault.NONE, Fault.SLOW_SENDING, Fault.SLOW_REDUCING)


class Averagers(Table):
    """Peers 0 and 1 may be faulty; parts travel in many slices, so that a fault can strike in the middle of one."""

    def __init__(self, network, count, faults=(), **options):
        super().__init__(network, count, numel=options.pop("numel", ELEMENTS), elements=SLICE, **options)
        self.network, self.told = network, dict(enumerate(faults))
        for index, fault in self.told.items():
            if fault not in (Fault.NONE, Fault.FAIL_BEFORE):
                self._sabotage(index, fault)

    def _sabotage(self, index, fault):
        """The production exchange on streams that fail, or dawdle, at a certain frame."""
        node, opening, last = self.nodes[index], self.nodes[index].open, self.nodes[-1].peer_id
        opened = []

        def crash():
            self.network.cut(node.peer_id)
            for stream in opened:
                stream.close()
            raise StreamClosedError(node.peer_id, "crashed")

        async def faulty_open(peer_id, *arguments, **options):
            stream = await opening(peer_id, *arguments, **options)
            opened.append(stream)
            sending, parts = stream.send, 0

            async def send(kind, body=b"", **options):
                nonlocal parts
                parts += kind is Kind.CONTRIBUTION
                if fault is Fault.FAIL_SENDING and peer_id == last and parts == 2:
                    crash()
                if fault is Fault.FAIL_REDUCING and kind is Kind.REDUCED:
                    crash()
                slow = {Fault.SLOW_SENDING: Kind.CONTRIBUTION, Fault.SLOW_REDUCING: Kind.REDUCED}.get(fault)
                if kind is slow:
                    await asyncio.sleep(0.002)
                await sending(kind, body, **options)
                if fault is Fault.CANCEL and parts == 2 and kind is Kind.CONTRIBUTION:
                    self.cancelled[index].set()
                    await asyncio.Event().wait()  # it gets no further

            stream.send = send
            return stream

        self.cancelled = {**getattr(self, "cancelled", {}), index: asyncio.Event()}
        node.open = faulty_open

    async def take_part(self, index):
        """One member's exchange; whoever aborts tells the others, whoever cancels too."""
        fault = self.told.get(index, Fault.NONE)
        if fault is Fault.FAIL_BEFORE:
            self.network.cut(self.nodes[index].peer_id)
            raise RoundAborted("exchange", "failed before it began", culprit=self.nodes[index].peer_id)
        work = asyncio.ensure_future(self.exchange(index))
        if fault is Fault.CANCEL:
            await self.cancelled[index].wait()
            work.cancel()
            await asyncio.wait({work})
            abort = RoundAborted("exchange", "cancelled", culprit=self.nodes[index].peer_id)
            await self.exchanges[index].release(self.groups[index], abort)
            raise abort
        try:
            return await work
        except RoundAborted as abort:
            if fault in HARMLESS:
                await self.exchanges[index].release(self.groups[index], abort)
            raise

    def regroup(self, indices):
        """The group of the next attempt: these members alone."""
        ids = [self.nodes[index].peer_id for index in indices]
        members = tuple(self.groups[0].members[index] for index in indices)
        joins = [self.groups[index].join for index in indices]
        for place, index in enumerate(indices):
            self.groups[index] = Group(group_id(joins, ids), self.groups[index].join, members, place)

    def reference(self, indices):
        """What these members must arrive at, whatever way the bytes take."""
        locals_ = [self.locals[index] for index in indices]
        return reduced(self.states[0], locals_, [self.weights[index] for index in indices])

    async def commit_all(self, indices, outcomes):
        """Certificates and the new states of these members."""
        link = self.link(indices[0], outcomes[0].update, roster=self.groups[indices[0]].members)
        jobs = [self.exchanges[index].commit(self.groups[index], link) for index in indices]
        for index, outcome, certificate in zip(indices, outcomes, await asyncio.gather(*jobs), strict=True):
            certificate.check()
            self.states[index].apply(outcome.update, 1, certificate.link.id)
        return {self.states[index].digest() for index in indices}


# every pair of hivemind's test, and those of its later versions with slow peers
PAIRS = [
    (Fault.NONE, Fault.FAIL_BEFORE), (Fault.FAIL_BEFORE, Fault.FAIL_BEFORE), (Fault.SLOW_SENDING, Fault.FAIL_SENDING),
    (Fault.FAIL_SENDING, Fault.FAIL_SENDING), (Fault.FAIL_SENDING, Fault.FAIL_BEFORE),
    (Fault.SLOW_REDUCING, Fault.FAIL_SENDING), (Fault.FAIL_SENDING, Fault.FAIL_REDUCING),
    (Fault.FAIL_REDUCING, Fault.FAIL_REDUCING), (Fault.NONE, Fault.CANCEL),
]  # fmt: skip


@pytest.mark.parametrize(("fault0", "fault1"), PAIRS, ids=lambda fault: fault.name.lower())
async def test_a_faulty_round_changes_nothing_and_the_next_is_exact_without_the_culprits(network, fault0, fault1):
    table = Averagers(network, PEERS, (fault0, fault1))
    faulty = [index for index, fault in enumerate((fault0, fault1)) if fault not in HARMLESS]
    sound = [index for index in range(PEERS) if index not in faulty]
    culprits = {table.nodes[index].peer_id for index in faulty}
    genesis = table.states[0].lineage_id

    outcomes = await table.all(work=table.take_part)
    for index in sound:
        assert isinstance(outcomes[index], RoundAborted), outcomes
        assert outcomes[index].culprit in culprits
        assert table.states[index].digest() == genesis

    table.regroup(sound)
    again = await table.all(sound)
    assert {outcome.update.payload for outcome in again} == {table.reference(sound).payload}
    digests = await table.commit_all(sound, again)
    assert len(digests) == 1
    assert genesis not in digests


@pytest.mark.parametrize(
    ("fault0", "fault1"), [(Fault.NONE, Fault.NONE), (Fault.SLOW_SENDING, Fault.SLOW_REDUCING)], ids=["none", "slow"]
)
async def test_slow_peers_are_in_the_mean_exactly(network, fault0, fault1):
    table = Averagers(network, PEERS, (fault0, fault1))
    everybody = list(range(PEERS))
    outcomes = await table.all(work=table.take_part)
    assert {outcome.update.payload for outcome in outcomes} == {table.reference(everybody).payload}
    assert len(await table.commit_all(everybody, outcomes)) == 1


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4", "sign"])
async def test_four_peers_average_once_under_every_kind_of_compression(network, codec):
    table = Averagers(network, 4, codec=codec, numel=126)
    generator = torch.Generator().manual_seed(4)
    noise = [torch.randn(126, generator=generator) for _ in range(4)]
    anchor = table.states[0].anchor
    table.locals = [anchor + noise[0], anchor + noise[1].abs(), anchor - noise[2].abs(), anchor + noise[3] ** 3]
    outcomes = await table.all()
    assert {outcome.update.payload for outcome in outcomes} == {table.reference([0, 1, 2, 3]).payload}
    if codec == "fp32":
        shares = torch.tensor(table.weights, dtype=torch.float64) / sum(table.weights)
        moved = [(anchor - local).double() for local in table.locals]  # the update is a gradient: anchor - local
        mean = sum(share * move for share, move in zip(shares, moved, strict=True))
        torch.testing.assert_close(outcomes[0].update.decode_range(0, 126).double(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
async def test_the_mean_is_weighted_as_the_roster_says(network, seed):
    table = Averagers(network, 4, codec="fp32", numel=123)
    weights = torch.randint(1, 10_000, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    table.weights = weights
    members = tuple(
        member.model_copy(update={"tokens": tokens})
        for member, tokens in zip(table.groups[0].members, weights, strict=True)
    )
    table.groups = [Group(group.id, group.join, members, group.index) for group in table.groups]
    outcomes = await table.all()
    assert {outcome.update.payload for outcome in outcomes} == {table.reference([0, 1, 2, 3]).payload}
    anchor = table.states[0].anchor.double()
    mean = sum(w * (anchor - local.double()) for w, local in zip(weights, table.locals, strict=True)) / sum(weights)
    torch.testing.assert_close(outcomes[0].update.decode_range(0, 123).double(), mean, rtol=1e-5, atol=1e-6)


async def test_of_eight_peers_a_full_group_of_four_forms_and_all_know_what_each_contributes(network):
    members = await gather(network, 8, low=4, high=4)
    jobs = {asyncio.ensure_future(m.match(tokens=123 + number)): m.peer_id for number, m in enumerate(members)}
    await until(lambda: sum(job.done() for job in jobs) >= 4, 20.0)
    matched = [job for job in jobs if job.done()]
    groups = [job.result() for job in matched]
    await cancel_and_wait(set(jobs).difference(matched))
    assert len(groups) == 4
    assert len({group.id for group in groups}) == 1
    contributed = {member.peer_id: 123 + number for number, member in enumerate(members)}
    for group in groups:
        assert {member.peer_id: member.tokens for member in group.members} == {
            jobs[job]: contributed[jobs[job]] for job in matched
        }


async def test_peers_that_do_not_know_each_other_are_too_few(network):
    network.retime(solo_patience_s=0.1)
    members = await gather(network, 4)
    for member in members:
        member.directory.peers = {}
    outcomes = await asyncio.gather(*(member.match() for member in members), return_exceptions=True)
    assert all(isinstance(outcome, RoundAborted) and outcome.alone for outcome in outcomes), outcomes


async def test_a_state_is_loaded_from_the_peer_that_is_furthest(network, tmp_path):
    runs = [Run(tmp_path / f"run{rounds}").commit(rounds, seed=rounds) for rounds in (1, 3, 2)]
    donors = [await ScriptedDonor(network.node(), run).start() for run in runs]
    joiner = Joiner(network, tmp_path / "joiner")
    records = {donor.peer_id: record_of(run) for donor, run in zip(donors, runs, strict=True)}
    order = joiner.scout.claims(records, set())
    assert order == [donors[1].peer_id, donors[2].peer_id, donors[0].peer_id]
    by_id = {donor.peer_id: donor for donor in donors}
    await joiner.catch_up(by_id[order[0]])
    assert_same(joiner, runs[1])
    assert joiner.state.numel == NUMEL


def record_of(run):
    return PeerRecord(
        run_id=RUN, nickname="x", state="training", round=run.state.round, lineage_id=run.state.lineage_id,
        lineage_weight=run.history.weight, expires_at=1.0,
    )  # fmt: skip

