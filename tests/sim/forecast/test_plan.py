"""Plans against formulas, against the published table, and as they are typed."""

from __future__ import annotations

import json
import math

import pytest

from peer.cli import build_parser
from peer.errors import UserError
from peer.outer.compress.registry import codec
from peer.outer.recipe.published import RECIPES
from peer.sim.campaign.label import parse_label
from peer.sim.forecast.gpus import SOURCES, gpu_step_s
from peer.sim.forecast.peers import parse_peers, planned_peers
from peer.sim.forecast.plan import (
    DAY_S,
    Forecast,
    Subject,
    advice,
    bandwidth_needed,
    forecast,
    layout_of,
    published_needed,
)
from peer.sim.forecast.published_bandwidth import METHODS, PAPER
from peer.sim.forecast.steady import steady
from peer.train.utilisation import PEAK_TFLOPS

MILLION = layout_of(1e6)
WAIT_S = 30.0


def told(label: str, planned, tokens_per_step: int = 1, goal: float | None = None) -> Forecast:
    subject = Subject(name="", layout=MILLION, tokens_per_step=tokens_per_step, peers=planned, wait_s=WAIT_S)
    return forecast(label, parse_label(label).recipe(), subject, goal)


def peers(*texts: str, step_s: float = 1.0):
    kinds = parse_peers(texts)
    return planned_peers(kinds, [step_s] * len(kinds))


def test_a_model_of_so_many_parameters_has_layers_as_published_ones() -> None:
    for parameters, layers in ((1e9, 24), (1e10, 48), (1e11, 108), (1e8, 12)):
        layout = layout_of(parameters)
        assert layout.numel == pytest.approx(parameters, rel=1e-6)
        assert len({name.split(".")[1] for name in layout.names}) == layers
    with pytest.raises(UserError, match="from 1e6 to 1e13"):
        layout_of(1e5)


def test_utilisation_traffic_and_days_of_diloco_by_hand() -> None:
    four = peers("4:up=8,down=8,latency=0,price=0.5", step_s=0.1)
    found = told("diloco:steps_per_round=40,compressor=fp32", four, 1000, 1e9)
    sent = 2 * 3 / 4 * codec("fp32").wire_bytes(MILLION.numel)  # scatter and return, to the three others
    # 6 s on the line, in which trainers make the steps of the next round: a round of 4 s lasts as long as the line
    assert found.round_s == pytest.approx(sent / 1e6, abs=0.1)
    assert (found.steps_made, found.utilisation) == (round(found.round_s / 0.1), 1.0)
    assert found.gb_a_day == pytest.approx(sent / found.round_s * DAY_S / 1e9)
    assert found.tokens_a_day == pytest.approx(4 / 0.1 * 1000 * DAY_S)
    assert found.days == pytest.approx(1e9 / found.tokens_a_day)
    assert found.cost == pytest.approx(found.days * 24 * 2.0)
    assert (found.limit, found.note) == ("bandwidth", "")


@pytest.mark.parametrize(
    ("texts", "recipe", "limit"),
    [
        (["4:up=100000,down=100000,latency=0"], "diloco", "computing"),
        (["4:up=1,down=1000,latency=0"], "ddp", "uplink"),
        (["4:up=1000,down=1,latency=0"], "ddp", "downlink"),
        (["4:up=1,down=1,latency=0"], "ddp", "bandwidth"),
        (["4:up=100000,down=100000,latency=400"], "ddp", "latency"),
    ],
)
def test_what_limits_a_run(texts, recipe, limit) -> None:
    assert told(recipe, peers(*texts)).limit == limit


def test_a_slow_peer_limits_a_run() -> None:
    kinds = parse_peers(["3:up=100000,down=100000,latency=0", "1:up=100000,down=100000,latency=0"])
    uneven = planned_peers(kinds, [1.0, 4.0])
    assert [profile.speed for profile in uneven.profiles] == [1.0, 1.0, 1.0, 0.25]
    found = told("ddp", uneven)
    assert found.limit == "slowest peer"
    assert found.utilisation == pytest.approx((3 * 0.25 + 1) / 4, abs=0.01)


