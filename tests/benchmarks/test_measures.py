"""What each benchmark computes from its samples."""

from __future__ import annotations

import pytest

from benchmarks import chain, join, loop, memory, rounds
from benchmarks.figures import Figure
from benchmarks.vectors import SHAPES
from peer.demo.report import Observed
from peer.outer.record import RoundRecord

DIGEST = "0" * 64


def by_name(figures: tuple[Figure, ...] | list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def committed(
    round: int, members: int, seconds: tuple[float, float, float, float], ended_at: float = 100.0
) -> RoundRecord:
    phases = dict(zip(rounds.PHASES, seconds, strict=True))
    return RoundRecord(
        status="committed",
        round=round,
        lineage_id=DIGEST,
        members=tuple("abc"[:members]),
        seconds={**phases, "total": sum(seconds)},
        ended_at=ended_at,
    )


def test_a_round_counts_from_the_last_member_that_was_ready() -> None:
    records = [
        [committed(1, 3, (0.9, 0.1, 0.2, 0.1), 101.3), committed(2, 2, (9.0, 9.0, 9.0, 9.0))],
        [committed(1, 3, (0.1, 0.3, 0.1, 0.1), 101.4), committed(2, 2, (9.0, 9.0, 9.0, 9.0))],
        [committed(1, 3, (0.5, 0.1, 0.1, 0.4), 101.6), committed(3, 3, (9.0, 9.0, 9.0, 9.0))],
    ]
    (only,) = rounds.together(records)
    assert [only[phase] for phase in rounds.PHASES] == [0.1, 0.3, 0.2, 0.4]
    assert only["total"] == pytest.approx(0.8)  # the second was ready last, at 100.8, and the third installed last
    assert only["round"] == 1


def test_rounds_are_compared_with_gloo_by_their_medians() -> None:
    sample = [{"match": 0.1, "exchange": 0.1, "commit": 0.1, "install": 0.1, "total": 0.4}] * 3
    figures = by_name(rounds.figures("0.8M", sample, [0.1, 0.2, 0.3]))
    assert figures["0.8M: round / gloo all-reduce"].value == pytest.approx(2.0)
    assert figures["0.8M: round, median"].met is True
    assert by_name(rounds.figures("10M", sample, [0.1]))["10M: round, median"].limit is None


def test_memory_is_a_line_through_the_peaks() -> None:
    sizes = [
        {"size": name, "parameters": shape.numel, "before_mb": 300.0, "after_mb": 320.0,
         "peak_mb": 340.0 + 11.0 * shape.numel / 1e6}
        for name, shape in SHAPES.items()
    ]  # fmt: skip
    figures = by_name(memory.figures(sizes))
    assert figures["peak: constant"].value == pytest.approx(340.0)
    assert figures["peak: per parameter"].value == pytest.approx(11.0)
    assert figures["between rounds: per parameter"].value == pytest.approx(0.0, abs=1e-6)
    assert all(figure.met is not False for figure in figures.values())


def test_the_shapes_have_the_sizes_that_they_are_named_after() -> None:
    assert SHAPES["0.8M"].numel == 825_472
    assert SHAPES["10M"].numel == pytest.approx(10e6, rel=0.01)
    assert SHAPES["50M"].numel == pytest.approx(50e6, rel=0.01)


def test_a_newcomer_is_timed_by_the_rounds_of_a_witness() -> None:
    witness = Observed(
        nickname="first",
        events=[{"event": "round", "status": "committed", "round": r, "time": 100.0 + 4.0 * r} for r in range(6)],
    )
    newcomer = Observed(
        nickname="newcomer",
        events=[
            {"event": "start", "time": 111.0, "round": 2},
            {"event": "step", "time": 113.0},
            {"event": "step", "time": 113.5},
            {"event": "round", "status": "aborted", "round": 4, "time": 116.0},
            {"event": "round", "status": "committed", "round": 5, "time": 120.0},
        ],
    )
    timeline = join.timeline(101.0, newcomer, witness)
    assert timeline["first_step_s"] == pytest.approx(12.0)
    assert timeline["swarm_round_at_command"] == 0
    assert timeline["joined_at_round"] == 2
    assert timeline["swarm_round_at_first_step"] == 3
    assert timeline["rounds_to_first_committed"] == 2
    assert timeline["aborted_rounds"] == 1
    figures = by_name(join.figures([timeline]))
    assert figures["command to first step, median"].met is True
    assert figures["rounds to first committed, worst"].met is True


def test_a_chain_of_any_length_is_chosen_from_in_the_same_time() -> None:
    report = chain.measure(chain.build_parser().parse_args(["--rounds", "2000"]), lambda _: None)
    figures = by_name(report.figures)
    assert figures["memory"].limit == pytest.approx(10.2)
    assert 0.0 < figures["choose between two chains"].value < 1e3 * figures["open"].value / 5
    assert len(report.samples["choosing_s"]) == len(report.samples["appending_s"]) == chain.REPEATS


def test_the_loop_is_judged_by_the_ratio_of_medians() -> None:
    timed = loop.LoopRates(production=[9.5, 9.6, 1.0], bare=[10.0, 10.0, 10.0], agent_cores=0.02)
    figures = by_name(loop.figures(timed))
    assert figures["production / bare"].value == pytest.approx(0.95)
    assert figures["production / bare"].met is True
    assert figures["agent and its daemon, on average"].value == 0.02
