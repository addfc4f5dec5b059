"""The check of words and links finds what it is there for, and nothing in this repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent / ".ci" / "prose.py"


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line", ["Whoever yields says what it gave up.", "What is large takes TLS.", "training goes on", "asks anew"]
)
def test_foreign_english_is_found_in_pages_docstrings_and_messages(prose, line):
    assert next(prose.words("README.md", line)).startswith("README.md:1: '")
    assert len(list(prose.words("peer/x.py", f'"""{line}"""\nraise E(f"{{x}} {line}")\n'))) == 2
    assert list(prose.words("peer/x.py", "nobody = anew(whoever)\n")) == []


def test_an_expression_that_a_line_end_cuts_is_found_at_its_first_line(prose):
    [found] = prose.words("README.md", "one\ntraining goes\n  on\n")
    assert found == "README.md:2: 'goes on': write continue"


def test_links_that_lead_nowhere_are_found(prose):
    text = "# A\n[a](LICENSE) [b](nowhere.md) [c](#a) [d](#b) [e](http://x.org) [f](docs/faq.md#none) [g](https://x)"
    assert [found.split(": ")[1] for found in prose.links("README.md", text)] == [
        "nowhere.md", "#b", "http://x.org", "docs/faq.md#none", "https://x",
    ]  # fmt: skip


def test_a_front_page_that_is_too_long_or_too_wide_is_found(prose):
    assert list(prose.readme("x\n" * 251)) == ["README.md: 251 lines; at most 250"]
    assert list(prose.readme(f"| {'x' * 121} | y |")) == ["README.md:1: a cell of 121 characters; at most 120"]
