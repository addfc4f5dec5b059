from __future__ import annotations

import asyncio

import pytest
from blake3 import blake3

from peer.errors import ProtocolError
from peer.outer.state.outer_state import CHUNK
from peer.outer.state.reduced_update import Update
from peer.protocol.identity import Identity
from peer.protocol.wire import Kind
from peer.swarm.catchup.chunk_download import CatchUpError
from peer.swarm.catchup.history_server import history_name
from peer.swarm.net.stream import StreamClosedError
from tests.outer.reference import reduced
from tests.swarm.donor import Joiner, NotFollowedError, ScriptedDonor, assert_same
from tests.swarm.runs import NUMEL, RUN, Run, contributions


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "donor").commit(3)


@pytest.fixture
async def donor(network, run):
    return await ScriptedDonor(network.node(), run).start()


@pytest.fixture
def joiner(network, tmp_path):
    return Joiner(network, tmp_path / "joiner")


async def test_missed_updates_are_replayed_bit_for_bit(run, donor, joiner):
    how = await joiner.catch_up(donor)
    assert (how.donor, how.replayed, how.snapshot_round) == (donor.peer_id, 3, None)
    assert donor.asked == ["chain", "update", "update", "update"]
    assert_same(joiner, run)


async def test_a_peer_without_a_valid_state_takes_a_snapshot(run, donor, joiner):
    joiner.valid = False
    joiner.state.anchor.fill_(7.0)
    how = await joiner.catch_up(donor)
    assert (how.replayed, how.snapshot_round) == (0, 3)
    assert_same(joiner, run)


async def test_a_snapshot_and_the_way_for_its_chunks_are_asked_for_at_once(run, donor, joiner):
    joiner.valid, streams, all_open = False, [], asyncio.Event()

    async def answer(stream, ask=donor._answer):
        streams.append(stream)
        if len(streams) == 3:
            all_open.set()
        if len(streams) > 1:  # the chain came first: it is judged before a state is fetched
            await asyncio.wait_for(all_open.wait(), 5.0)
        await ask(stream)

    await donor.node.serve(history_name(RUN), "history", answer)
    await joiner.catch_up(donor)
    assert_same(joiner, run)


async def test_rounds_that_were_committed_before_the_snapshot_was_written_are_asked_for(run, donor, joiner):
    whole, joiner.valid = donor.chain, False
    donor.chain = whole[:2]

    async def answer(stream, ask=donor._answer):
        await ask(stream)
        donor.chain = whole

    await donor.node.serve(history_name(RUN), "history", answer)
    await joiner.catch_up(donor)
    assert donor.asked.count("chain") == 2
    assert_same(joiner, run)


async def test_forged_links_that_a_donor_shows_with_its_snapshot_lead_to_no_state(run, donor, joiner, tmp_path):
    forged = run.fork(tmp_path / "forged", [Identity.generate() for _ in range(16)]).commit(1)
    byzantine, joiner.valid = ScriptedDonor(donor.node, forged), False
    byzantine.chain = run.history.chain

    async def answer(stream, ask=byzantine._answer):
        await ask(stream)
        byzantine.chain = forged.history.chain

    await donor.node.serve(history_name(RUN), "history", answer)
    await joiner.refuses(byzantine, CatchUpError, match="round 4 .* is signed by few of those who were there")


async def test_a_forged_link_proves_no_state_of_the_true_round_before_it(network, run, joiner, tmp_path):
    forged = run.fork(tmp_path / "forged", [Identity.generate() for _ in range(16)])
    forged.state.anchor.add_(1.0)  # what the forged link names
    byzantine, joiner.valid = await ScriptedDonor(network.node(), forged).start(), False
    byzantine.chain = forged.commit(1).history.chain
    members = [await ScriptedDonor(network.node(identity), run).start() for identity in run.identities]
    with pytest.raises(CatchUpError, match="serves another state than"):
        await joiner.catch_up(byzantine, *members)
    assert joiner.adopted == 0


async def test_a_chain_that_goes_on_after_the_snapshot_is_cut_where_that_stands(run, donor, joiner):
    joiner.valid, digest = False, run.state.digest()
    donor.chain = run.commit(1).history.chain
    assert (await joiner.catch_up(donor)).snapshot_round == 3
    assert (joiner.state.digest(), joiner.state.round) == (digest, 3)
    assert joiner.history.chain == run.history.chain[:3]


