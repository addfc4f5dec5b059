"""G14, its strings: 40 that a page, a terminal, a template or a shell would obey, and 40 paths, in every place that a
stranger's text can come in by.

Fields that are names must refuse each of them. Free text is accepted, and must come out of logs, tables and files as
text: printable, on one line, not as an instruction.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from peer.errors import ProtocolError, UserError
from peer.explain.names import Names
from peer.explain.page import Page
from peer.explain.words import Entry
from peer.outer.recipe.resolve import resolve
from peer.outer.record import RoundRecord
from peer.outer.round import RoundAborted
from peer.protocol.address import parse_peer_address
from peer.protocol.identity import Identity
from peer.protocol.manifest import RecipeSpec, RunManifest, Spec
from peer.protocol.records import PeerRecord, dump_json, open_manifest, parse_json, seal_manifest
from peer.protocol.wire import AbortMessage, HistoryRequest, JoinMessage, RejectMessage
from peer.telemetry.metrics import JsonLog, MetricsFile, PlainLog

MARKUP = (
    "<script>alert(1)</script>", "\"><script>alert(1)</script>", "'><img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg/onload=alert`1`>", "<iframe src=javascript:alert(1)>", "javascript:alert(1)", "JaVaScRiPt:alert(1)",
    "<a href='javascript:alert(1)'>x</a>", "<body onload=alert(1)>", "<math><mi//xlink:href='data:x,<script>'>",
    "<details open ontoggle=alert(1)>", "<object data='data:text/html,<script>alert(1)</script>'>", "</title><script>x",
    "<!--<img src='--><img src=x onerror=alert(1)//'>", "<style>@import'//evil'</style>", "&#60;script&#62;",
    "%3Cscript%3E",
    "\\u003cscript\\u003e", "\uff1cscript\uff1e", "<scr\x00ipt>alert(1)</scr\x00ipt>", "{{7*7}}", "${7*7}",
    "${jndi:ldap://evil/x}", "{0.__class__.__mro__}", "%s%s%n", "$(touch /tmp/x)", "`touch /tmp/x`", "; rm -rf ~",
    "=cmd|'/c'!A0",
    "[link=https://evil]x[/link]", "[bold red]x[/]", "[@click=app.quit]x[/]", "![x](https://evil/x.png)",
    "| a | b |\n|---|",
    "\x1b]8;;https://evil\x07x\x1b]8;;\x07", "\x1b[2J\x1b[H", "\x9b31mred", "\r\n2026-01-01 00:00:00 INFO forged: line",
    "\u202etxt.exe",
)  # fmt: skip
PATHS = (
    "../x", "../../../../etc/passwd", "/etc/passwd", "//etc/passwd", "/", "..", ".", "./x", ".ssh", "~/.ssh/id_rsa",
    "~root",
    "x/../../y", "a/b/../../../c", "a//b/c/d/e/f", "..\\..\\windows\\win.ini", "C:\\windows\\win.ini", "C:/x",
    "\\\\evil\\share\\x",
    "file:///etc/passwd", "https://evil/x", "git+ssh://evil/x", "hf://evil/x/y", "%2e%2e%2fetc%2fpasswd", "..%2f..%2fx",
    "..%c0%af..%c0%afx", "....//....//x", "..;/x", "x\x00.safetensors", "/dev/zero", "/proc/self/environ", "/dev/fd/0",
    "-rf",
    "--output-dir=/tmp", "x\n/etc/passwd", "\u2024\u2024/x", "x" * 300, "a/" * 200, "$HOME/x", "*", "",
)  # fmt: skip
STRINGS = (*MARKUP, *PATHS)
KEY, DIGEST = Identity.generate(), "a" * 64
MODEL = {"architecture": "llama", "config": {}}
MANIFEST = RunManifest.model_validate({"name": "x", "model": MODEL, "genesis": DIGEST})
RECORD = PeerRecord(run_id=DIGEST, nickname="x", state="training", round=1, lineage_id=DIGEST, lineage_weight=1,
                    expires_at=1.0)  # fmt: skip
REQUEST = HistoryRequest(what="update", run_id=DIGEST, digest=DIGEST)
JOIN = JoinMessage(run_id=DIGEST, round=1, parent=DIGEST, tokens=1)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Door = Callable[[str], Any]


def _manifest(section: str | None, field: str) -> Door:
    """A field of the manifest that a bootstrap hands out."""

    def through(text: str) -> Any:
        part = MANIFEST if section is None else getattr(MANIFEST, section)
        changed: Any = part.model_copy(update={field: text})
        whole = changed if section is None else MANIFEST.model_copy(update={section: changed})
        return open_manifest(seal_manifest(KEY, whole, 1))

    return through


def _source(field: str) -> Door:
    """A field of the manifest's first source of text."""

    def through(text: str) -> Any:
        source: Any = MANIFEST.data.sources[0].model_copy(update={field: text})
        data = MANIFEST.data.model_copy(update={"sources": (source,)})
        return open_manifest(seal_manifest(KEY, MANIFEST.model_copy(update={"data": data}), 1))

    return through


