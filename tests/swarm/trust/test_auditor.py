"""Audits of reducers in real exchanges: who lies is convicted, and nobody else ever."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import weakref
from collections import Counter

import pytest

from peer.outer.compress.registry import COMPRESSORS
from peer.outer.recipe.resolve import swarm_recipe
from peer.protocol.evidence import Evidence
from peer.protocol.manifest import RecipeSpec
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import AuditRequest, Kind
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.round_priority import IoSlot
from peer.swarm.trust.audit_server import ASKS_OF_ONE, audit_name
from peer.swarm.trust.judge import Judge
from peer.swarm.trust.recompute import Recomputer
from peer.swarm.trust.verdict import NoEvidenceError
from tests.swarm.auditing import audit, heard, lies, slices_of, tampered_rounds
from tests.swarm.circle import RECIPE, Circle
from tests.swarm.gathering import until
from tests.swarm.runs import RUN
from tests.swarm.tampering import Tampering


@pytest.mark.timeout(600)
async def test_one_tampered_slice_in_each_of_60_rounds_is_found_by_whoever_audits_it(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    byzantine = Tampering(RECIPE.aggregator)
    lies(circle, 0, byzantine)
    caught, accused = await tampered_rounds(circle, byzantine, 60, seed=5)
    assert caught >= 59
    assert accused == 0


SETTINGS = [
    *((codec, {"compressor": codec}) for codec in COMPRESSORS),
    ("clipped", {"aggregator": "clipped"}),
    ("trimmed", {"aggregator": "trimmed"}),
    ("median", {"aggregator": "median"}),
    ("centred-clipping", {"aggregator": "centred-clipping"}),
    ("gated", {"aggregator": {"name": "gated", "min_cosine": -0.5}}),  # the contributions have nothing in common
]


@pytest.mark.parametrize("name", [name for name, _ in SETTINGS])
async def test_no_honest_reducer_is_accused_with_any_codec_or_aggregator(network, tmp_path, name):
    spec = RecipeSpec(name="opendiloco", **dict(SETTINGS)[name])
    recipe = swarm_recipe(spec)
    circle = await Circle(
        network, 4, numel=5000, codec=recipe.compressor, recipe=recipe, elements=512, folder=tmp_path
    ).start()
    audited = 0
    for _ in range(6):
        await circle.round()
        for auditor in range(4):
            reducer = (auditor + 1) % 4
            for index in range(slices_of(circle, auditor, reducer)):
                assert (await audit(circle, auditor, reducer, index)).outcome == "right"
                audited += 1
    assert audited >= 24


async def test_slices_that_are_too_large_for_an_audit_are_not_audited_and_cost_no_memory(
    network, tmp_path, monkeypatch
):
    monkeypatch.setattr("peer.swarm.trust.recompute.MAX_AUDIT_BYTES", 3 * 512 - 1)  # of 512 values and their scales
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    guard = circle.seats[0].guard
    assert [kept.payloads for kept in guard._audit_server._kept.values()] == [()]
    await circle.round()
    assert len(guard._audit_server._kept) == 1
    guard._auditor._rng = random.Random(0)
    assert {guard._auditor.draw(heard(circle, 0)) for _ in range(50)} == {None}


async def caught_circle(network, tmp_path, lie="one value", count=3, **options):
    """A circle of which the first member has reduced slice 0 falsely, and what the second found."""
    circle = await Circle(network, count, numel=3000, elements=512, folder=tmp_path, **options).start()
    lies(circle, 0, Tampering(RECIPE.aggregator, {0: lie}))
    await circle.round()
    result = await audit(circle, 1, 0, 0)
    assert result.outcome == "false"
    return circle, result


async def test_evidence_convinces_somebody_who_was_not_there(network, tmp_path):
    circle, result = await caught_circle(network, tmp_path)
    found = result.found
    copied = parse_json(Evidence, dump_json(found.evidence))
    state = circle.seats[0].state
    stranger = Judge(RUN, Recomputer(state.fragments, RECIPE, list))
    assert stranger.judge(copied, found.payloads).culprit == circle.seats[0].peer_id
    assert stranger.needs(copied) == [len(payload) for payload in found.payloads]
    assert len(dump_json(found.evidence)) < 4096


def altered(document, payloads):
    """Forgeries of evidence: each differs from it in one thing."""
    finding = document["finding"]
    other = "0" * 64

    def put(**changes):
        return {"finding": {**finding, **changes}}, payloads

    sitting, inputs, output = finding["sitting"], finding["inputs"], finding["output"]
    ids = [member["peer_id"] for member in sitting["members"]]
    yield "another reducer", put(reducer=ids[ids.index(finding["reducer"]) - 1])
    yield "another slice", put(slice_index=1)
    yield "another run", put(sitting={**sitting, "run_id": other})
    yield "another weight", put(
        sitting={**sitting, "members": [{**sitting["members"][0], "tokens": 7}, *sitting["members"][1:]]}
    )
    yield "another input", put(inputs=[{**inputs[0], "leaf": other}, *inputs[1:]])
    yield "another output", put(output={**output, "leaf": other})
    yield "another signature of an input", put(inputs=[{**one, "signature": "0" * 128} for one in inputs])
    yield "no signature", put(output={**output, "signature": None})
    yield "inputs missing", put(inputs=inputs[:2])
    yield "a longer path", put(output={**output, "path": [*output["path"], other]})
    yield "no path", put(output={**output, "path": []})
    yield "a slice that is none", put(slice_index=50)
    yield "another payload", (document, [bytes(len(payload)) for payload in payloads])
    yield "a payload missing", (document, payloads[:-1])
    yield "no payloads", (document, None)


async def test_evidence_that_is_altered_shows_nothing(network, tmp_path):
    circle, result = await caught_circle(network, tmp_path)
    judge = circle.seats[2].guard._judge
    document = result.found.evidence.model_dump(mode="json")
    for name, (forged, payloads) in altered(document, result.found.payloads):
        with pytest.raises(NoEvidenceError):
            assert judge.judge(Evidence.model_validate(forged), payloads) is None, name


async def test_true_statements_about_an_honest_reducer_convict_nobody(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    for index in range(2):
        seat, reducer = circle.seats[1], circle.seats[0].peer_id
        reduction, payloads = await seat.guard._auditor._slice_inputs(heard(circle, 1), reducer, index)
        with pytest.raises(NoEvidenceError, match="the reduction is right"):
            seat.guard._judge.judge(Evidence(finding=reduction), payloads)


async def test_a_verdict_bans_for_good_and_spreads_to_whoever_verifies_it(network, tmp_path):
    circle, result = await caught_circle(network, tmp_path, count=4)
    culprit, records = circle.seats[0].peer_id, []
    circle.seats[2].on_ban = lambda *record: records.append(record)
    await circle.seats[1].guard.take(result)
    await until(lambda: bool(records) and all(seat.guard.banned(culprit) for seat in circle.seats[1:]), 30.0)
    assert not circle.seats[0].guard.banned(culprit)
    assert records[0][0] == culprit
    assert "reduced falsely, in round 1, slice 0" in records[0][1]
    assert "false" in circle.seats[1].guard.notes()[0]
    again = type(circle.seats[2].guard.bans)(tmp_path / "2")
    assert list(again) == [culprit]
    assert all(seat.guard.strikes.refuses(other.peer_id) is False for seat in circle.seats for other in circle.seats)


async def test_false_evidence_counts_against_who_offers_it(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    byzantine, honest, victim = circle.seats
    reduction, payloads = await byzantine.guard._auditor._slice_inputs(heard(circle, 0), victim.peer_id, 0)
    bans = byzantine.guard.bans
    await asyncio.to_thread(
        bans.add, type("V", (), {"culprit": victim.peer_id, "offence": "x"})(), Evidence(finding=reduction), payloads
    )
    for _ in range(3):
        byzantine.guard._evidence_gossip._told.clear()
        await byzantine.guard._evidence_gossip.tell([honest.peer_id], [victim.peer_id])
    assert not honest.guard.banned(victim.peer_id)
    assert honest.guard.strikes.refuses(byzantine.peer_id)


async def test_a_round_is_audited_after_its_commit_and_the_byzantine_member_is_banned_by_all(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    culprit = circle.seats[0].peer_id
    lies(circle, 0, Tampering(RECIPE.aggregator, dict.fromkeys(range(100), "one value")))
    drawn = iter([(culprit, 0)])
    circle.seats[1].guard._auditor.draw = lambda _: next(drawn, None)
    await circle.round()
    await until(lambda: all(seat.guard.banned(culprit) for seat in circle.seats[1:]), 30.0)


async def test_a_reducer_shows_its_shard_to_members_that_commit_before_it_has_theirs(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    work, audited = circle.seats[0].exchange._strategy, asyncio.Event()
    hear = work.hear

    async def late(buffers):
        await audited.wait()
        return await hear(buffers)

    work.hear = late
    round = asyncio.ensure_future(circle.round())
    await until(lambda: heard(circle, 1) is not None, 30.0)
    assert heard(circle, 0) is None
    assert [(await audit(circle, 1, 0, index)).outcome for index in range(2)] == ["right", "right"]
    audited.set()
    await round


@pytest.mark.parametrize(("count", "share"), [(2, 0.5), (4, 0.25)])
async def test_a_group_draws_one_audit_in_a_round_and_every_slice_alike(network, tmp_path, count, share):
    circle = await Circle(network, count, numel=4096, elements=256, folder=tmp_path).start()
    await circle.round()
    auditor = circle.seats[0].guard._auditor
    auditor._rng = random.Random(11)
    drawn = [auditor.draw(heard(circle, 0)) for _ in range(8000)]
    assert sum(pair is not None for pair in drawn) / 8000 == pytest.approx(share, rel=0.05)
    counts = Counter(pair for pair in drawn if pair is not None)
    assert {reducer for reducer, _ in counts} == {seat.peer_id for seat in circle.seats[1:]}
    expected = sum(counts.values()) / len(counts)
    assert all(0.6 * expected < seen < 1.4 * expected for seen in counts.values())


async def test_audits_of_one_peer_are_limited_and_strangers_see_nothing(network, tmp_path):
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    outcomes = [(await audit(circle, 1, 0, 0)).outcome for _ in range(ASKS_OF_ONE + 2)]
    assert outcomes == ["right"] * ASKS_OF_ONE + ["not shown"] * 2
    stranger = network.node()
    for what in ("slice", "signed", "joins"):
        stream = await stranger.open(circle.seats[0].peer_id, audit_name(RUN), "audit")
        await stream.send_message(Kind.REQUEST, AuditRequest(what=what, of=heard(circle, 1).sitting.id.hex()))
        shown = dict.fromkeys((Kind.EVIDENCE, Kind.DATA, Kind.ROSTER), 0)  # anything would be too much
        with contextlib.suppress(StreamClosedError):
            kind, _ = await asyncio.wait_for(stream.receive({**shown, Kind.END: 0}), 5.0)
            assert kind is Kind.END
        stream.close()


async def test_what_was_kept_for_audits_is_freed_when_the_next_exchange_begins(network, tmp_path, monkeypatch):
    monkeypatch.setattr("peer.swarm.trust.audit_server.KEPT_BYTES", 0)
    circle = await Circle(network, 2, numel=2048, elements=512, folder=tmp_path).start()
    await circle.round()
    (last,) = circle.seats[0].guard._audit_server._kept.values()
    kept = weakref.ref(last)
    assert last.nbytes == circle.seats[0].state.wire.codec.wire_bytes(2048)
    del last
    await circle.round()
    await until(lambda: gc.collect() >= 0 and kept() is None, 30.0)


@pytest.mark.parametrize(("nbytes", "turns"), [(1, 3), (600, 2), (1 << 22, 1)])
async def test_payloads_for_an_auditor_go_out_as_many_bytes_to_a_turn(network, tmp_path, monkeypatch, nbytes, turns):
    monkeypatch.setattr("peer.swarm.trust.audit_server.TURN_BYTES", nbytes)
    circle = await Circle(network, 3, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    for name in ("SMALL_BYTES", "WRITE_BYTES"):
        monkeypatch.setattr(f"peer.swarm.net.stream.{name}", 100)
    priority, taken, waited = circle.seats[0].guard._audit_server._priority, [], []

    async def wait():
        waited.append(len(taken))

    @contextlib.asynccontextmanager
    async def turn():
        taken.append(1)
        yield IoSlot(wait=wait)

    monkeypatch.setattr(priority, "turn", turn)
    assert (await audit(circle, 1, 0, 0)).outcome == "right"
    assert len(taken) == turns
    (kept,) = circle.seats[0].guard._audit_server._kept.values()
    assert len(waited) == sum(math.ceil(len(payload) / 100) - 1 for payload in kept.payloads_of(0)) > 0


async def test_small_exchanges_can_be_audited_after_the_next_have_begun(network, tmp_path, monkeypatch):
    circle = await Circle(network, 2, numel=2048, elements=512, folder=tmp_path).start()
    size = circle.seats[0].state.wire.codec.wire_bytes(2048)
    monkeypatch.setattr("peer.swarm.trust.audit_server.KEPT_BYTES", 2 * size)
    past = []
    for _ in range(4):
        await circle.round()
        past.append(heard(circle, 1))
    reducer, auditor = circle.seats[0], circle.seats[1].guard._auditor
    outcomes = [(await auditor.audit(one, reducer.peer_id, 0)).outcome for one in past]
    assert outcomes == ["not shown", "right", "right", "right"]  # the last one, and two before it


async def test_a_reducer_that_does_not_answer_is_refused_after_three_audits_and_never_banned(network, tmp_path):
    circle = await Circle(network, 2, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    silent, one = circle.seats
    silent.guard._audit_server.free()
    for _ in range(3):
        assert not one.guard.refuses(silent.peer_id)
        await one.guard.take(await audit(circle, 1, 0, 0))
    assert one.guard.refuses(silent.peer_id)
    assert not one.guard.banned(silent.peer_id)
    assert "not shown" in one.guard.notes()[-1]


async def test_members_that_do_not_read_what_they_asked_for_take_no_place_of_another(network, tmp_path):
    """Else two of them made an honest reducer look as if it did not answer."""
    circle = await Circle(network, 6, numel=3000, elements=512, folder=tmp_path).start()
    await circle.round()
    reducer, _, *greedy = circle.seats
    unread = asyncio.Event()

    async def show(stream, request):
        if stream.remote in {seat.peer_id for seat in greedy}:
            unread.set()
            await asyncio.Event().wait()
        await shown(stream, request)

    server = reducer.guard._audit_server
    shown, server._show = server._show, show
    for seat in greedy:
        for _ in range(ASKS_OF_ONE):
            stream = await seat.node.open(reducer.peer_id, audit_name(RUN), "audit")
            request = AuditRequest(what="slice", of=heard(circle, 1).sitting.id.hex(), slice_index=0)
            await stream.send_message(Kind.REQUEST, request)
    await asyncio.wait_for(unread.wait(), 5.0)
    assert (await audit(circle, 1, 0, 0)).outcome == "right"
