"""Each measured number in the README is that of its report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())
# What the README says, with a group for each number, and where each is from: report, figure, factor.
CLAIMS = [
    (r"up to 300 times fewer cost \[([\d.]+)%\]", ("frontier", "300 times fewer bytes: gap", 1)),
    (r"([\d,]+) kills in all phases", ("chaos", "G3 kills", 1)),
    (r"next round after ([\d.]+) s in the median", ("groups", "next round after a kill, median", 1)),
    (r"at ([\d]+) MB/s from one donor", ("state_transfer", "125M from 1: speed", 1)),
    (r"peers on two cores make a round in ([\d.]+) s", ("groups", "4 x 1.0M: round, median", 1)),
    (r"killed each minute: tokens in committed rounds \| ([\d.]+)%", ("goodput", "60 faults an hour: goodput", 1)),
    (r"to the first step \| ([\d.]+) s", ("join", "command to first step, median", 1)),
    (
        r"int8 ([\d.]+) s; hivemind's fastest codec takes ([\d.]+) times as long; gloo in fp32 ([\d.]+) times faster",
        ("exchange", "4 x 50M: atoll int8", 1),
        ("exchange", "4 x 50M: hivemind's fastest (uniform-8bit) / atoll int8", 1),
        ("exchange", "4 x 50M: atoll int8 / gloo", 1),
    ),
    (
        r"(\d+)% of the line; plain TCP (\d+)% and (\d+)%", ("links", "100 Mbit/s: exchange", 100),
        ("links", "100 Mbit/s: TCP", 100), ("links", "500 Mbit/s: TCP", 100),
    ),
    (
        r"in a swarm \| ([\d.]+) of its steps, and ([\d.]+) of that", ("step", "ours alone / by hand", 1),
        ("step", "in a swarm / ours alone", 1),
    ),
    (r"every 26 s \| ([\d.]+)% of its time", ("pauses", "fast disk: hand-over and merge, of the time", 1)),
    (
        r"HTTP \| (\d+) MB of memory, first batch after ([\d.]+) s", ("data", "peak memory", 1),
        ("data", "first batch", 1),
    ),
    (
        r"daemon (\d+) MB \+ ([\d.]+) bytes a parameter", ("memory", "peak: constant", 1),
        ("memory", "peak: per parameter", 1),
    ),
]  # fmt: skip


def report(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / f"docs/results/{name}.json").read_text())
    return document


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[0])
def test_a_number_is_the_one_that_was_measured(claim: tuple[Any, ...]) -> None:
    pattern, *sources = claim
    [said] = re.findall(pattern, README)
    for number, (name, figure, factor) in zip([said] if isinstance(said, str) else said, sources, strict=True):
        [value] = [one["value"] for one in report(name)["figures"] if one["name"] == figure]
        decimals = len(number.partition(".")[2])
        assert float(number.replace(",", "")) == round(factor * value, decimals), (name, figure)


def test_the_default_recipe_is_as_far_from_the_best_data_parallelism_as_it_says() -> None:
    said = r"([\d,]+) times fewer bytes than data parallelism and ends with a loss ([\d.]+)% above the best of it that"
    [(fewer, gap)] = re.findall(said, README)
    larger = report("larger")
    [row] = [one for one in larger["summary"] if one["label"] == "lagoon"]
    raced = [one for one in report("search")["rows"] if one["label"].startswith("ddp")]
    best = min(raced, key=lambda one: one["loss"])["label"]
    assert [f"{label},inner.learning_rate=0.008" for label in larger["baselines"]] == [best]
    assert (int(fewer.replace(",", "")), float(gap)) == (round(row["reduction_vs_ddp"]), round(100 * row["gap"], 2))
