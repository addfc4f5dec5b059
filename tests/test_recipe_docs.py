"""docs/recipes.md describes exactly the recipes, parts and codecs of the code, with its figures.
docs/simulator.md describes every flag of its commands, key of a scenario and key of a report.

`python -m tests.test_recipe_docs` prints the rows of the tables as the code computes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path

import pytest
import yaml

from peer.outer.compress.base import Codec, Compressor
from peer.outer.compress.registry import COMPRESSORS, codec
from peer.outer.policy.backup import Backup
from peer.outer.policy.schedules import GradientChange
from peer.outer.policy.straggler import Quorum
from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import PARTS, Recipe
from peer.outer.recipe.resolve import resolve
from peer.outer.recipe.shown import EVIDENCE, Shown
from peer.outer.topology.topologies import AllPeers, BandwidthMatching, Groups, Neighbours
from peer.protocol.manifest import RecipeSpec
from peer.sim.campaign.label import parse_label
from peer.sim.cli.commands import add_sim_commands
from peer.sim.world.network import gather_traffic, reduce_traffic
from peer.sim.world.scenario import NetworkSplit, PeerClass, Scenario, parse_scenario, shipped_scenarios

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SIMULATOR = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

PARAMETERS, PEERS = 10**9, 8
# A model of a billion parameters: matrices whose sides are multiples of 64, and 2560 values in vectors.
SHAPES = ((64, 15_624_960), (2560,))


def section(title: str, text: str = TEXT, level: int = 2) -> str:
    """What stands below a heading, up to the next one of the same level."""
    marks = "#" * level
    match = re.search(rf"^{marks} {re.escape(title)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no heading {marks} {title}"
    return match[1]


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by the word in backquotes in their first cell: the cells after it."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and (word := re.fullmatch(r"`([^`]+)`", cells[0])) is not None:
            assert word[1] not in found, f"{word[1]} has two rows"
            found[word[1]] = cells[1:]
    return found


# what the code says ---------------------------------------------------------------------------------------------------


def numbers_cell(part: type) -> str:
    """A part's numbers with their defaults; one without a default must be given."""
    cells = []
    for field in dataclasses.fields(part):
        if field.metadata.get("bound", False) or field.type == "Aggregator":
            continue
        given = field.default is dataclasses.MISSING
        cells.append(f"`{field.name}`" if given else f"`{field.name}` {_value(field.default)}")
    return ", ".join(cells) or "-"


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, float):
        return "infinity" if math.isinf(value) else f"{value:g}"
    return str(value)


def bound(expression: str) -> Codec:
    """The codec for the model of `SHAPES`."""
    return codec(expression).bind(SHAPES)


def bits_cell(expression: str) -> str:
    """Bits per parameter of a payload."""
    return f"{bound(expression).wire_bytes(PARAMETERS) * 8 / PARAMETERS:.4f}".rstrip("0").rstrip(".")


def is_bound(recipe: Recipe) -> bool:
    """Whether `bytes_per_step` is the most of something that varies."""
    return (
        not recipe.codec().fixed_size
        or isinstance(recipe.schedule, GradientChange)
        or isinstance(recipe.straggler, Quorum | Backup)
        or isinstance(recipe.topology, Neighbours | BandwidthMatching)
    )


def bytes_per_step(recipe: Recipe) -> float:
    """Bytes that each of `PEERS` sends per inner step, as the simulator counts them, with all peers in every round."""
    payload = bound(recipe.compressor).wire_bytes(PARAMETERS)
    if not isinstance(recipe.topology, AllPeers):
        # Two peers with anchors of their own send the anchor and the difference.
        others = PEERS - 1 if isinstance(recipe.topology, Groups) else 1
        sent = payload * others * (2.0 if recipe.payload == "delta" else 1.0)
    elif recipe.exchange == "gather":
        sent = float(gather_traffic([payload] * PEERS)[0])
    else:
        sent = float(reduce_traffic(PEERS, payload, payload)[0])
    if recipe.moments is not None:
        sent *= 1.0 + 1.0 / recipe.moments.first + 1.0 / recipe.moments.second
    return sent / recipe.steps_per_round


def formula_cell(recipe: Recipe) -> str:
    """`bytes_per_step` as a formula in n, R and H."""
    if not isinstance(recipe.topology, AllPeers):
        sent = "2 n" if recipe.payload == "delta" else "n"
        sent += " (R - 1)" if isinstance(recipe.topology, Groups) else ""
    else:
        twice = 2 if recipe.moments is None else 3
        sent = "n (R - 1)" if recipe.exchange == "gather" else f"{twice} n (R - 1) / R"
    return sent if recipe.steps_per_round == 1 else f"{sent} / {recipe.steps_per_round}"


def traffic_cells(recipe: Recipe) -> list[str]:
    """n in MB, the formula, MB per step, and how often that goes into ddp's."""
    sent = bytes_per_step(recipe)
    most = "at most " if is_bound(recipe) else ""
    return [
        f"{bound(recipe.compressor).wire_bytes(PARAMETERS) / 1e6:,.2f}", formula_cell(recipe),
        f"{most}{sent / 1e6:,.2f}", f"{bytes_per_step(RECIPES['ddp']) / sent:,.1f}",
    ]


def shown_row(one: Shown) -> str:
    """What was run of these recipes with real peers."""
    names, where = (", ".join(f"`{word}`" for word in words) for words in (one.recipes, one.where))
    return f"| {names} | {one.beside} | {one.what} | {where} |"


# tests ----------------------------------------------------------------------------------------------------------------


