"""What was trained on, by the chain: counted once, twice and never, and bounded whatever members claim."""

from __future__ import annotations

from peer.protocol.coverage import KEPT_EPOCHS, Coverage, EpochCoverage
from peer.protocol.data_spec import PARTS_PER_SHARD
from peer.protocol.lineage import Link, Member
from peer.protocol.ranges import Range

RUN = "1" * 64


def link(*members: tuple[str, str]) -> Link:
    roster = tuple(Member(peer_id=peer_id, tokens=1, ranges=ranges) for peer_id, ranges in members)
    return Link(run_id=RUN, round=0, parent=RUN, roster=roster, update_digest=RUN, state_digest=RUN)


def test_parts_are_counted_once_twice_and_never_by_source_and_by_peer() -> None:
    coverage = Coverage((4, 3))
    coverage.add(link(("a", "0:3-70"), ("b", "0:60-100")))
    coverage.add(link(("b", "0:100-112"), ("c", "")))
    first, second = (source.sums()[0] for source in coverage.sources)
    assert (first.never, first.once, first.more, first.again) == (3, 57, 4, 4)
    assert (second.never, second.once, second.more, second.again) == (0, 42, 6, 6)
    assert first.read_twice == 4 / 65
    assert coverage.parts == {"a": 67, "b": 52}
    assert coverage.again["b"] == 10
    document = coverage.document()
    assert document["sources"][0]["again"] == {"0": [[60, 64]]}
    assert document["sources"][1]["epochs"][0]["share_covered"] == 1.0
    assert document["peers"]["b"] == {"parts": 52, "again": 10, "refused": 0}


def test_a_shard_is_done_when_all_its_parts_are_and_says_what_is_missing() -> None:
    epoch = EpochCoverage(3)
    epoch.add(PARTS_PER_SHARD + 4, 2 * PARTS_PER_SHARD)
    epoch.add(PARTS_PER_SHARD, PARTS_PER_SHARD + 2)
    assert epoch.missing(0) == (0, PARTS_PER_SHARD)
    assert epoch.missing(1) == (PARTS_PER_SHARD + 2, PARTS_PER_SHARD + 4)
    assert not epoch.done.any()
    epoch.add(PARTS_PER_SHARD + 2, PARTS_PER_SHARD + 4)
    assert epoch.done.tolist() == [False, True, False]
    assert epoch.missing(1) is None
    for _ in range(300):
        epoch.add(0, 1)
    assert epoch.counts[0] == 255
    assert epoch.again == 299


def test_an_epoch_is_believed_once_half_of_the_one_before_is_covered() -> None:
    coverage = Coverage((4,))
    half = 2 * PARTS_PER_SHARD
    coverage.add(link(("a", f"0:0-{half - 1}"), ("b", "1:0-5,7:0-1")))
    assert coverage.refused == {"b": 6}
    coverage.add(link(("a", f"0:{half - 1}-{half},1:0-5"), ("b", "2:0-1")))
    assert coverage.refused == {"b": 7}
    assert coverage.sources[0].sums()[1].once == 5


def test_memory_is_bounded_by_shards_whatever_is_claimed() -> None:
    coverage = Coverage((4,))
    for epoch in range(20):
        for start in range(0, 4 * PARTS_PER_SHARD, PARTS_PER_SHARD):
            coverage.claim("a", Range(epoch, start, start + PARTS_PER_SHARD))
        coverage.claim("liar", Range(epoch + 5, 0, PARTS_PER_SHARD))
    source = coverage.sources[0]
    assert len(source.epochs) == KEPT_EPOCHS
    assert [one.epoch for one in source.sums()] == list(range(20))
    assert all(one.never == 0 and one.once == 4 * PARTS_PER_SHARD for one in source.sums())
    coverage.claim("liar", Range(0, 0, PARTS_PER_SHARD))  # of an epoch that is only a sum by now
    assert coverage.refused == {"liar": 21 * PARTS_PER_SHARD}


def test_a_chain_with_claims_that_no_rule_allows_is_counted_without_them() -> None:
    coverage = Coverage((4,))
    coverage.add(link(("a", "0:5-5"), ("b", "0:0-100"), ("c", "0:1-2")))
    assert coverage.parts == {"c": 1}
    assert Coverage(()).document()["sources"] == []