async def test_a_donor_that_dropped_old_updates_gives_a_snapshot(run, donor, joiner):
    donor.updates.clear()
    assert (await joiner.catch_up(donor)).snapshot_round == 3
    assert_same(joiner, run)


def sides(tmp_path, run):
    """Two branches of a run: one of its members alone with a newcomer, and further; the other two."""
    one, *others = run.identities
    alone = run.fork(tmp_path / "alone", [one, Identity.generate()]).commit(5, seed=9, tokens=1000)
    return alone, run.fork(tmp_path / "others", others).commit(2)


def joiner_on(network, tmp_path, side):
    joiner = Joiner(network, tmp_path / "joiner")
    joiner.stand_on(side)
    return joiner


async def test_a_peer_leaves_its_branch_where_more_of_the_established_are_on_another(network, tmp_path, run):
    alone, others = sides(tmp_path, run)
    donor, joiner = await ScriptedDonor(network.node(), others).start(), joiner_on(network, tmp_path, alone)
    assert (await joiner.catch_up(donor)).snapshot_round == 5
    assert_same(joiner, others)


async def test_a_donor_whose_branch_fewer_signed_is_not_byzantine(network, tmp_path, run):
    alone, others = sides(tmp_path, run)
    donor, joiner = await ScriptedDonor(network.node(), alone).start(), joiner_on(network, tmp_path, others)
    await joiner.refuses(donor, NotFollowedError, "not followed")
    assert joiner.accused == {}
    stranger = Run(tmp_path / "forged").commit(30, tokens=2**30)
    await joiner.refuses(await ScriptedDonor(network.node(), stranger).start(), NotFollowedError)


async def test_an_update_with_another_digest(donor, joiner):
    first = next(iter(donor.updates))
    donor.updates[first] = donor.updates[first][:-1] + b"\x01"
    await joiner.refuses(donor, CatchUpError, "another digest than round 0's")


async def test_an_update_that_is_too_long_is_cut_off(donor, joiner):
    first = next(iter(donor.updates))
    donor.updates[first] = bytes(1_000_000)
    await joiner.refuses(donor, CatchUpError, "more than 1016 bytes")


async def test_a_certified_update_that_is_malformed(network, tmp_path, joiner):
    run = Run(tmp_path / "bad")
    update = reduced(run.state, contributions(run.state, 3, 1), [1, 1, 1])
    garbage = b"\xff" * len(update.payload)
    donor = await _one_lying_round(network, run, update, garbage)
    await joiner.refuses(donor, ProtocolError, "scale")


async def test_a_certified_update_that_overflows(network, tmp_path, joiner):
    run = Run(tmp_path / "bad")
    largest = b"\x03\x02\x01\x7c"
    bounds = Update((bytes(1016),), NUMEL, run.state.wire.codec).bounds
    payload = largest * 4 + b"\x81" * (bounds[0][1])
    update = reduced(run.state, contributions(run.state, 1, 1), [1])
    run.identities = run.identities[:1]
    donor = await _one_lying_round(network, run, update, payload)
    await joiner.refuses(donor, CatchUpError, r"may reach 3.4e\+38: more than 2.8e\+14 is not applied")


async def _one_lying_round(network, run, update, payload, **lies):
    lies = {"update_digest": blake3(payload).hexdigest(), **lies}
    certificate = run.certify(update, **lies)
    run.history.append(certificate)
    run.history.keep_update(payload)
    return await ScriptedDonor(network.node(), run).start()


@pytest.mark.parametrize("valid", [True, False])
async def test_a_chain_signed_by_strangers(run, donor, joiner, valid):
    strangers = [Identity.generate() for _ in range(3)]
    link = donor.chain[1].link
    forged = {peer: i.sign("vote", bytes.fromhex(link.id)).hex() for peer, i in zip(_ids(run), strangers, strict=True)}
    donor.chain[1] = donor.chain[1].model_copy(update={"signatures": forged})
    joiner.valid = valid
    await joiner.refuses(donor, ProtocolError, "round 1 has no valid signature of")


def _ids(run):
    return [identity.peer_id for identity in run.identities]


