"""The documents name files that exist, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ROOMS = ("peer", "bootstrap", "benchmarks", "tests", "configs", "docs", "docker")
PATH = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./*-]+")
SOURCE = re.compile(r"[\w./-]+\.(?:py|c)")


def prose(document: Path) -> str:
    """The text of a document without its code blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def links(document: Path) -> list[tuple[str, str]]:
    """(file, anchor) of each link that does not leave the repository; an empty file is the document itself."""
    return [found for found in LINK.findall(prose(document)) if "://" not in found[0]]


def paths(document: Path) -> set[str]:
    """What stands in backticks and looks like a path from the root, or like a source file."""
    words = [word for code in CODE.findall(prose(document)) for word in code.split()]
    return {word for word in words if PATH.fullmatch(word) or SOURCE.fullmatch(word)} - {"__init__.py"}


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    dead = []
    for file, anchor in links(document):
        target = document.parent / file if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{file}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_paths_exist(document: Path) -> None:
    def exists(path: str) -> bool:
        return any(ROOT.glob(path)) or any(document.parent.glob(path))

    assert sorted(path for path in paths(document) if not exists(path)) == []


def test_paths_and_links_are_found() -> None:
    architecture = ROOT / "docs/architecture.md"
    assert {"peer/outer/round.py", "peer/swarm/net", "peer/sim/engine"} <= paths(architecture)
    assert ("recipes.md", "aggregator") in links(architecture)
    assert "map-of-the-code" in anchors(architecture)
    assert "the-record-of-a-round" in anchors(architecture)


def test_every_package_of_the_larger_ones_is_on_the_map() -> None:
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = [
        f"peer/{room}/{folder.name}"
        for room in ("swarm", "outer", "sim")
        for folder in sorted((ROOT / "peer" / room).iterdir())
        if (folder / "__init__.py").exists()
    ]
    assert [package for package in packages if f"`{package}`" not in architecture] == []
