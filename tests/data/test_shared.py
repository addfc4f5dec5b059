"""Text that peers share out: every window of a shard once, in one order on all peers; disjoint without leases."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.data.batches import Batches, DataState
from peer.data.blocks import ResidentBlocks
from peer.data.corpus import ReadingOptions, Sharing, open_corpus
from peer.data.packing import PackedTokens
from peer.data.resident import read_documents, split_documents
from peer.data.seeded import SeededShards
from peer.data.shareable import SharedText
from peer.data.shared import AHEAD_S, SharedSources, SharedWindows, shard_count
from peer.data.sources import list_sources
from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.genesis import _shared_data
from peer.link.messages import Leased, LivePeers
from peer.outer.recipe.plan import RunPlan
from peer.protocol.data_spec import PARTS_PER_SHARD, DataSpec, SharedData
from peer.protocol.manifest import RunManifest, TokenizerSpec
from peer.protocol.ranges import Range, joined
from peer.protocol.records import PeerRecord

LENGTH = 4
PEERS = [f"peer{index}" for index in range(8)]


def source(
    windows: int = 100, shards: int = 5, start: int = 0, peer_id: str = "a", *, leased: bool = True
) -> SharedWindows:
    packed = PackedTokens(np.arange(windows * LENGTH + 1, dtype=np.uint16), LENGTH)
    blocks = ResidentBlocks(packed, shards, [3, start])
    return SharedWindows(blocks, 1.0, start, SeededShards(3, peer_id, shards), leased=leased)


def scattered(shared: SharedWindows) -> np.ndarray:
    assert isinstance(shared.blocks, ResidentBlocks)
    return shared.blocks.scattered


def place_of(shared: SharedWindows, row: torch.Tensor) -> int:
    """Where this window stands among all that shards are cut of."""
    return int(np.flatnonzero(scattered(shared) == int(row[0]) // LENGTH)[0])


def firsts(shared: SharedWindows, count: int) -> list[int]:
    return [place_of(shared, row) for row in shared.take(count)]


def test_a_shard_has_windows_from_everywhere_and_the_same_ones_on_all_peers() -> None:
    one, other = source(1000, 10, peer_id="a"), source(1000, 10, peer_id="b")
    for shared in (one, other):
        shared.hear([shard(4)], [])
    read = [[int(row[0]) // LENGTH for row in shared.take(100)] for shared in (one, other)]
    assert read[0] == read[1]
    assert all(2 <= sum(window // 100 == tenth for window in read[0]) <= 20 for tenth in range(10))  # 10 in the mean
    assert sorted(scattered(one)) == list(range(1000))


def shard(number: int, epoch: int = 0) -> Range:
    return Range(epoch, number * PARTS_PER_SHARD, (number + 1) * PARTS_PER_SHARD)


def test_a_leased_shard_is_read_whole_and_its_parts_are_used_as_they_end() -> None:
    shared = source()
    shared.hear([shard(3), shard(1)], [])
    assert shared.open == [shard(3), shard(1)]
    rows = firsts(shared, 5)
    assert shared.used == [Range(0, 3 * PARTS_PER_SHARD, 3 * PARTS_PER_SHARD + 4)]
    rows += firsts(shared, 15)
    assert sorted(rows) == list(range(60, 80))
    assert rows != sorted(rows)
    assert joined(shared.used) == [shard(3)]
    assert (shared.open, shared.unleased) == ([shard(1)], 0)


def test_a_shard_that_is_taken_over_continues_where_the_chain_shows() -> None:
    one, other = source(peer_id="a"), source(peer_id="b")
    one.hear([shard(2)], [])
    read = firsts(one, 13)
    reached = one.used[-1].end
    assert reached == 2 * PARTS_PER_SHARD + 10
    other.hear([Range(0, reached, 3 * PARTS_PER_SHARD)], [])
    rest = firsts(other, 7)
    assert Counter(read + rest) == Counter(range(40, 60))
    assert other.used == [Range(0, reached, 3 * PARTS_PER_SHARD)]
    one.hear([], [shard(2)])  # the chain, or another lease, says so
    assert (one.open, one.place) == ([], (0, 0, 0))


@pytest.mark.parametrize(("windows", "shards"), [(3, 1), (7, 3), (100, 100), (333, 10)])
def test_every_window_is_read_once_whatever_the_sizes(windows: int, shards: int) -> None:
    shared = source(windows, shards)
    shared.hear([Range(0, 0, 1), Range(0, 1, PARTS_PER_SHARD), *(shard(number) for number in range(1, shards))], [])
    assert sorted(firsts(shared, windows)) == list(range(windows))
    shared.hear([shard(0, epoch=1)], [])
    firsts(shared, 1)
    assert joined(one for one in shared.used if one.epoch == 0) == [Range(0, 0, shards * PARTS_PER_SHARD)]
    assert shared.unleased == 0


def test_no_step_waits_for_a_lease() -> None:
    shared = source()
    assert len(firsts(shared, 3)) == 3
    assert 2 <= shared.unleased <= 3  # a sixteenth of a shard each: 1 or 2 windows
    shared.hear([shard(4)], [])
    rows = firsts(shared, 20)
    assert set(range(80, 100)) <= {*rows, *firsts(shared, 2)}
    assert shared.unleased <= 5


def test_pieces_are_taken_ahead_in_proportion_to_the_pace() -> None:
    shared = source(windows=1000, shards=10)
    assert shared.wanted(0.0) == 2
    tokens = 1000 * LENGTH / 10
    assert shared.wanted(3.01 * tokens / AHEAD_S) == 5
    assert shared.wanted(1e9) == 8


def test_the_second_source_of_a_run_counts_from_the_end_of_the_first() -> None:
    shared = source(start=5)
    sources = SharedSources({1: shared}, 2)
    assert sources.waits
    sources.hear(Leased(number=4, taken=(shard(0), shard(6)), lost=()))
    assert not sources.waits
    assert sorted(firsts(shared, 20)) == list(range(20, 40))
    assert joined(sources.take_used()) == [shard(6)]
    assert sources.take_used() == []
    use = sources.report([shard(6)], 0.0)
    assert use is not None
    assert (use.open, use.pending, use.wanted, use.heard) == ((), (shard(6),), (0, 2), 4)
    assert SharedSources({0: source(leased=False)}, 1).report([], 0.0) is None


def seeded(peers: list[str], shards: int = 997) -> list[list[tuple[int, int]]]:
    """Of each peer the shards of its first epoch."""
    found = []
    for peer_id in peers:
        own = SeededShards(3, peer_id, shards)
        own.peers = tuple(peers)
        taken = [own.next()]
        while (following := own.next())[0] == 0:
            taken.append(following)
        found.append(taken)
    return found


def test_seeded_peers_that_see_each_other_read_disjoint_parts_of_everything() -> None:
    found = seeded(PEERS)
    assert Counter(shard for own in found for _, shard in own) == Counter(range(997))
    assert min(map(len, found)) > 997 / 8 / 4
    before, after = map(dict, (zip(PEERS, found, strict=True), zip(PEERS[:7], seeded(PEERS[:7]), strict=True)))
    assert all(set(before[peer_id]) <= set(after[peer_id]) for peer_id in PEERS[:7])  # those of the one that left join


def test_more_peers_than_shards_read_nevertheless() -> None:
    assert all(own for own in seeded(PEERS, shards=2))


def test_a_seeded_source_learns_of_others_and_claims_nothing() -> None:
    shared = source(windows=997, shards=997, peer_id=PEERS[0], leased=False)
    sources = SharedSources({0: shared}, 1)
    record = PeerRecord(
        run_id="0" * 64, nickname="x", state="training", round=0, lineage_id="0" * 64, lineage_weight=0, expires_at=1.0
    )
    sources.hear(LivePeers(peers=dict.fromkeys(PEERS, record)))
    own = len(seeded(PEERS)[0])
    assert len(set(firsts(shared, own))) == own < 997 / 3
    assert (shared.unleased, sources.waits) == (0, False)


def test_batches_take_shared_windows_and_say_where_they_are() -> None:
    shared = source()
    shared.hear([shard(3), shard(1)], [])
    batches = Batches([shared], 10, seed=1)
    rows = [place_of(shared, row) for _ in range(4) for row in next(batches)[0]]
    assert Counter(rows) == Counter([*range(60, 80), *range(20, 40)])
    shared.hear([shard(2)], [])
    _, state = next(batches)
    place = state.sources[0].lanes[0]
    assert (place.turn, place.cursor, place.position) == (0, 2, 10)


@pytest.mark.parametrize("read", [0, 3, 7, 20, 27, 39])
def test_a_resumed_peer_continues_in_its_leases_window_by_window(read: int) -> None:
    first, second = source(), source()
    first.hear([shard(3), shard(1)], [])
    before = Batches([first], 1, seed=1)
    rows = [place_of(first, next(before)[0][0]) for _ in range(read)]
    state = DataState.from_dict(json.loads(json.dumps(before.state.to_dict())))
    claimed = list(first.used)
    after = Batches([second], 1, seed=1, state=state)
    assert not SharedSources({0: second}, 1).waits
    rows += [place_of(second, next(after)[0][0]) for _ in range(40 - read)]
    assert Counter(rows) == Counter([*range(60, 80), *range(20, 40)])
    assert joined([*claimed, *second.used]) == [shard(1), shard(3)]
    assert second.unleased == 0


def test_a_shard_is_about_a_million_tokens_but_64_make_a_small_corpus() -> None:
    million = 1 << 20
    assert shard_count(1000 * million // 128, 128, None, 1024) == 1000
    assert shard_count(6_400, 128, None, 1024) == 64
    assert shard_count(6_400, 128, None, 128 * 640) == 10  # a shard is a quarter of a contribution
    assert shard_count(6_400, 128, 32, 128 * 640) == 200
    assert shard_count(3, 128, None, 1024) == 1
    assert shard_count(2**40, 8, 1, 8) == 1 << 17


@pytest.mark.parametrize(("shards", "leased"), [(8, True), (10**5, False)], ids=["as it was cut", "more than windows"])
def test_the_text_that_the_organiser_cut_is_leased(tmp_path: Path, shards: int, leased: bool) -> None:
    (tmp_path / "text.txt").write_text("one document\n" * 400)
    tokenizer = load_tokenizer(TokenizerSpec())
    options = ReadingOptions(
        train_files=(str(tmp_path / "text.txt"),), validates=False, cache=tmp_path / "cache", hub_headers={},
        sharing=Sharing(peer_id="a", run_seed=1, least_tokens=16),
    )  # fmt: skip
    spec, text = DataSpec(sequence_length=16), SharedText()
    [of_files] = list_sources(spec, options.train_files)
    text.add(0, split_documents(read_documents(of_files), spec.validation_fraction)[0])
    cut = SharedData(digest=text.digest, shards=(shards,), shard_tokens=16)
    corpus = open_corpus(spec.model_copy(update={"shared": cut}), tokenizer, options, 1)
    assert bool(corpus.shared.report([], 0.0)) == leased


@pytest.mark.parametrize(("recipe", "leased"), [("diloco", True), ("noloco", False)])
def test_runs_without_a_chain_share_out_by_the_seeded_rule(tmp_path: Path, recipe: str, leased: bool) -> None:
    model = {"architecture": "llama", "config": {"vocab_size": 264}}
    data: dict[str, Any] = {"sequence_length": 64, "validation_tokens": 1024, "shard_sequences": 4}
    data["sources"] = [{"kind": "instructions"}]
    trust = {"mode": "private"}
    manifest = RunManifest.model_validate(
        {"name": "x", "model": model, "recipe": {"name": recipe}, "data": data, "trust": trust}
    )
    plan = RunPlan.of(manifest)
    assert (_shared_data(plan, ByteTokenizer()) is not None) == leased
    assert (plan.claim_rule.most_parts, plan.recipe.gossips) == (0, not leased)
    peers, found = ["one", "two", "three"], list[list[tuple[int, int]]]()
    for peer_id in peers:
        options = ReadingOptions(
            cache=tmp_path, hub_headers={}, sharing=Sharing(peer_id=peer_id, run_seed=5, least_tokens=64)
        )
        corpus = open_corpus(manifest.data, ByteTokenizer(), options, 1)
        (source,) = corpus.sources
        assert isinstance(source, SharedWindows)
        assert not source.leased
        corpus.shared.hear(LivePeers.model_construct(peers=dict.fromkeys(peers)))
        found.append([source.seeded.next() for _ in range(5)])
    shards = [shard for own in found for shard in own]
    assert len(set(shards)) == len(shards)
