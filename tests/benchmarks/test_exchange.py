"""What the exchange benchmark makes of its samples, what it refuses, and how it makes hivemind's environment."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import exchange, exchange_report, peers
from benchmarks.contributions import TILE, fill, relative_error
from benchmarks.environment import CONSTRAINTS, MARKER, PACKAGES, prepared
from benchmarks.exchange import build_parser, plan, right_averagings, row_of
from benchmarks.exchange_report import NotMeasured, Run
from benchmarks.figures import run_benchmark
from benchmarks.member import TimedAveraging
from benchmarks.peers import ROOT, AveragingOutcome, Peers, PeersSetup
from peer.errors import UserError

NUMEL = 3 * TILE + 17


def row(system: str, codec: str, seconds: float, peers: int = 4, params: int = 50_000_000, rise: int = 0):
    run = Run(system=system, codec=codec, peers=peers, params=params)
    phases = {"exchange": 0.6 * seconds, "link": 0.1 * seconds, "commit": 0.1 * seconds, "decode": 0.2 * seconds}
    averaged = AveragingOutcome(
        timed=(TimedAveraging(began=0.0, ended=seconds, cpu=(0.0, 0.0), phases=phases if system == "atoll" else {}),),
        cpu_s=2.0, daemon_cpu_s=0.5, error=0.001,
    )  # fmt: skip
    return replace(row_of(run, [averaged], [10, 20], [10 + rise, 20]), averagings=7, wrong=1)


def contributions(count: int, seed: int = 3) -> torch.Tensor:
    vectors = torch.empty(count, NUMEL)
    for index in range(count):
        fill(vectors[index], index, seed)
    return vectors


class TestContributions:
    """The vectors and their mean."""

    def test_the_mean_is_recognised_and_nothing_else(self) -> None:
        vectors = contributions(3)
        mean = vectors.mean(0)
        assert relative_error(mean, 3, 3) < 1e-6
        assert relative_error(mean, 3, 4) > 0.5
        assert relative_error(mean.roll(TILE), 3, 3) > 0.1
        assert relative_error(vectors[0], 3, 3) == pytest.approx((2 / 3) ** 0.5, rel=0.01)

    def test_noise_is_measured_against_one_contribution(self) -> None:
        vectors = contributions(2)
        noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(9))
        noise *= 0.02 * vectors[0].norm() / noise.norm()
        assert relative_error(vectors.mean(0) + noise, 2, 3) == pytest.approx(0.02, rel=0.01)

    def test_one_nan_is_seen(self) -> None:
        mean = contributions(2).mean(0)
        mean[-1] = float("nan")
        error = relative_error(mean, 2, 3)
        assert error != error

    def test_the_check_leaves_no_memory_that_the_next_averaging_would_answer_for(self) -> None:
        look = (
            "import torch; from benchmarks.contributions import relative_error\n"
            "from benchmarks.processes import highest_resident_bytes\n"
            "vector = torch.randn(1_000_000, generator=torch.Generator()).sub_(0, alpha=2).square_().div_(1)\n"
            "vector.sum(dtype=torch.float64).item(); before = highest_resident_bytes()\n"  # all code is loaded
            "relative_error(vector, 8, 1); print(highest_resident_bytes() - before)"
        )
        assert int(subprocess.check_output([sys.executable, "-c", look], text=True, cwd=ROOT)) < 1_000_000


class TestMemory:
    """What counts as an averaging's."""

    def test_a_peer_is_at_rest_once_its_memory_stays(self, monkeypatch) -> None:
        readings = iter([[100, 100], [100, 11_000_000], [200, 11_100_000], [9, 9]])
        monkeypatch.setattr(peers.time, "sleep", lambda _: None)
        assert Peers.memory_at_rest(SimpleNamespace(memory=readings.__next__)) == [200, 11_100_000]

    def test_who_never_rests_is_not_waited_for_for_ever(self, monkeypatch) -> None:
        now = itertools.count(0.0, peers.REST_S)
        readings = itertools.count(0, 10**6)
        monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=now.__next__, sleep=lambda _: None))
        assert Peers.memory_at_rest(SimpleNamespace(memory=lambda: [next(readings)])) == [14 * 10**6]

    def test_nobody_looks_while_the_result_is_checked(self, monkeypatch) -> None:
        group = Peers(PeersSetup(module="none", codec="int8", numel=10, peers=2, seed=1))
        taken, looked, threads = [3, 5], threading.Event(), threading.active_count()

        def look() -> list[int]:
            if taken == [40, 5]:
                looked.set()
            return list(taken)

        def ask(what: str) -> list[object]:
            if what == "average":
                taken[:] = [40, 5]
                assert looked.wait(10.0)
                return [{"began": 0.0, "ended": 1.0}] * 2
            assert threading.active_count() == threads
            return [0.0, 0.0]

        monkeypatch.setattr(group, "memory", look)
        monkeypatch.setattr(group, "ask", ask)
        monkeypatch.setattr(group, "_spent", lambda: [(0.0, 0.0)] * 2)
        assert group.go(watch=True).peaks == (40, 5)


