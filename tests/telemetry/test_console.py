"""What the table and the log show, read back from a recorded terminal."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from peer.telemetry.console import LiveSwarm, Note, setup_logging, swarm_table
from peer.telemetry.figures import human_bytes, human_count
from tests.telemetry.rows import row

ROWS = [row(), row(nickname="bravo", peer_id="12D3KooWbravoABC", state="killed", loss=None, group_size=0)]


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def terminal(width: int = 100, *, is_terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(width: int) -> list[str]:
    console = terminal(width)
    console.print(swarm_table(ROWS, title="quickstart", notes=[Note(time=0.0, text="bravo was killed")]))
    return text_of(console).splitlines()


def test_cells_and_totals() -> None:
    lines = drawn(100)
    assert lines[0].strip() == "quickstart"
    header = ["peer", "state", "round", "group", "steps", "tokens/s", "loss", "sent", "received", "waited"]
    assert lines[1].split() == header
    assert lines[3].split() == [
        "alpha", "XYZ123", "training", "7", "3", "1,280", "4,322", "2.346", "1.2", "MB", "987", "B", "12", "s",
    ]
    assert lines[4].split()[:6] == ["bravo", "avoABC", "killed", "7", "-", "1,280"]
    assert lines[6].split() == [
        "1", "peer,", "1", "killed", "7", "2,560", "8,643", "2.346", "2.5", "MB", "2.0", "kB", "25", "s",
    ]
    assert lines[-1].endswith("  bravo was killed")


def test_at_80_columns_nothing_is_cut() -> None:
    lines = drawn(80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert "group" not in lines[1]
    assert lines[3].split()[:5] == ["alpha", "XYZ123", "training", "7", "1,280"]


def test_markup_in_names_and_notes_is_shown_as_it_is() -> None:
    console = terminal()
    console.print(swarm_table([row(nickname="[red]x")], title="t", notes=[Note(time=0.0, text="[bold]y[/bold]")]))
    assert "[red]x" in text_of(console)
    assert "[bold]y[/bold]" in text_of(console)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (2.5e12, "2.5 TB")],
)
def test_bytes_for_people(count: float, shown: str) -> None:
    assert human_bytes(count) == shown


def test_counts_for_people() -> None:
    assert [human_count(n) for n in (0, 12345.4, 12_345_678)] == ["0", "12,345", "12.3M"]


def test_on_a_terminal_the_table_is_drawn_and_a_note_appears_once(tmp_path: Path) -> None:
    console = terminal(is_terminal=True)
    setup_logging(tmp_path / "peer.log", "info", False, console)
    with LiveSwarm(console, title="quickstart", clock=lambda: 0.0) as live:
        live.update(ROWS)
        live.note("delta joined")
    assert "alpha XYZ123" in text_of(console)
    assert text_of(console).splitlines()[-2].endswith("  delta joined")
    assert "INFO" not in text_of(console)
    assert (tmp_path / "peer.log").read_text().count("delta joined") == 1


def test_without_a_terminal_there_are_plain_lines_at_most_every_ten_seconds() -> None:
    console, now = terminal(), [0.0]
    setup_logging(None, "info", False, console)
    with LiveSwarm(console, title="quickstart", clock=lambda: now[0]) as live:
        live.update([])
        for now[0], step in ((0.0, 10), (5.0, 20), (10.0, 30), (30.0, 30)):
            live.update([row(step=step)])
        live.note("delta joined")
    lines = [line.split(" INFO ")[1] for line in text_of(console).splitlines()]
    assert lines == [
        "1 peer, round 7, 10 steps, 4,322 tokens/s, loss 2.346, sent 1.2 MB, received 987 B",
        "1 peer, round 7, 30 steps, 4,322 tokens/s, loss 2.346, sent 1.2 MB, received 987 B",
        "delta joined",
    ]


def test_json_lines_on_the_console_and_everything_in_the_file(tmp_path: Path) -> None:
    console = terminal()
    setup_logging(tmp_path / "peer.log", "warning", True, console)
    logging.getLogger("peer.x").info("quiet")
    logging.getLogger("peer.x").warning("loud")
    assert [json.loads(line)["message"] for line in text_of(console).splitlines()] == ["loud"]
    assert [line.split("peer.x: ")[1] for line in (tmp_path / "peer.log").read_text().splitlines()] == ["quiet", "loud"]
