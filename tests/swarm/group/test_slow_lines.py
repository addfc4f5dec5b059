"""What a peer says of its line once others have seen it, and how long an exchange waits for it: the same for all."""

from __future__ import annotations

import pytest

from peer.outer.recipe.resolve import swarm_recipe
from peer.protocol.manifest import RecipeSpec
from peer.protocol.wire import JoinMessage
from peer.swarm.group.allotter import Allotter
from tests.swarm.runs import RUN, written

NUMEL, TOKENS, SPEED = 1_000_000, 4000, 100.0  # a round of 40 s
RATES = {"a": 2.0**20, "b": 2.0**20, "c": 2.0**20, "slow": 2.0**18}  # bytes/s of the line


def allotters(recipe="paba", **limits):
    chosen, fragments = swarm_recipe(RecipeSpec(name=recipe)), written((NUMEL,), "fp32")
    return {
        name: Allotter(chosen, fragments, name, tokens_per_s=lambda: SPEED, up_bytes_s=limits.get(name, 0.0))
        for name in RATES
    }


def joined(each, group):
    return [
        (name, JoinMessage(run_id=RUN, round=0, parent=RUN, tokens=TOKENS, group=group, **allotter.claims(group)))
        for name, allotter in each.items()
    ]


def after_a_round(each):
    """All have seen each other, and have said so in the joins of a persistent group."""
    for name, allotter in each.items():
        allotter.saw({other: rate / (len(RATES) - 1) for other, rate in RATES.items() if other != name})
    joins = joined(each, RUN)
    for allotter in each.values():
        allotter.hear(joins)
    return joins


def test_the_next_join_of_a_new_group_says_what_the_others_saw_of_this_peer():
    each = allotters()
    assert [join.up for _, join in joined(each, None)] == [0] * 4
    after_a_round(each)
    assert [join.up for _, join in joined(each, None)] == list(RATES.values())
    assert [(join.seen != "", join.up) for _, join in joined(each, RUN)] == [(True, 0)] * 4  # the others say it there


@pytest.mark.parametrize(("limit", "says"), [(2.0**17, 2**17), (2.0**19, 2**18)])
def test_a_limit_that_a_person_sets_counts_where_it_is_lower(limit, says):
    each = allotters(slow=limit)
    assert dict(joined(each, None))["slow"].up == limit
    after_a_round(each)
    assert dict(joined(each, None))["slow"].up == says
    assert dict(joined(each, RUN))["slow"].up == limit


def test_all_members_wait_as_long_for_a_slow_line_in_their_group_and_in_the_next_one():
    each = allotters()
    assert {allotter.slow_line_s(joined(each, None), 0) for allotter in each.values()} == {0.0}
    longer_s = 2 * 4 * NUMEL * (1 / RATES["slow"] - 1 / RATES["a"])
    assert longer_s == pytest.approx(22.9, abs=0.1)
    for joins in (after_a_round(each), joined(each, None)):
        assert {allotter.slow_line_s(joins, 1) for allotter in each.values()} == {0.25 * TOKENS / SPEED}
        long = [(name, join.model_copy(update={"tokens": 10 * TOKENS})) for name, join in joins]
        assert [allotter.slow_line_s(long, 1) for allotter in each.values()] == [longer_s] * 4


def test_where_work_is_not_divided_by_lines_no_round_is_longer():
    each = allotters("opendiloco")
    assert each["a"].slow_line_s(after_a_round(each), 1) == 0.0
    assert {join.up for _, join in joined(each, None)} == {0}