def test_a_slow_peer_costs_rounds_of_many_steps_no_time_but_the_window_in_which_it_is_waited_for() -> None:
    kinds = parse_peers(["3:up=100000,down=100000,latency=0", "1:up=100000,down=100000,latency=0"])
    uneven = planned_peers(kinds, [1.0, 10.0])
    found = told("diloco:steps_per_round=20", uneven)
    assert (found.utilisation, found.tokens_a_day) == (1.0, pytest.approx(3.1 * DAY_S))
    assert found.round_s == pytest.approx(WAIT_S, rel=0.05)  # the slow one takes 200 s
    assert found.limit == "slowest peer"


@pytest.mark.parametrize("straggler", ["straggler=wait", "straggler.name=quorum,straggler.fraction=0.5"])
def test_a_swarm_sends_fragments_one_after_the_other_however_long_they_overlap(straggler) -> None:
    slow = peers("4:up=100000,down=100000,latency=1000", step_s=0.1)
    label = f"streaming-diloco:{straggler},schedule.period=12,schedule.num_fragments=3"
    near, far = (told(f"{label},schedule.overlap_steps={steps}", slow) for steps in (4, 12))
    assert far.round_s == pytest.approx(near.round_s)


def test_needed_bandwidth_reaches_the_target_and_less_does_not() -> None:
    layout, recipe = layout_of(1e8), parse_label("diloco:steps_per_round=100")
    needed = bandwidth_needed(recipe, layout, 0.1, 0.9).gbit_s
    for factor, reached in ((1.0, True), (0.97, False)):
        two = peers(*[f"2:up={factor * needed * 1000},down={factor * needed * 1000},latency=0"], step_s=0.1)
        assert (steady(recipe.recipe(), layout, two.profiles, 0.1).utilisation >= 0.9 - 1e-9) is reached


def test_the_published_table_is_met_within_a_quarter() -> None:
    size, target, rows = published_needed(layout_of(1e9), 0.1, 0.95)
    assert (size, target) == ("1B", 0.95)
    assert [row.label for row in rows] == list(METHODS)
    assert [row.published for row in rows] == [row[3] for row in PAPER["1B"]]
    for row in rows:
        assert abs(math.log(row.gbit_s / row.published)) < math.log(1.25), row


def test_every_card_has_a_source_and_a_step_time() -> None:
    assert SOURCES.keys() == PEAK_TFLOPS.keys()
    for name in ("NVIDIA RTX 4090", "4090"):
        assert gpu_step_s(name, 10**9, 1000, 0.5) == pytest.approx(6e12 / (0.5 * 165e12))
    with pytest.raises(UserError, match="unknown GPU 'RTX 409'"):
        gpu_step_s("RTX 409", 10**9, 1000)
    with pytest.raises(UserError, match=r"--mfu=2: must be in \(0, 1\]"):
        gpu_step_s("H100", 10**9, 1000, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8:up", "cannot be read"), ("8:up=-1", "greater than 0"),
        ("x:up=1", "count='x': Input should be a valid integer"),
        ("8:upp=3", "upp"), ("1:up=1", "1 in all"), ("300", "less than or equal to 256"),
    ],
)
def test_peers_that_cannot_be(text, message) -> None:
    with pytest.raises(UserError) as caught:
        parse_peers([text])
    assert message in caught.value.what
    assert "8:up=100" in caught.value.hint


def row(label: str, utilisation: float, **given) -> Forecast:
    numbers = {"days": 10.0, "cost": 100.0, "limit": "uplink", "note": ""} | given
    return Forecast(
        label=label, steps_per_round=1, steps_made=1, utilisation=utilisation, round_s=1.0, gb_a_day=1.0,
        tokens_a_day=1e9 * utilisation, **numbers,
    )


