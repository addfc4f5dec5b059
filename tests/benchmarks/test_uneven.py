"""What is made of the rounds of unlike peers; the measurement itself is a real swarm of minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.uneven import CASES, HEADER, STEPS, figures, line, row_of
from benchmarks.wan import Machines, manifest_of
from peer.errors import UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import parse_manifest

SLOW, WEAK = list(CASES)[1:]
TOKENS = 1024  # of a step of the quickstart


def played(peers: int, weights: list[int], steps: list[int]) -> Machines:
    """Peers that committed a round with these tokens every ten seconds, and made so many steps in each."""
    names = [f"p{index}" for index in range(peers)]
    rounds = [{"time": 10.0 * number, "members": names, "weights": weights} for number in range(4)]

    def events(index: int, kind: str) -> list[dict[str, Any]]:
        if kind == "start":
            return [{"peer_id": names[index]}]
        return [{"time": 10.0 * number / steps[index]} for number in range(3 * steps[index])]

    return cast(Machines, SimpleNamespace(rounds=lambda _: rounds, events=events))


def test_the_others_rate_is_compared_and_the_fourths_work_counted() -> None:
    alike = row_of("three alike", CASES["three alike"], played(3, [20 * TOKENS] * 3, [20] * 3), 0.0)
    slow = row_of(SLOW, CASES[SLOW], played(4, [*[39 * TOKENS // 2] * 3, TOKENS], [20, 20, 20, 2]), 0.0)
    assert (alike.rounds, alike.members, alike.others) == (3, 3.0, 2 * TOKENS)
    found = {figure.name: (round(figure.value, 3), figure.met) for figure in figures([alike, slow])}
    assert found == {f"{SLOW}: rate of the others": (97.5, True), f"{SLOW}: its work that counts": (50.0, False)}
    cells = dict(zip(HEADER, line(slow, [alike, slow]), strict=True))
    assert (cells["of three alike"], cells["counts"], cells["rounds"]) == ("97.5%", "50%", "3")
    assert line(alike, [alike])[3:5] == ("-", "-")


def test_one_round_is_no_rate() -> None:
    with pytest.raises(UserError, match="1 rounds within the time; must be at least 2"):
        row_of("three alike", CASES["three alike"], played(3, [TOKENS] * 3, [1] * 3), 25.0)


def test_every_case_has_a_manifest_that_a_swarm_runs() -> None:
    for case in CASES.values():
        manifest = parse_manifest(manifest_of(case).encode(), "uneven")
        assert RunPlan.of(manifest).recipe.steps_per_round == STEPS
        assert manifest.tokens_per_step == TOKENS
    assert [(case.peers, case.slow, case.last_mbit) for case in CASES.values()] == [
        (3, False, None), (4, True, None), (4, False, 5.0),
    ]  # fmt: skip
