"""Plain English and links that lead somewhere, in all that a person reads here. Run by `make lint`.

Words: WORDS lists expressions that a reader of English stumbles over, each with what to write in its place.
Links: files and anchors of this repository exist, addresses of others are https and well formed.
README: at most 250 lines, no cell of a table over 120 characters.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
MAX_README_LINES, MAX_CELL_CHARS = 250, 120
WORDS = {
    r"whoever|whosoever|whomever|whatsoever": "name the subject",
    r"somebody|everybody|nobody": "a peer, each person, no peer",
    r"anew|besides|by turns|henceforth|thereby|therein|whereby|wherein|thence|lest|ere": "again, in turn, so that",
    r"heeds?|heeded|stands? aside|stood aside|bears? a lie": "the field's verb: respects, yields, tolerates",
    r"what is (?:large|small|new|left|late|slow|behind|missing|there)": "a noun: large transfers, the rest",
    r"who is (?:late|behind|slow|gone|new)": "a peer that fell behind",
    r"what (?:comes|came|goes|went)": "name it: the data, the result",
    r"(?:is|are|was|were) told|(?:tells?|told) of": "a verb of the field: receives, reports, learns",
    r"go(?:es)? on|going on|went on": "continue",
    r"(?:that|those) of (?:that|those) of": "name what it is",
    r"that of the (?:\w+ )?(?:round|one|other|others|peer|shard|row|authors?|anchor|text)": "repeat the noun",
    r"for want of|for whose sake|all else|in vain|of no use any more|some more such": "without, for, everything else",
    r"the other way round|in case that": "conversely, in case",
}
PATTERN = re.compile(
    "|".join(rf"(?P<w{n}>\b(?:{words})\b)" for n, words in enumerate(WORDS)).replace(" ", r"\s+"), re.IGNORECASE
)
READ = ("peer/", "atoll/", "bootstrap/", "docs/", "deploy/", "docker/", "examples/", "configs/", "README.md",
        "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "setup.cfg", "Makefile")  # fmt: skip
UNREAD = re.compile(r"static/vendor/|\.(?:png|svg|json|jsonl)$|docs/results/")
GENERATED = {"cli.md", "settings.md", "manifest.md"}  # of docs/reference, by docs/hooks.py
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")


def tracked() -> list[str]:
    """The files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file that a person reads: of Python the strings and comments alone."""
    if not name.endswith(".py"):
        yield from enumerate(text.splitlines(), 1)
        return
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            yield from enumerate(token.string.split("\n"), token.start[0])


def words(name: str, text: str) -> Iterator[str]:
    """Expressions to rewrite."""
    advice = list(WORDS.values())
    lines = list(prose(name, text))
    whole = "\n".join(line for _, line in lines)
    for found in PATTERN.finditer(whole):  # also where a line ends within an expression
        place = next(int(key[1:]) for key, value in found.groupdict().items() if value)
        number = lines[whole.count("\n", 0, found.start())][0]
        yield f"{name}:{number}: '{' '.join(found[0].split())}': write {advice[place]}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    made: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")).strip()
        slug = re.sub(r"\s", "-", plain.lower())
        made[slug] = made.get(slug, -1) + 1
        if made[slug]:
            made[f"{slug}-{made[slug]}"] = 0
    return made.keys() | set(re.findall(r'<a (?:id|name)="([^"]+)"', text)) | set(re.findall(r"\{#([\w-]+)\}", text))


def links(name: str, text: str) -> Iterator[str]:
    """Links of a page that lead nowhere."""
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            address = urlsplit(target)
            if address.scheme not in ("https", "mailto") or (address.scheme == "https" and "." not in address.netloc):
                yield f"{name}: {target}: no https address"
            continue
        path, _, anchor = target.partition("#")
        page = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if page.parent.name == "reference" and page.name in GENERATED:
            continue
        if not page.exists() or not page.is_relative_to(ROOT):
            yield f"{name}: {target}: there is no such file"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text("utf-8") if path else text):
            yield f"{name}: {target}: there is no such heading"


def readme(text: str) -> Iterator[str]:
    """What makes the front page too long."""
    lines = text.splitlines()
    if len(lines) > MAX_README_LINES:
        yield f"README.md: {len(lines)} lines; at most {MAX_README_LINES}"
    for number, line in enumerate(lines, 1):
        if line.startswith("|") and (longest := max(len(cell.strip()) for cell in line.split("|"))) > MAX_CELL_CHARS:
            yield f"README.md:{number}: a cell of {longest} characters; at most {MAX_CELL_CHARS}"


def problems() -> list[str]:
    """All that is found."""
    found = list(readme((ROOT / "README.md").read_text(encoding="utf-8")))
    for name in tracked():
        is_read, is_page = name.startswith(READ) and not UNREAD.search(name), name.endswith(".md")
        if is_read or is_page:
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            found += words(name, text) if is_read else ()
            found += links(name, text) if is_page else ()
    return found


if __name__ == "__main__":
    found = problems()
    print("\n".join(found), file=sys.stderr if found else sys.stdout, end="\n" if found else "")
    sys.exit(1 if found else 0)
