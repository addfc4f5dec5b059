from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from peer.outer.state.outer_state import CHUNK, state_digest
from peer.protocol.lineage import check_chain
from peer.swarm.state import chain as history_module
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_file import SnapshotFile, chunk_lengths, load_snapshot
from tests.chain_files import read_chain
from tests.outer.reference import reduced
from tests.swarm.runs import NUMEL, RUN, TOKENS, Run, contributions, make_state


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "history")


def test_what_is_appended_is_on_disk_and_verifies(run):
    run.commit(3)
    chain = read_chain(run.history.chain_path)
    assert chain == run.history.chain
    check_chain(chain, RUN, run.history.genesis, 0)
    assert [certificate.link.state_digest for certificate in chain] == run.states[:-1]
    assert run.history.weight == 3 * 3 * TOKENS
    assert set(run.history.seen.values()) == {3}
    assert set(run.history.seen) == {member.peer_id for member in chain[0].link.roster}
    for certificate in chain:
        path = run.history.update(certificate.link.update_digest)
        assert blake3(path.read_bytes()).hexdigest() == certificate.link.update_digest
    assert run.history.update("f" * 64) is None


def test_a_chain_loads_up_to_the_state_that_is_there(run, tmp_path):
    run.commit(4)
    for rounds in range(5):
        lineage_id = run.history.chain[rounds - 1].link.id if rounds else run.history.genesis
        other = ChainStore(tmp_path / f"other{rounds}", run.history.genesis)
        assert other.load(run.history.chain_path, lineage_id)
        assert other.chain == run.history.chain[:rounds]
        assert set(other.seen.values()) == ({rounds} if rounds else set())
        assert read_chain(other.chain_path) == other.chain


def test_rounds_beyond_the_state_are_kept_with_their_updates_where_the_folder_is_this_peers(run, tmp_path):
    run.commit(4)
    chain = list(run.history.chain)
    resumed = ChainStore(run.history.folder, run.history.genesis)
    assert resumed.load(resumed.chain_path, chain[1].link.id)
    assert resumed.chain == chain[:2] == read_chain(resumed.chain_path)
    assert resumed.beyond == chain[2:]
    assert all(resumed.whole_update(one.link.update_digest) for one in chain)

    resumed.beyond = ()  # they were made again, or cannot be
    resumed.replace(resumed.chain)
    assert [one for one in chain if resumed.update(one.link.update_digest)] == chain[:2]

    stranger = ChainStore(tmp_path / "other", run.history.genesis)
    assert stranger.load(run.history.chain_path, chain[1].link.id)
    assert stranger.beyond == ()


def test_a_chain_that_does_not_lead_there_is_not_loaded(run, tmp_path):
    run.commit(2)
    other = ChainStore(tmp_path / "other", run.history.genesis)
    assert not other.load(run.history.chain_path, "f" * 64)
    assert not other.load(tmp_path / "missing.jsonl", "f" * 64)
    assert other.load(tmp_path / "missing.jsonl", run.history.genesis)
    assert other.chain == []


def test_a_torn_last_line_costs_that_line_at_every_offset(run, caplog):
    run.commit(2)
    path, whole = run.history.chain_path, run.history.chain
    content = path.read_bytes()
    first, again = content.index(b"\n") + 1, ChainStore(path.parent, run.history.genesis)
    for length in (*range(first, len(content) - 1, 7), first - 1):
        path.write_bytes(content[:length])
        again.load_all()
        assert again.chain == whole[:1]
        assert path.read_bytes() == content[:first]
    assert "ignoring what follows round 1" in caplog.text
    path.write_bytes(b"\xff\n" + content)
    again.load_all()
    assert again.chain == []


def test_rounds_go_on_after_a_torn_line(run):
    run.commit(2)
    path = run.history.chain_path
    path.write_bytes(path.read_bytes()[:-20])
    again = ChainStore(path.parent, run.history.genesis)
    lineage_id = run.history.chain[0].link.id
    assert again.load(path, lineage_id)
    again.append(run.history.chain[1])
    assert read_chain(path) == run.history.chain