def test_every_recipe_has_a_section_and_every_section_a_recipe() -> None:
    titles = re.findall(r"^### (.+)$", section("The recipes"), re.MULTILINE)
    assert titles == list(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_section_tells_the_equation_the_traffic_the_use_and_the_source(name: str) -> None:
    text = section(name, section("The recipes"), level=3)
    assert "```" in text
    for start in ("**Sends.**", "**Use it**", "**Beware.**", "**Source.**"):
        assert start in text, f"{name}: no paragraph {start}"
    assert set(re.findall(r"[0-9]{4}\.[0-9]{5}", RECIPES[name].source)) <= set(re.findall(r"[0-9]{4}\.[0-9]{5}", text))


@pytest.mark.parametrize("name", RECIPES)
def test_the_figure_in_a_section_is_that_of_the_table(name: str) -> None:
    text = " ".join(section(name, section("The recipes"), level=3).split())
    quoted = re.search(r"([0-9,]+\.[0-9]{2}) MB per peer and step", text)
    assert quoted is not None
    assert quoted[1] == f"{bytes_per_step(RECIPES[name]) / 1e6:,.2f}"


def test_every_word_of_every_part_stands_there_with_its_numbers() -> None:
    for kind, words in PARTS.items():
        table = rows(section(kind, section("Parts, their names and numbers"), level=3))
        assert {word: cells[0] for word, cells in table.items()} == {w: numbers_cell(part) for w, part in words.items()}


def test_every_dense_codec_stands_there_with_its_bits_and_block() -> None:
    table = rows(section("Dense codecs", section("Codecs"), level=3))
    assert {word: cells[:2] for word, cells in table.items()} == {
        name: [bits_cell(name), str(dense.block)] for name, dense in COMPRESSORS.items()
    }


def test_the_bits_of_the_sparse_examples() -> None:
    table = rows(section("Sparse codecs", section("Codecs"), level=3))
    kinds = {re.match("[a-z]+", expression)[0] for expression in table}  # type: ignore[index]
    assert kinds == {"top", "dct", "threshold", "random", "randomblock"}
    for expression, cells in table.items():
        assert not isinstance(codec(expression), Compressor)
        most = "" if bound(expression).fixed_size else "at most "
        assert cells[0] == most + bits_cell(expression), expression


def test_the_table_of_traffic() -> None:
    table = rows(section("Traffic"))
    assert table == {name: traffic_cells(recipe) for name, recipe in RECIPES.items()}


def test_what_was_run_where() -> None:
    assert sorted(name for one in EVIDENCE for name in one.recipes) == sorted(RECIPES)
    table = [line for line in section("What was run where").splitlines() if line.startswith("| `")]
    assert table == list(map(shown_row, EVIDENCE))
    for one in EVIDENCE:
        text = "".join((ROOT / path).read_text(encoding="utf-8") for path in one.where)
        assert [name for name in one.recipes if not re.search(rf"(name: |\"){name}\b", text)] == []
        if any(path.startswith("tests/network") for path in one.where):
            assert "kill" in text.lower()
            assert "late" in text


def test_the_recipe_sections_of_manifests_are_valid() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        resolve(RecipeSpec.model_validate(yaml.safe_load(block)["recipe"]))


@pytest.mark.parametrize("text", [TEXT, SIMULATOR, README], ids=["recipes", "simulator", "readme"])
def test_the_labels_of_commands_are_valid(text: str) -> None:
    commands = re.findall(r"^ *atoll compare (.+?) --", text, re.MULTILINE)
    commands += re.findall(r"--recipe ([a-z][^ \n`]+)", text)
    assert commands
    for label in " ".join(commands).split():
        if label != "all":
            parse_label(label)


def test_every_flag_of_the_simulator_stands_there() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_sim_commands(commands)
    for name, command in commands.choices.items():
        flags = re.findall(r"--[a-z-]+", command.format_usage())
        assert [flag for flag in flags if f"`{flag}" not in SIMULATOR] == [], name


def test_every_key_of_a_scenario_stands_there_and_the_example_is_valid() -> None:
    text = section("Scenarios", SIMULATOR)
    for spec in (Scenario, PeerClass, NetworkSplit):
        assert [key for key in spec.model_fields if f"`{key}`" not in text] == []
    assert [name for name in shipped_scenarios() if f"`{name}`" not in text] == []
    example = re.search(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert example is not None
    parse_scenario(example[1], "docs/simulator.md")


def test_every_key_of_a_report_stands_there() -> None:
    from peer.sim.campaign.report import CampaignReport  # loads the training stack, which the rows above do without
    from peer.sim.campaign.simulation import Result

    text = section("Reading a report", SIMULATOR)
    settings = {"peers": 1, "tokens": 1}
    report = CampaignReport(command="", task={}, settings=settings, labels=[], seeds=[], baselines=[]).document()
    keys = [*report, *(field.name for field in dataclasses.fields(Result)), "label", "settings", "gap"]
    assert [key for key in keys if f"`{key}`" not in text] == []


if __name__ == "__main__":
    for kind, words in PARTS.items():
        print(kind, *(f"| `{word}` | {numbers_cell(part)} |" for word, part in words.items()), sep="\n")
    for name, dense in COMPRESSORS.items():
        print(f"| `{name}` | {bits_cell(name)} | {dense.block} |")
    for expression in rows(section("Sparse codecs", section("Codecs"), level=3)):
        print(f"| `{expression}` | {'' if bound(expression).fixed_size else 'at most '}{bits_cell(expression)} |")
    print(*map(shown_row, EVIDENCE), sep="\n")
    for name, recipe in RECIPES.items():
        print("|", " | ".join([f"`{name}`", *traffic_cells(recipe)]), "|")