class TestSamples:
    """From what members saw to a row."""

    averaged = AveragingOutcome(
        timed=(
            TimedAveraging(began=1.0, ended=3.5, cpu=(0.0, 0.0), phases={"exchange": 2.0, "commit": 0.5}),
            TimedAveraging(began=1.2, ended=3.0, cpu=(0.0, 0.0), phases={"exchange": 1.1, "commit": 0.7}),
        ),
        cpu_s=4.0, daemon_cpu_s=1.0, error=0.001,
    )  # fmt: skip

    def test_the_slowest_member_ends_an_averaging(self) -> None:
        assert self.averaged.seconds == pytest.approx(2.5)
        assert self.averaged.seconds_from_last == pytest.approx(2.3)
        assert self.averaged.phases == {"exchange": 2.0, "commit": 0.7}

    def test_hivemind_counts_from_its_last_member_and_others_from_their_first(self) -> None:
        rows = {
            system: row_of(Run(system=system, codec="none", peers=2, params=10**6), [self.averaged], [1], [2])
            for system in exchange.SYSTEMS
        }
        assert rows["hivemind"].seconds_median == pytest.approx(2.3)
        assert rows["atoll"].seconds_median == rows["gloo"].seconds_median == pytest.approx(2.5)
        assert rows["atoll"].mb_per_second == pytest.approx(1.6)

    def test_memory_is_that_of_the_peer_where_it_is_largest(self) -> None:
        run = Run(system="atoll", codec="int8", peers=2, params=10**6)
        found = row_of(run, [self.averaged], [100, 300], [180, 310])
        memory = (found.peak_memory_bytes, found.peak_memory_absolute_bytes, found.idle_memory_bytes)
        assert memory == (80, 310, 300)

    @pytest.mark.parametrize("error", [0.71, float("nan")])
    def test_wrong_results_are_made_again_but_not_for_ever(self, error: float) -> None:
        run = Run(system="hivemind", codec="uniform-8bit", peers=2, params=10**6)
        right, wrong = self.averaged, replace(self.averaged, error=error)

        def averagings(*results: AveragingOutcome, repeats: int) -> list[AveragingOutcome]:
            return right_averagings(run, SimpleNamespace(average=iter(results).__next__), repeats)

        assert averagings(right, right, repeats=2) == [right, right]
        assert len(averagings(wrong, right, wrong, right, repeats=2)) == 4
        with pytest.raises(UserError, match=r"3 of 4 results are not the average: .* uniform-8bit may have 0\.1"):
            averagings(wrong, right, wrong, wrong, repeats=2)


class TestReport:
    """Figures, table and picture."""

    def test_figures_compare_with_the_fastest_of_hivemind_and_with_gloo(self) -> None:
        rows = [
            row("atoll", "int8", 1.0, rise=240_000_000), row("atoll", "int4", 0.5), row("hivemind", "none", 7.0),
            row("hivemind", "fp16", 4.4), row("gloo", "fp32", 0.5),
        ]  # fmt: skip
        figures = {figure.name: figure for figure in exchange_report.figures(rows)}
        faster = figures["4 x 50M: hivemind's fastest (fp16) / atoll int8"]
        assert (faster.value, faster.met) == (pytest.approx(4.4), True)
        assert figures["4 x 50M: atoll int8 / gloo"].value == pytest.approx(2.0)
        assert figures["4 x 50M: atoll int8 / gloo"].met is True
        assert figures["4 x 50M: atoll int8, more memory / fp32 size"].value == pytest.approx(1.2)
        assert figures["4 x 50M: atoll int8"].limit is None
        fewer_bits = figures["4 x 50M: hivemind's fastest (fp16) / atoll int4"]
        assert (fewer_bits.value, fewer_bits.limit) == (pytest.approx(8.8), 4.0)
        assert figures["4 x 50M: atoll int4 / gloo"].value == pytest.approx(1.0)
        (small, _) = exchange_report.figures([row("atoll", "int8", 0.07, params=1_000_000)])
        assert (small.limit, small.met) == (0.06, False)
        assert exchange_report.figures(rows[2:]) == ()

    def test_the_table_has_what_was_measured_and_the_notes_what_was_not(self) -> None:
        header, measured = exchange_report.table([row("gloo", "fp32", 0.5)])
        assert measured == ("4", "50M", "gloo", "fp32", "0.500", "400", "2.00", "0.50", "0", "0.001", "1 of 7")
        assert len(header) == len(measured)
        missing = NotMeasured(system="hivemind", codec="none", peers=8, params=10**6, reason="too large")
        assert exchange_report.notes([missing]).endswith("Not measured:\n\n- 8 x 1M, hivemind none: too large.")
        assert exchange_report.notes([]) == exchange_report.NOTES
        several = exchange_report.notes([], ["hivemind quantile-8bit"], "Rows: 2.")
        assert "\nRows: 2.\n" in several
        assert several.endswith("Not measured:\n\n- hivemind quantile-8bit: left out by `--codecs`.")

    def test_the_picture_is_drawn(self, tmp_path) -> None:
        rows = [row(*who, params * 1e-8, peers, params) for who in (("atoll", "int8"), ("gloo", "fp32"))
                for peers in (2, 4) for params in (10**6, 10**7)]  # fmt: skip
        exchange_report.draw(tmp_path / "e.png", rows)
        assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")

    def test_labels_keep_their_order_and_their_distance(self) -> None:
        assert exchange_report.apart([0.1, 0.5], 0.2) == [0.1, 0.5]
        assert exchange_report.apart([0.4, 0.4, 0.9], 0.2) == pytest.approx([0.3, 0.5, 0.9])
        assert exchange_report.apart([0.95, 0.96], 0.2) == pytest.approx([0.8, 1.0])