def test_the_advice_prefers_what_learns_best_among_what_is_fast() -> None:
    rows = [row("eager-diloco", 1.0, note="a part"), row("distro", 0.99), row("lagoon", 0.92), row("ddp", 0.046)]
    said = advice(rows)
    assert said.startswith("Take lagoon: the peers compute 92% of their time, which takes 10.0 days and costs 100.")
    assert "What limits it is the uplink" in said
    assert said.endswith("Data parallelism (ddp) would be 20.0 times slower.")
    assert advice([row("lagoon", 0.92), row("ddp", 0.93)]).endswith("Data parallelism (ddp) would be as fast.")
    assert advice([row("lagoon", 0.92), row("ddp", 1.0)]).endswith("(ddp) would be 1.1 times faster.")
    assert advice([row("distro", 0.5), row("lagoon", 0.4)]).startswith("Take distro")
    assert advice([row("ddp", 0.4)]).startswith("No recipe keeps these peers busy; the best of them is ddp")


def run(capsys, *arguments: str) -> str:
    parsed = build_parser().parse_args(["plan", *arguments])
    assert parsed.execute(parsed) == 0
    return capsys.readouterr().out


def test_the_command_plans_every_recipe_and_draws_it(tmp_path, capsys) -> None:
    described = json.loads(run(
        capsys, "--params", "1B", "--gpu", "H100", "--tokens", "1M", "--json", "--plot", str(tmp_path / "plan.png"),
        "--peers", "1:up=1000,down=1000,price=2", "1:up=100,down=500,price=1,gpu=A100",
    ))  # fmt: skip
    assert {each["label"] for each in described["recipes"]} == set(RECIPES)
    assert (described["peers"], described["price_per_hour"]) == (2, 3.0)
    assert described["step_seconds"] == pytest.approx(6e9 * 32768 / (0.4 * 989e12), rel=1e-3)
    assert described["advice"].startswith("Take ")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    paced = run(capsys, "--params", "1e7", "--step-time", "1", "--recipes", "diloco", "ddp", "--steps-per-round", "50")
    assert "diloco:steps_per_round=50" in paced


def test_the_command_tells_the_bandwidth_of_each_recipe_beside_the_published(capsys) -> None:
    arguments = ["--params", "1e9", "--step-time", "0.1", "--target-utilization", "0.95", "--recipes", "ddp", "selsync"]
    described = json.loads(run(capsys, *arguments, "--json"))
    assert described["gbit_s"]["ddp"] == pytest.approx(465, rel=0.02)  # fp32: twice the paper's bf16
    assert "depend on the gradients" in described["notes"]["selsync"]
    assert described["published"]["methods"]["+ FP4"]["published"] == 2.0
    assert "222.3" in run(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MANIFEST or --params"), (["--params", "1e9"], "time of a step"),
        (["--params", "1e9", "--step-time", "0"], "above 0"),
        (["--params", "1e9", "--step-time", "1", "--target-utilization", "1"], "between 0 and 1"),
        (["--params", "1e9", "--step-time", "1", "--tokens", "many"], "not a number of tokens"),
        (["--params", "1e9", "--step-time", "1", "--recipes", "dilco"], "unknown recipe"),
        (["--params", "1e9", "--step-time", "1", "--tokens-per-step", "0"], "at least 1"),
        (["--params", "1X", "--step-time", "1"], "--params=1X: is not a number of parameters"),
        (["--params", "1e9", "--step-time", "1", "--gpu", "H100"], "--gpu and --step-time both"),
        (["--params", "1e9", "--step-time", "1", "--mfu", "0.5"], "no use without a GPU"),
        (["--params", "1e9", "--gpu", "100"], "unknown GPU '100'"),
        (["--params", "1B", "--step-time", "1", "--target-utilization", "0.9", "--tokens", "1B"], "tokens has no use"),
        (["--params", "1B", "--step-time", "1", "--target-utilization", "0.9", "--plot", "a"], "--plot has no use"),
    ],
)
def test_flags_that_cannot_be(arguments, message) -> None:
    parsed = build_parser().parse_args(["plan", *arguments])
    with pytest.raises(UserError, match=message):
        parsed.execute(parsed)


def test_the_cards_are_listed(capsys) -> None:
    listed = run(capsys, "--gpus").splitlines()
    assert len(listed) == len(PEAK_TFLOPS)
    assert "NVIDIA H100 Tensor Core GPU datasheet, SXM" in "\n".join(listed)