def _message(valid: Spec, field: str) -> Door:
    """A field of a record or message."""
    return lambda text: parse_json(type(valid), dump_json(valid.model_copy(update={field: text})))


# What must refuse every string.
NAMES: dict[str, Door] = {
    "the run's name": _manifest(None, "name"),
    "architecture": _manifest("model", "architecture"),
    "pretrained": _manifest("model", "pretrained"),
    "revision": _manifest("model", "revision"),
    "tokenizer": _manifest("tokenizer", "name"),
    "data": _source("name"),
    "source": _source("kind"),
    "genesis": _manifest(None, "genesis"),
    "recipe": _manifest("recipe", "name"),
    "aggregator": _manifest("recipe", "aggregator"),
    "codec": lambda text: resolve(RecipeSpec.model_validate({"name": "diloco", "compressor": text})),
    "nickname": _message(RECORD, "nickname"),
    "state": _message(RECORD, "state"),
    "run of a record": _message(RECORD, "run_id"),
    "digest of a request": _message(REQUEST, "digest"),
    "parent of a join": _message(JOIN, "parent"),
    "leader": _message(RejectMessage(reason="follow"), "leader"),
    "culprit": _message(AbortMessage(reason="x"), "culprit"),
    "address": parse_peer_address,
}
REFUSALS = (ProtocolError, UserError, ValidationError)


def _aborted(text: str) -> RoundRecord:
    """The record of a round that another member gave up with these words."""
    message = parse_json(AbortMessage, dump_json(AbortMessage(reason=text[:300])))
    reason = RoundAborted("exchange", f"peer gave up: {message.reason}").reason
    return RoundRecord(status="aborted", round=1, lineage_id=DIGEST, phase="exchange", reason=reason, ended_at=0.0)


def _page(text: str) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=1000)
    Page(console, Names({})).show([Entry(records=(_aborted(text),))])
    return _COLOURS.sub("", out.getvalue()).splitlines()


def _logged(formatter: logging.Formatter) -> Callable[[str], list[str]]:
    def lines(text: str) -> list[str]:
        record = logging.LogRecord("x", logging.INFO, __file__, 1, "gave up: %s", (text,), None)
        return formatter.format(record).split("\n")

    return lines


def _raised(text: str) -> list[str]:
    return [str(ProtocolError(text)), *UserError("x", text).render("atoll").split("\n")[:1]]


# What accepts free text: -> the lines that come out, of which each must be printable.
TEXTS: dict[str, Callable[[str], list[str]]] = {
    "atoll rounds": _page,
    "agent.log": _logged(PlainLog("%(levelname)s %(message)s")),
    "logs as JSON": _logged(JsonLog()),
    "errors": _raised,
}


def try_strings(folder: Path) -> dict[str, Any]:
    """Every string in every place; -> counts."""
    tried, through = 0, list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for text in STRINGS:
        for place, door in NAMES.items():
            tried += 1
            through += _accepted(place, door, text)
        for place, lines in TEXTS.items():
            tried += 1
            through += _obeyed(place, lines, text)
        tried += 1
        through += _in_a_file(folder / "metrics.jsonl", text)
    made = {path.name for path in folder.iterdir()} - {"metrics.jsonl"}
    through += [f"it made {name}" for name in sorted(made)]
    return {"strings_tried": tried, "strings_through": len(through), "what_got_through": through[:20]}


def _accepted(place: str, door: Door, text: str) -> list[str]:
    try:
        door(text)
    except REFUSALS as error:
        said = error.render() if isinstance(error, UserError) else ""
        return [] if all(line.isprintable() for line in said.split("\n")) else [f"{place}: refused with {said!r}"]
    except Exception as error:  # any other is a crash
        return [f"{place}: {text!r} ends in {type(error).__name__}: {error}"]
    return [f"{place}: {text!r} is accepted"]


def _obeyed(place: str, lines: Callable[[str], list[str]], text: str) -> list[str]:
    shown = lines(text)
    words = re.findall(r"[A-Za-z]{4,}", text)[:1]  # of markup that were obeyed, the tag would be missing
    whole = all(word in "\n".join(shown) for word in words)
    hostile = [line for line in shown if not line.isprintable()]
    return [f"{place}: {text!r} comes out as {shown!r}"] if hostile or not whole else []


def _in_a_file(path: Path, text: str) -> list[str]:
    """A journal's line is one line, and says what was said."""
    path.unlink(missing_ok=True)
    file = MetricsFile(path)
    file.write("round", reason=text)
    file.close()
    written = path.read_bytes()
    same = written.count(b"\n") == 1 and written.isascii() and json.loads(written)["reason"] == text
    return [] if same else [f"metrics: {text!r} is written as {written!r}"]
