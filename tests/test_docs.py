"""What the documentation says to type exists, and its manifests are valid. `make long` runs the commands."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import yaml

import bootstrap.cli
import peer.cli
from bootstrap.organise import build_organiser_parser
from peer.protocol.manifest import RunManifest
from tests.pages import NEEDS, PAGES, ROOT, fences, lines

PARSERS = {"atoll": peer.cli.build_parser, "atoll-bootstrap": bootstrap.cli.build_parser}


def parser_of(name: str, arguments: list[str]) -> argparse.ArgumentParser:
    """The organiser's commands have one of their own."""
    if name == "atoll-bootstrap" and arguments and arguments[0] in bootstrap.cli.COMMANDS:
        return build_organiser_parser()
    return PARSERS[name]()
PROGRAM = re.compile(r"^(?:atoll|atoll-bootstrap|make|pip|uv|curl|docker|python) \S", re.MULTILINE)
NOTED = re.compile(r"`((?:atoll|atoll-bootstrap|make|python -m) [^`]+)`")
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_what_is_not_run_is_counted_by_what_it_needs() -> None:
    """A new mark, or one more command that no test runs, changes these numbers."""
    all_lines = [line for page in PAGES for line in lines(page)]
    assert Counter(need for line in all_lines for need in line.needs) == {
        "gpu": 9, "hub": 9, "index": 8, "root": 2, "clone": 12, "account": 2, "run": 6,
    }  # fmt: skip
    assert sum(not line.needs for line in all_lines) == 72
    assert {need for line in all_lines for need in line.needs} == NEEDS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_in_a_page_is_one_that_the_program_takes(page: Path) -> None:
    for name, *arguments in (line.words for line in lines(page)):
        if name in PARSERS:
            arguments = list(itertools.takewhile(lambda word: word != ">", arguments))
            _, unknown = parser_of(name, arguments).parse_known_args(arguments)
            assert unknown == [], f"{page.name}: {name} {' '.join(arguments)}"
        elif name == "make":
            assert arguments[0] in TARGETS
        elif name.endswith("python"):
            assert importlib.util.find_spec(arguments[arguments.index("-m") + 1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_is_in_a_fence_of_commands(page: Path) -> None:
    assert [text for _, kind, text in fences(page) if not kind and PROGRAM.search(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_within_sentences_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for noted in NOTED.findall(prose):
        name, *arguments = shlex.split(noted)
        if name == "make":
            assert arguments[0] in TARGETS, noted
        elif name == "python":
            assert importlib.util.find_spec(arguments[1]), noted
        else:
            assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= flags(name, arguments), noted


def flags(name: str, arguments: list[str]) -> set[str]:
    """All flags of the command that the arguments choose."""
    parser = parser_of(name, arguments)
    for word in arguments:
        below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not below:
            break
        parser = below[0][word]
    return set(parser._option_string_actions)


def test_whole_manifests_in_pages_are_valid() -> None:
    found = 0
    for page in PAGES:
        for _, kind, text in fences(page):
            document = yaml.safe_load(text) if kind == "yaml" else None
            if isinstance(document, dict) and {"name", "model"} <= set(document):
                RunManifest.model_validate(document)
                found += 1
    assert found


def test_every_stream_that_a_peer_answers_is_in_the_table_of_the_security_page() -> None:
    """A new handler needs a row: who is answered, how much is read, and whose places it takes."""
    files = (file for folder in ("peer/swarm", "peer/protocol", "bootstrap") for file in (ROOT / folder).rglob("*.py"))
    sources = [file.read_text() for file in files]
    named = {name for text in sources for name in re.findall(r'"atoll/(?:\{[^}]+\}/)?([a-z-]+)"', text)}
    records = {"peers", "checkpoints", "reports"}  # keys of the DHT
    page = (ROOT / "docs/security.md").read_text()
    rows = page.split("| stream | who is answered |")[1].split("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(named - records)
