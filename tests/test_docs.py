"""What the documentation says to type exists, and its manifests are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import bootstrap.cli
import peer.cli
from peer.protocol.manifest import RunManifest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PARSERS = {"atoll": peer.cli.build_parser, "atoll-bootstrap": bootstrap.cli.build_parser}


def commands(page: Path) -> list[list[str]]:
    """Lines of code that begin with a command of ours; a line that ends in a backslash goes on."""
    blocks = [text for _, text in FENCE.findall(page.read_text())]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] in PARSERS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_in_a_page_is_one_that_the_program_takes(page: Path) -> None:
    for name, *arguments in commands(page):
        _, unknown = PARSERS[name]().parse_known_args(arguments)
        assert unknown == [], f"{page.name}: {name} {' '.join(arguments)}"


def test_the_pages_have_commands() -> None:
    found = {name for page in PAGES for name, *_ in commands(page)}
    assert found == set(PARSERS)
    assert sum(len(commands(page)) for page in PAGES) > 15


def test_whole_manifests_in_pages_are_valid() -> None:
    found = 0
    for page in PAGES:
        for kind, text in FENCE.findall(page.read_text()):
            document = yaml.safe_load(text) if kind == "yaml" else None
            if isinstance(document, dict) and {"name", "model"} <= set(document):
                RunManifest.model_validate(document)
                found += 1
    assert found