class TestPlan:
    """What the command line asks for."""

    @staticmethod
    def runs(*words: str) -> list[Run]:
        return list(plan(build_parser().parse_args(words)))

    def test_all_runs_of_a_cell_follow_each_other(self) -> None:
        runs = self.runs("--peers", "2", "4", "--params", "1000000", "--codecs", "int8", "fp16", "fp32")
        assert [(run.peers, run.system, run.codec) for run in runs[:5]] == [
            (2, "atoll", "int8"), (2, "atoll", "fp16"), (2, "atoll", "fp32"), (2, "hivemind", "fp16"),
            (2, "gloo", "fp32"),
        ]  # fmt: skip
        assert {run.peers for run in runs[5:]} == {4}
        assert len(self.runs()) == 3 * 4 * 12
        few = self.runs("--most", "500000000", "--systems", "gloo")
        assert (8, 125_000_000) not in {(run.peers, run.params) for run in few}
        assert len(few) == 3 * 4 - 1

    @pytest.mark.parametrize(
        ("words", "message"),
        [("--peers 1", "--peers=1: must be at least 2"), ("--params 10", "--params=10: must be at least 10000"),
         ("--repeats 0", "--repeats=0"), ("--codecs int9", "--codecs=int9: not of atoll, hivemind, gloo"),
         ("--systems gloo --codecs int8", "--codecs=int8: not of gloo")],
    )  # fmt: skip
    def test_what_cannot_be_is_refused_with_exit_code_2(self, words, message, monkeypatch, capsys) -> None:
        monkeypatch.setattr(sys, "argv", ["exchange", *words.split()])
        with pytest.raises(SystemExit) as ended:
            run_benchmark(build_parser(), exchange.measure)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err

    def test_what_does_not_fit_is_reported_and_nothing_at_all_is_an_error(self, monkeypatch) -> None:
        monkeypatch.setattr(exchange, "available_bytes", lambda: 10**9)
        arguments = build_parser().parse_args(["--systems", "gloo", "--peers", "2", "--params", "125000000"])
        with pytest.raises(UserError, match="nothing could be measured") as caught:
            exchange.measure(arguments, lambda _: None)
        assert "needs about 2.3 GB of memory; 1.0 GB are available" in caught.value.hint

    def test_the_command_in_the_report_measures_the_same_again(self) -> None:
        words = ["--peers", "4", "--params", "50000000", "--repeats", "3", "--most", "200000000", "--systems", "gloo",
                 "--codecs", "fp32"]  # fmt: skip
        again = exchange.options(build_parser().parse_args([*words, "--report", "somewhere.json"]))
        assert list(again) == words


class TestEnvironment:
    """Hivemind's own, made by commands that these tests only write down."""

    def test_it_is_made_once_and_again_when_the_pins_change(self, tmp_path) -> None:
        folder, commands = tmp_path / "e", []

        def run(command) -> None:
            commands.append(command)
            if "venv" in command:
                (folder / "bin").mkdir(parents=True, exist_ok=True)
                (folder / "bin" / "python").touch()

        python = prepared(folder, lambda _: None, run)
        assert python == str(folder / "bin" / "python")
        assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
        assert commands[1][-len(PACKAGES) - 1 :] == [str(CONSTRAINTS), *PACKAGES]
        assert prepared(folder, lambda _: None, run) == python
        assert len(commands) == 2
        (folder / MARKER).write_text("other pins")
        assert prepared(folder, lambda _: None, run) == python
        assert len(commands) == 4

    def test_a_folder_with_something_else_is_left_alone(self, tmp_path) -> None:
        (tmp_path / "pyvenv.cfg").touch()
        with pytest.raises(UserError, match="holds something else"):
            prepared(tmp_path, lambda _: None, lambda _: None)

    def test_a_failure_says_what_failed_and_how_to_go_on(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(UserError, match="hivemind's environment cannot be made: -m venv --clear failed") as caught:
            prepared(tmp_path / "e", lambda _: None)
        assert "--systems atoll gloo" in caught.value.hint

    def test_its_pins_hold_a_numpy_with_which_eight_bits_work(self) -> None:
        pins = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
        assert "numpy==2.2.5" in pins
        assert all(json.dumps(pin).isascii() and "==" in pin and "://" not in pin for pin in pins)
