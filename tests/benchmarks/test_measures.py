"""What each benchmark computes from its samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import chain, gpu, join, library, memory, rounds, step
from benchmarks.figures import Figure
from benchmarks.vectors import SHAPES
from peer.demo.report import Observed
from peer.errors import UserError
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


def test_steps_are_judged_by_the_ratios_of_neighbouring_blocks() -> None:
    rates = {
        "by hand": [10.0, 5.0, 10.0], "ours alone": [9.95, 4.95, 1.0], "transformers": [9.0, 4.0, 9.0],
        "in a swarm": [9.9, 4.8, 0.99],
    }  # fmt: skip
    figures = by_name(step.figures(rates, 0.02))
    assert figures["ours alone / by hand"].value == pytest.approx(0.99)
    assert figures["ours alone / by hand"].met is True
    assert figures["in a swarm / ours alone"].value == pytest.approx(0.99)
    assert figures["ours alone / transformers"].met is True
    assert figures["agent and its daemon, on average"].value == 0.02


def test_a_gpus_rows_stand_beside_ours() -> None:
    row = gpu.Row(size="1B", recomputed=False, system="ours alone", tokens_per_s=99.0, mfu=0.5, peak_gb=20.0)
    rows = [row, replace(row, system="by hand", tokens_per_s=100.0), replace(row, system="transformers", peak_gb=None)]
    found = by_name(gpu.figures(rows, [], {"int8": 2.0}, {"bf16": 1.01}))
    assert found["1B, by hand: ours against it"].value == pytest.approx(0.99)
    assert found["1B, transformers: ours against it"].met is True
    assert "1B, transformers: peak memory" not in found
    assert found["bf16: loss / that of fp32"].met is True


@pytest.mark.long
@pytest.mark.timeout(280)
def test_the_gpus_command_runs_on_a_cpu_with_tiny_sizes() -> None:
    arguments = gpu.build_parser().parse_args(["--tiny", "--no-compile", "--device", "cpu"])
    report = gpu.measure(arguments, lambda _: None)
    found = by_name(report.figures)
    for system in ("ours alone", "by hand", "transformers"):
        assert found[f"tiny, {system}: speed"].value > 0
        assert found[f"tiny, {system}, recomputed: speed"].value > 0
    for name in gpu.CODECS:
        assert found[f"round, {name}"].value > 0
        assert 0 <= found[f"longest pause of a step, {name}"].value < 5
        assert found[f"{name}, encode on the CPU"].value > 0
    assert found["fp16: loss / that of fp32"].met is True
    for way in ("1 device", "2 devices, ddp", "2 devices, fsdp"):  # of a machine with several cards
        assert found[f"{way}: speed, of plain torch's"].value > 0.1
        for pause in ("hand-over", "merge"):
            assert 0 < found[f"{way}: pause of a {pause}"].value < 1000
        ranks = report.samples["devices"][way]["ranks"]
        assert len(ranks) == int(way[0])
        for number, rank in enumerate(ranks):
            assert len(ranks) == 1 or found[f"{way}: its part on rank {number}, merge"].value == 1e3 * rank["merge_s"]
            assert rank["ours loss"] == pytest.approx(rank["plain loss"], abs=1e-4)
            assert 0 < rank["merge_s"] <= rank["merge_of_all_s"]
    assert "Not measured" not in report.notes
    with pytest.raises(UserError, match="no GPU is at hand"):
        gpu.measure(gpu.build_parser().parse_args(["--device", "cpu"]), lambda _: None)


def test_the_cost_of_a_script_in_a_swarm_is_that_of_neighbouring_blocks():
    alone = {"bare": [10.0, 20.0, 40.0], "swarm": [9.9, 19.8, 20.0]}
    pair = {"bare": [10.0, 20.0, 40.0], "swarm": [9.0, 18.0, 36.0]}
    found = by_name(library.figures({"alone": alone, "of a pair": pair}, 7))
    assert found["alone: with after_step / without"].value == pytest.approx(0.99)
    assert found["alone: with after_step / without"].met
    assert not found["of a pair: with after_step / without"].met
    assert found["alone: step without, median"].value == 50.0
    assert found["rounds of the pair"].value == 7
