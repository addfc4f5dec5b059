"""What a claim of another chain may cost: links, time, and how far back it may leave a peer's own."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from types import SimpleNamespace

import pytest

from peer.errors import ProtocolError
from peer.protocol.checkpoints import Checkpoint, seal_checkpoint
from peer.protocol.fork_choice import ForkVerdict
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json
from peer.protocol.wire import HistoryRequest, Kind
from peer.swarm.catchup import chain_scout
from peer.swarm.catchup.chain_scout import NoRoomError, NothingNewError
from peer.swarm.catchup.checkpoint_exchange import CheckpointExchange
from peer.swarm.catchup.history_server import history_name
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.state import certificate_file
from tests.swarm.donor import Joiner, ScriptedDonor
from tests.swarm.runs import RUN, Run


@pytest.fixture
def joiner(network, tmp_path):
    """A peer that has made three rounds with others."""
    joiner = Joiner(network, tmp_path / "joiner")
    joiner.stand_on(Run(tmp_path / "run").commit(3))
    return joiner


async def forger(network, folder, rounds):
    """Who serves a chain of made-up keys from genesis."""
    return await ScriptedDonor(network.node(), Run(folder / "forged", members=4).commit(rounds)).start()


async def test_a_donor_that_drips_links_is_left_when_its_time_is_over(network, joiner, tmp_path):
    network.retime(claim_s=0.3)
    donor = await forger(network, tmp_path, 30)
    sent = []

    async def drip(stream):
        await stream.receive_message(Kind.REQUEST, HistoryRequest)
        for certificate in donor.chain:
            sent.append(certificate)
            await stream.send(Kind.DATA, dump_json(certificate))
            await asyncio.sleep(0.1)

    await donor.node.serve(history_name(RUN), "history", drip)
    with pytest.raises(StreamClosedError, match=r"sent [0-9]+ links in 0.3 s and more"):
        await joiner.scout.look(donor.peer_id, 30)
    assert len(sent) < 10  # each true link buys a fiftieth of a second, and this one takes a tenth


async def test_of_another_branch_no_more_links_are_read_than_show_who_signs_it(
    network, joiner, tmp_path, monkeypatch
):
    monkeypatch.setattr(chain_scout, "LINKS_PER_REQUEST", 4)
    monkeypatch.setattr(chain_scout, "MOST_LINKS", 8)
    donor = await forger(network, tmp_path, 30)
    chain = await joiner.scout.look(donor.peer_id, 30)
    assert len(chain) == 8
    assert joiner.scout.judge(joiner.scout.carried(chain)) is ForkVerdict.KEEP


async def test_a_newcomer_reads_a_long_chain_into_a_file_that_nobody_sees(network, tmp_path, monkeypatch):
    monkeypatch.setattr(chain_scout, "LINKS_PER_REQUEST", 7)
    monkeypatch.setattr(certificate_file, "NEWEST", 5)
    newcomer, donor = Joiner(network, tmp_path / "newcomer"), await forger(network, tmp_path, 30)
    before = sorted((tmp_path / "newcomer").rglob("*"))
    chain = await newcomer.scout.look(donor.peer_id, 30)
    assert chain == donor.chain
    assert (len(chain.file._newest), chain.tail) == (5, ())
    assert sorted((tmp_path / "newcomer").rglob("*")) == before
    descriptor = chain.file._descriptor
    assert newcomer.scout.judge(newcomer.scout.carried(chain)) is ForkVerdict.FOLLOW
    newcomer.history.replace(chain)
    del chain
    gc.collect()
    assert newcomer.history.chain == donor.chain
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


async def test_a_newcomer_without_room_for_a_chain_says_so(network, tmp_path, monkeypatch):
    newcomer, donor = Joiner(network, tmp_path / "newcomer"), await forger(network, tmp_path, 30)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(NoRoomError, match=r"no room for the chain of .* in .*newcomer: No space left on device; free"):
        await newcomer.scout.look(donor.peer_id, 30)


async def test_a_chain_that_leaves_before_the_checkpoint_is_refused_after_one_look(network, joiner, tmp_path):
    organiser, own = Identity.generate(), joiner.history.chain
    joiner.scout._checkpoints = NewestCheckpoint(tmp_path, RUN, (organiser.peer_id,))
    place = Checkpoint(run_id=RUN, round=2, lineage_id=own[1].link.id, serial=1, signed_at=1.0)
    joiner.scout._checkpoints.offer(seal_checkpoint(organiser, place))
    donor = await forger(network, tmp_path, 30)
    with pytest.raises(ProtocolError, match="leaves this one before round 3"):
        await joiner.scout.look(donor.peer_id, 30)


async def test_a_donor_that_stands_where_this_peer_does_is_no_liar(network, joiner, tmp_path):
    organiser, own = Identity.generate(), joiner.history.chain
    joiner.scout._checkpoints = NewestCheckpoint(tmp_path, RUN, (organiser.peer_id,))
    place = Checkpoint(run_id=RUN, round=3, lineage_id=own[2].link.id, serial=1, signed_at=1.0)
    joiner.scout._checkpoints.offer(seal_checkpoint(organiser, place))
    donor = await ScriptedDonor(network.node(), Run(tmp_path / "same").commit(3)).start()
    donor.chain = list(own)
    with pytest.raises(NothingNewError, match="does not reach round 4"):
        await joiner.scout.look(donor.peer_id, 3)


async def test_a_newcomer_reads_no_further_than_to_the_checkpoint_of_a_chain_that_misses_it(
    network, tmp_path, monkeypatch
):
    monkeypatch.setattr(chain_scout, "LINKS_PER_REQUEST", 4)
    run, organiser = Run(tmp_path / "run").commit(6), Identity.generate()
    joiner, donor = Joiner(network, tmp_path / "joiner"), await forger(network, tmp_path, 30)
    checkpoints = joiner.scout._checkpoints = NewestCheckpoint(tmp_path, RUN, (organiser.peer_id,))
    place = Checkpoint(run_id=RUN, round=6, lineage_id=run.state.lineage_id, serial=1, signed_at=1.0)
    checkpoints.offer(seal_checkpoint(organiser, place))
    asked, source = [], joiner.scout._source

    async def counted(peer_id, start, count):
        asked.append(start)
        return await source.links(peer_id, start, count)

    joiner.scout._source = SimpleNamespace(links=counted)
    with pytest.raises(ProtocolError, match="does not lead through the newest checkpoint"):
        await joiner.scout.look(donor.peer_id, 30)
    assert asked == [0, 4]


async def test_a_newcomer_that_takes_a_chain_reads_no_other_to_its_end(network, tmp_path, monkeypatch):
    monkeypatch.setattr(chain_scout, "LINKS_PER_REQUEST", 4)
    run = Run(tmp_path / "run").commit(3)
    joiner, donor = Joiner(network, tmp_path / "joiner"), await forger(network, tmp_path, 30)
    source = joiner.scout._source

    async def slow(peer_id, start, count):
        links = await source.links(peer_id, start, count)
        if start == 4:
            joiner.history.replace(run.history.chain)
        return links

    joiner.scout._source = SimpleNamespace(links=slow)
    chain = await joiner.scout.look(donor.peer_id, 30)
    assert len(chain) == 8
    assert joiner.scout.judge(joiner.scout.carried(chain)) is ForkVerdict.KEEP


async def test_without_a_checkpoint_a_newcomer_starts_where_its_introducer_stands(network, tmp_path):
    run = Run(tmp_path / "run").commit(3)
    joiner, introducer = Joiner(network, tmp_path / "joiner"), await ScriptedDonor(network.node(), run).start()
    heavier = await forger(network, tmp_path, 30)
    exchange = CheckpointExchange(network.node(), RUN, joiner.scout._checkpoints)
    await CheckpointExchange(introducer.node, RUN, NewestCheckpoint(tmp_path, RUN, ())).start()
    await exchange.introduce([introducer.peer_id], joiner.scout)
    assert joiner.scout.judge(await joiner.scout.look(heavier.peer_id, 30)) is ForkVerdict.KEEP
    assert joiner.scout.judge(await joiner.scout.look(introducer.peer_id, 3)) is ForkVerdict.FOLLOW


@pytest.mark.parametrize(("has_say", "busy", "pauses_s"), [(False, True, 1.8), (True, True, 0.0), (False, False, 0.0)])
async def test_the_links_of_a_stranger_leave_the_processor_to_the_rounds(
    network, joiner, tmp_path, monkeypatch, has_say, busy, pauses_s
):
    """Three looks at chains of 64 members made rounds fifteen times as long; a peer that comes back does not wait."""
    checked, pauses, sleep = [], [], asyncio.sleep
    monkeypatch.setattr(time, "thread_time", lambda: 0.05 * len(checked))
    monkeypatch.setattr(chain_scout, "check_chain", lambda *_: checked.append(1))
    monkeypatch.setattr(joiner.scout, "has_say", lambda _: has_say)
    joiner.scout.busy = lambda: busy

    async def pause(seconds):
        pauses.append(seconds)
        await sleep(0)

    donor = await forger(network, tmp_path, 4)
    monkeypatch.setattr(chain_scout.asyncio, "sleep", pause)
    await joiner.scout.look(donor.peer_id, 4)
    monkeypatch.setattr(chain_scout.asyncio, "sleep", sleep)
    assert len(checked) == 4
    assert sum(pauses) == pytest.approx(pauses_s)
