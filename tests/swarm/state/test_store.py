"""The outer state of a peer, its head and the digest that is computed while trainers go on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from peer.link.memory import Head
from peer.outer.numerics import offload
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.store import StateStore
from tests.outer.reference import reduced
from tests.swarm.played import genesis_memory, state_in
from tests.swarm.runs import Run, contributions


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


class Held:
    """A keeper whose state hashes only while `free` is set."""

    def __init__(self, run, folder):
        self.memory = genesis_memory()
        self.folder, self.genesis = folder, run.history.genesis
        self.free, self.hashed = threading.Event(), 0
        self.free.set()

    def store(self):
        state = state_in(self.memory)
        state.lineage_id, compute = self.genesis, state.digest

        def digest():
            assert self.free.wait(10.0)
            self.hashed += 1
            return compute()

        state.digest = digest
        return StateStore(self.memory, state, ChainStore(self.folder, self.genesis))


@pytest.fixture
def held(run, tmp_path):
    return Held(run, tmp_path / "kept")


def next_round(run):
    """An update of the run and its certificate; the run applies it."""
    update = reduced(run.state, contributions(run.state, 3, run.state.round), [1, 1, 1])
    certificate = run.certify(update)
    run.state.apply(update, run.state.round + 1, certificate.link.id)
    return update, certificate


async def test_a_round_ends_before_its_state_is_hashed_and_the_next_change_waits_for_that(run, held):
    store = held.store()
    store.restore([])
    held.free.clear()
    first, second = next_round(run), None
    await store.apply(*first, 5)
    lineage_id = first[1].link.id
    assert (store.valid, store.position.round, store.position.lineage_id) == (True, 1, lineage_id)
    assert held.memory.head == Head(round=1, lineage_id=lineage_id, contributed=5)
    second = next_round(run)
    applying = asyncio.ensure_future(store.apply(*second, 6))
    asking = asyncio.ensure_future(store.digest())
    await asyncio.sleep(0)
    await asyncio.wait([applying, asking], timeout=0.1)
    assert (store.state.round, applying.done(), asking.done()) == (1, False, False)
    held.free.set()
    await applying
    assert await asking == second[1].link.state_digest
    assert await store.digest() == run.state.digest()
    head = Head(round=2, lineage_id=second[1].link.id, state_digest=run.state.digest(), contributed=6)
    assert held.memory.head == head
    assert held.hashed == 3  # at the start, and once for each round, whoever asks


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "not hashed yet"])
async def test_an_agent_that_starts_anew_takes_up_a_state_that_was_whole(run, held, hashed):
    store = held.store()
    store.restore([])
    await store.apply(*next_round(run), 5)
    await store.digest()
    head = held.memory.head
    assert head.state_digest == run.state.digest()
    if not hashed:
        held.memory.head = head.model_copy(update={"state_digest": None})  # as the agent died
    again = held.store()
    taken = again.restore([again.history.chain_path])
    assert (taken.round, taken.lineage_id, taken.contributed) == (1, head.lineage_id, 5)
    assert (again.valid, await again.digest()) == (True, run.state.digest())
    assert held.memory.head == head  # as if it had been hashed then


async def test_a_state_that_is_not_what_its_head_says_is_not_taken_up(run, held, caplog):
    store = held.store()
    store.restore([])
    await store.apply(*next_round(run), 5)
    await store.digest()
    held.memory.anchor[3] += 1.0
    again = held.store()
    assert again.restore([again.history.chain_path]) is None
    assert not again.valid
    assert "the state of round 1 does not verify" in caplog.text


async def test_a_state_in_doubt_is_kept_from_everybody(run, held):
    store = held.store()
    store.restore([])
    await store.apply(*next_round(run), 5)
    position, served = store.position, await store.snapshot_cache.offer(None, 0)
    assert served is not None
    await store.doubt()
    assert (store.valid, store.memory.head, store.position) == (False, None, position)
    assert await store.snapshot_cache.offer(None, 0) is None
    assert await store.snapshot_cache.get(position.lineage_id) is None
    assert not served.path.exists()
    assert await store.snapshot_cache.digest(1, position.lineage_id) is None


async def test_an_update_is_served_once_it_is_in_its_file_and_the_next_step_waits_for_that(run, held):
    store = held.store()
    store.restore([])
    free, write = threading.Event(), store.history.keep_update

    def keep_update(*parts):
        assert free.wait(10.0)
        write(*parts)

    store.history.keep_update = keep_update
    first = next_round(run)
    await store.apply(*first, 1)
    assert (store.valid, store.position.round) == (True, 1)
    asking = asyncio.ensure_future(store.snapshot_cache.update(first[1].link.update_digest))
    second = next_round(run)
    applying = asyncio.ensure_future(store.apply(*second, 2))
    await asyncio.wait([asking, applying], timeout=0.1)
    assert (asking.done(), applying.done(), store.state.round) == (False, False, 1)
    free.set()
    assert (await asking).read_bytes() == first[0].payload
    await applying
    assert store.state.round == 2
    assert await store.snapshot_cache.update("f" * 64) is None


async def test_an_update_whose_link_is_on_the_chain_is_served_once_its_step_is_taken(run, held, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 0)
    store = held.store()
    store.restore([])
    begun, free, step = threading.Event(), threading.Event(), store.state.apply

    def apply(*arguments):
        begun.set()
        assert free.wait(10.0)
        step(*arguments)

    store.state.apply = apply
    update, certificate = next_round(run)
    applying = asyncio.ensure_future(store.apply(update, certificate, 1))
    await asyncio.to_thread(begun.wait, 10.0)
    assert [certificate.link.id] == [one.link.id for one in store.history.chain]
    asking = asyncio.ensure_future(store.snapshot_cache.update(certificate.link.update_digest))
    await asyncio.wait([asking], timeout=0.1)
    assert not asking.done()
    free.set()
    assert (await asking).read_bytes() == update.payload
    await applying


async def test_a_full_disk_costs_those_who_catch_up_an_update_and_no_round(run, held, caplog):
    store = held.store()
    store.restore([])

    def full(*_):
        raise OSError(28, "No space left on device")

    store.history.keep_update = full
    first, second = next_round(run), next_round(run)
    await store.apply(*first, 1)
    await store.apply(*second, 2)
    await store.written()
    assert (store.valid, store.position.round) == (True, 2)
    assert await store.snapshot_cache.update(first[1].link.update_digest) is None
    assert "the update of round 1 is not kept for peers that catch up" in caplog.text
    assert "No space left" in caplog.text