async def test_a_chain_with_a_missing_link(donor, joiner):
    del donor.chain[1]
    await joiner.refuses(donor, ProtocolError, "does not follow")


async def test_a_claim_that_the_chain_does_not_prove(donor, joiner):
    joiner.valid = False
    donor.meta = donor.meta.model_copy(update={"lineage_id": "f" * 64})
    await joiner.refuses(donor, CatchUpError, "does not lead to its snapshot")
    donor.chain.clear()
    await joiner.refuses(donor, ProtocolError, "does not reach round 1")


async def test_a_donor_without_a_snapshot(donor, joiner):
    donor.meta, joiner.valid = None, False
    await joiner.refuses(donor, CatchUpError, "has no snapshot")


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
async def test_a_snapshot_with_one_flipped_bit_in_any_chunk(network, tmp_path, chunk):
    run = Run(tmp_path / "donor", numel=CHUNK + 512).commit(1)
    donor = await ScriptedDonor(network.node(), run).start()
    joiner = Joiner(network, tmp_path / "joiner", numel=CHUNK + 512)
    joiner.valid = False
    piece = bytearray(donor.pieces[chunk])
    piece[len(piece) // 2] ^= 1
    donor.pieces[chunk] = bytes(piece)
    await joiner.refuses(donor, CatchUpError, "damaged chunk")


DAMAGE = {
    "digests": "damaged chunk",
    "fewer digests": "1 chunk digests; must be 2",
    "short chunk": "damaged chunk",
    "fewer chunks": "has 1 chunks; this run has 2",
    "numel": "has 1001 parameters; this run has 1000",
    "buffers": "has 1000 parameters",
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_other_damaged_snapshots(donor, joiner, damage):
    joiner.valid = False
    if damage == "digests":
        donor.digests[0] = bytes(32)
    elif damage == "fewer digests":
        donor.digests.pop()
    elif damage == "short chunk":
        donor.pieces[0] = donor.pieces[0][:-4]
    elif damage == "fewer chunks":
        donor.meta = donor.meta.model_copy(update={"num_chunks": 1})
    else:
        more = {"numel": {"fragments": (1001,)}, "buffers": {"num_buffers": donor.meta.num_buffers + 1}}[damage]
        donor.meta = donor.meta.model_copy(update=more)
    await joiner.refuses(donor, ProtocolError, DAMAGE[damage])


async def test_a_silent_donor_is_given_up(donor, joiner, network):
    network.retime(frame_timeout_s=0.05)

    async def silence(stream):
        await stream.receive({Kind.REQUEST: 1000})
        await stream.closed()

    await donor.node.serve(history_name(RUN), "history", silence)
    await joiner.refuses(donor, StreamClosedError, "sent nothing for 0.05 s")
    network.cut(donor.peer_id)
    await joiner.refuses(donor, StreamClosedError, "cannot be reached")


async def test_a_donor_that_is_writing_its_snapshot_is_waited_for_but_not_for_ever(network, run, donor, joiner):
    joiner.valid, donor.writing = False, 3
    assert (await joiner.catch_up(donor)).snapshot_round == run.state.round
    assert_same(joiner, run)
    network.retime(writing_s=-1.0)
    with pytest.raises(StreamClosedError, match="has been writing its snapshot for -1 s"):
        await joiner.catch_up(donor)


async def test_the_genesis_state_comes_from_any_donor_that_still_has_it(network, tmp_path):
    run = Run(tmp_path / "donor")
    donor = await ScriptedDonor(network.node(), run).start()
    joiner = Joiner(network, tmp_path / "joiner")
    joiner.state.anchor.fill_(1.0)
    await joiner.fetcher.genesis(donor.peer_id, joiner.local_state(), joiner.adopt)
    assert_same(joiner, run)
    donor.pieces[0] = bytes(len(donor.pieces[0]))
    with pytest.raises(CatchUpError, match="damaged chunk"):
        await joiner.fetcher.genesis(donor.peer_id, joiner.local_state(), joiner.adopt)
    donor.meta = donor.meta.model_copy(update={"round": 2})
    with pytest.raises(CatchUpError, match="holds round 2, not the genesis"):
        await joiner.fetcher.genesis(donor.peer_id, joiner.local_state(), joiner.adopt)