def damage(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x00")


def test_updates_that_were_torn_by_a_loss_of_power_are_not_served(run, caplog):
    run.commit(4)
    digests = [certificate.link.update_digest for certificate in run.history.chain]
    damage(run.history.update(digests[1]))
    run.history.update(digests[3]).write_bytes(b"")
    again = ChainStore(run.history.folder, run.history.genesis)
    assert again.load(again.chain_path, run.history.chain[-1].link.id)
    assert again.chain == run.history.chain
    for _ in range(2):
        assert [again.whole_update(digest) is not None for digest in digests] == [True, False, True, False]
    assert caplog.text.count("is damaged and is not served any more") == 2
    assert again.update(digests[1]) is None


def test_what_this_process_has_written_or_read_is_not_read_again(run):
    run.commit()
    digest = run.history.chain[-1].link.update_digest
    again = ChainStore(run.history.folder, run.history.genesis)
    assert again.load(again.chain_path, run.history.chain[-1].link.id)
    assert again.whole_update(digest) == again.update(digest)
    damage(again.update(digest))
    assert [history.whole_update(digest) is not None for history in (again, run.history)] == [True, True]
    again.replace([])
    assert again.whole_update(digest) is None


def updates_on_disk(history):
    return {path.name for path in history.folder.glob("update-*")}


def test_what_was_half_written_in_a_crash_is_removed(run):
    run.commit(2)
    half = [run.history.folder / name for name in (f"update-{'f' * 64}.tmp", "chain.tmp")]
    for path in half:
        path.write_bytes(b"half")
    again = ChainStore(run.history.folder, run.history.genesis)
    assert again.load(again.chain_path, run.history.chain[-1].link.id)
    assert updates_on_disk(again) == names(run.history.chain)
    assert not any(path.exists() for path in half)


def names(chain):
    return {f"update-{certificate.link.update_digest}.bin" for certificate in chain}


def test_the_newest_updates_are_kept_and_no_others(run, monkeypatch):
    monkeypatch.setattr(history_module, "KEPT_UPDATES", 4)
    for rounds in range(1, 8):
        run.commit()
        assert updates_on_disk(run.history) == names(run.history.chain[-4:])
        assert len(run.history.chain) == rounds


def test_an_update_that_two_rounds_share_stays_while_the_newer_is_kept(run, monkeypatch):
    monkeypatch.setattr(history_module, "KEPT_UPDATES", 2)
    twice, once = (reduced(run.state, contributions(run.state, 3, seed), [1, 1, 1]) for seed in (1, 2))
    for update in (twice, once, twice):
        run.history.append(run.certify(update))
        run.history.keep_update(update.payload)
    assert updates_on_disk(run.history) == names(run.history.chain)
    assert run.history.update(twice.digest()).read_bytes() == twice.payload


def test_another_chain_replaces_the_updates_of_the_one_that_was_left(run):
    run.commit(3)
    run.history.replace(run.history.chain[:2])
    assert updates_on_disk(run.history) == names(run.history.chain)
    assert len(read_chain(run.history.chain_path)) == 2
    run.history.replace([])
    assert updates_on_disk(run.history) == set()
    assert run.history.weight == 0


@pytest.mark.parametrize("numel", [NUMEL, CHUNK, CHUNK + 3])
def test_a_snapshot_file_survives_with_its_digests(numel, tmp_path):
    state = make_state(numel)
    state.buffers[0].copy_(torch.cos(torch.arange(numel, dtype=torch.float32)))
    snapshot = SnapshotFile.write(tmp_path / "snapshot.bin", state)
    assert snapshot.path.stat().st_size == 8 * numel == sum(chunk_lengths(snapshot.meta))
    num_chunks = 2 * -(-numel // CHUNK)
    assert snapshot.meta.num_chunks == len(snapshot.digests) == len(chunk_lengths(snapshot.meta)) == num_chunks
    assert state_digest(snapshot.digests, [numel], 1) == state.digest()
    content, position = snapshot.path.read_bytes(), 0
    for length, digest in zip(chunk_lengths(snapshot.meta), snapshot.digests, strict=True):
        assert blake3(content[position : position + length]).digest() == digest
        position += length
    other = make_state(numel)
    other.anchor.zero_()
    anchor = other.anchor
    load_snapshot(snapshot.path, other)
    assert other.digest() == state.digest()
    assert anchor.data_ptr() == other.anchor.data_ptr()  # in place: it lies in shared memory
    assert list(tmp_path.iterdir()) == [snapshot.path]
