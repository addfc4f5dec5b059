"""The commands of README and docs: lines of `sh` fences, and what the comment before a fence says that they need."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NEEDS = {"gpu": "a GPU", "hub": "the Hugging Face hub", "index": "a package index", "root": "root", "clone": "a clone",
         "account": "an account", "run": "a run of one's own that others have joined"}  # fmt: skip
FENCE = re.compile(r"(?:^<!-- needs: ([\w, ]+) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One command as a page has it, continued lines joined."""

    text: str
    needs: frozenset[str]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def fences(page: Path) -> list[tuple[str, str, str]]:
    """(needs, language, text) of every fence of a page, in order."""
    return FENCE.findall(page.read_text())


def lines(page: Path) -> list[Line]:
    """Every command of a page, in order."""
    return [
        Line(text, frozenset(filter(None, needs.split(", "))))
        for needs, kind, block in fences(page) if kind == "sh"
        for text in block.replace("\\\n", " ").splitlines() if text.strip()
    ]  # fmt: skip
