"""Ranges in joins and records: their text, and how much a member may claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from peer.errors import ProtocolError
from peer.protocol.data_spec import PARTS_PER_SHARD, SharedData
from peer.protocol.ranges import (
    MAX_LEASED,
    MAX_RANGES,
    ClaimRule,
    Range,
    RangesText,
    clipped,
    joined,
    read_ranges,
    size_of,
    write_ranges,
)

LIMIT = 1000
TEXT = TypeAdapter(RangesText)
PLACES = st.tuples(st.integers(0, 3), st.integers(0, LIMIT - 1), st.integers(1, 40))
RANGES = st.lists(PLACES.map(lambda p: Range(p[0], p[1], min(LIMIT, p[1] + p[2]))), max_size=30)
SHARED = SharedData(digest="a" * 64, shards=(50, 12), shard_tokens=1600)


@given(RANGES)
def test_what_is_written_is_read_and_holds_the_same_parts(ranges: list[Range]) -> None:
    text = TEXT.validate_python(write_ranges(ranges))
    assert read_ranges(text, LIMIT) == joined(ranges)[:MAX_RANGES]
    parts = {(one.epoch, part) for one in ranges for part in range(one.first, one.end)}
    assert {(one.epoch, part) for one in joined(ranges) for part in range(one.first, one.end)} == parts
    assert size_of(joined(ranges)) == len(parts)


@given(RANGES, st.integers(0, 100))
def test_a_clipped_list_is_a_beginning_of_at_most_so_many_parts(ranges: list[Range], most: int) -> None:
    kept = clipped(ranges, most)
    assert size_of(kept) == min(most, size_of(joined(ranges)[:MAX_RANGES]))
    assert [one[:2] for one in kept] == [one[:2] for one in joined(ranges)[: len(kept)]]


@given(st.text(max_size=300) | st.from_regex(r"[0-9:,-]{0,200}", fullmatch=True))
def test_hostile_text_is_refused_or_read_within_the_limit(text: str) -> None:
    try:
        ranges = read_ranges(TEXT.validate_python(text), LIMIT)
    except (ProtocolError, ValidationError):
        return
    assert len(ranges) <= MAX_RANGES
    assert all(0 <= one.first < one.end <= LIMIT for one in ranges)
    assert write_ranges(ranges) == text


@pytest.mark.parametrize(
    "text", ["0:5-5", "0:6-5", "0:0-1001", "0:5-6,0:1-2", "0:1-3,0:3-4", "0:1-3,0:2-4", "1:0-1,0:2-3"]
)
def test_ranges_that_are_empty_too_far_or_out_of_order_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="not in order"):
        read_ranges(TEXT.validate_python(text), LIMIT)


def test_a_member_claims_at_most_twice_what_its_tokens_are_of() -> None:
    rule = ClaimRule.of(SHARED, nominal_tokens=1000)  # ten parts of a hundred tokens
    assert rule.most_parts == 22
    rule.check("a", "0:0-22", 0)
    with pytest.raises(ProtocolError, match="a claims 23 parts of the data; at most 22"):
        rule.check("a", "0:0-10,0:20-33", 0)
    with pytest.raises(ProtocolError, match="beyond 992"):
        rule.check("a", f"0:{62 * PARTS_PER_SHARD - 1}-{62 * PARTS_PER_SHARD + 1}", 0)
    with pytest.raises(ProtocolError, match="claims 1 parts"):
        rule.check("a", "0:0-1", 1)  # the rounds of another fragment claim nothing
    with pytest.raises(ProtocolError):
        ClaimRule().check("a", "0:0-1", 0)  # nor do those of a run that shares nothing out
    ClaimRule().check("a", "", 1)
    assert ClaimRule.of(SHARED, nominal_tokens=10**9).most_parts == MAX_LEASED * PARTS_PER_SHARD
