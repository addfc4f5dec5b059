"""What `atoll watch` shows, read back from a recorded terminal, and what it prints elsewhere."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from peer.cli import build_parser
from peer.errors import UserError
from peer.run import watch
from peer.run.watch_view import WatchView
from peer.swarm.state.run_control import RunControl
from peer.system import preflight
from tests.explain.samples import ALPHA, BRAVO, CHARLIE, aborted, committed
from tests.explain.test_swarm_state import Watched
from tests.run.test_hardware import manifest
from tests.test_cli import ADDRESS

TOTAL = {"total": 10}


def view_of(watched, **sections):
    run = manifest(**sections)
    control = RunControl(Path("nowhere"), run.run_id, ALPHA, run.rounds)
    return WatchView(run, watched.look(), control, lambda: watched.now)


def seen(device="abacus"):
    watched = Watched()
    for peer_id in (ALPHA, BRAVO, CHARLIE):
        watched.peer(peer_id, loss=2.5)
    watched.report(ALPHA, committed(4, 50.0), aborted(5, 60.0, "exchange", "too slow", culprit=BRAVO), device=device)
    view = view_of(watched, rounds=TOTAL)
    return watched, view


def screen(view, width=120, height=30):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(view)
    return console.file.getvalue().splitlines()


def test_a_run_without_peers_says_so():
    view = view_of(Watched())
    view.take()
    assert screen(view)[-1] == "no peer is known yet; looking for them"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 30), (200, 60)])
def test_place_curve_peers_and_rounds_fit_the_terminal(width, height):
    watched, view = seen()
    for round in range(4, 9):
        watched.now += 20.0
        for peer_id, name in ((ALPHA, "alpha"), (BRAVO, "bravo"), (CHARLIE, "charlie")):
            watched.peer(peer_id, name, round=round, lineage_weight=1000 * round, loss=3.0 - round / 10)
        watched.look()
        view.take()
    lines = screen(view, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("round 8 of 10 (80%), done in 40 s")
    assert lines[2].startswith("3 peers train, 30 tokens/s, 8,000 tokens committed, loss 2.200")
    assert any("loss: training over the last 80 s" in line for line in lines)
    table = next(place for place, line in enumerate(lines) if line.startswith("peer (3)"))
    assert ("device" in lines[table]) is (width >= 110)
    assert [line.split()[0] for line in lines[table + 2 : table + 5]] == ["alpha", "bravo", "charlie"]
    assert "round 4  committed with" in lines[table + 5]
    assert "round 5  aborted in the exchange" in lines[table + 6] or "round 5  aborted" in lines[table + 6]


def test_of_many_peers_the_fastest_are_shown_and_the_others_counted():
    watched = Watched()
    for number in range(300):
        watched.peer(f"{ALPHA[:-3]}{number:03d}", f"peer{number:03d}", tokens_per_s=float(number))
    view = view_of(watched)
    view.take()
    lines = screen(view, 100, 30)
    assert len(lines) <= 30
    assert any(line.startswith("peer299") for line in lines)
    shown = sum(line.startswith("peer2") for line in lines)
    assert any(line.startswith(f"and {300 - shown} more") for line in lines)


def test_the_hostile_name_of_a_device_stays_text():
    _, view = seen(device="[red]x[/]\x1b[2J")
    view.take()
    (line,) = (line for line in screen(view) if "[red]x[/]" in line)
    assert "\x1b" not in line


def test_what_a_peer_reports_late_is_shown_at_its_time():
    watched, view = seen()
    watched.report(BRAVO, aborted(3, 40.0, "exchange", "too slow", culprit=CHARLIE))
    watched.look()
    view.take()
    shown = [line.split()[2] for line in screen(view, 100, 40) if line[2:3] == ":"]
    assert shown == ["3", "4", "5"]


def test_events_and_lines_are_told_once():
    _, view = seen()
    view.take()
    assert [event.round for event in view.fresh_events()] == [4, 5]
    assert view.fresh_events() == []
    assert "3 peers train" in view.line()
    assert view.line() is None
    news = json.loads(json.dumps(view.news()))
    assert (len(news["peers"]), news["events"], news["point"]["peers"]) == (3, [], 3)


class Node:
    def __init__(self, ends):
        self._ends = ends

    async def closed(self):
        if not self._ends:
            await asyncio.Event().wait()
        return "out of memory"


async def looks(view, once, ends=False, count=5):
    """What is shown of so many looks of the reader."""
    shown, changed = [], asyncio.Event()
    closed = asyncio.ensure_future(Node(ends).closed())
    showing = asyncio.ensure_future(watch._until(closed, changed, view, lambda: shown.append(1), once))
    for _ in range(count):
        changed.set()
        for _ in range(5):
            await asyncio.sleep(0)
    closed.cancel()
    showing.cancel()
    return showing, shown


async def test_each_look_is_shown_or_once_the_first_whole_one():
    _, view = seen()
    assert len((await looks(view, once=False))[1]) == 5
    showing, shown = await looks(view, once=True)
    assert (len(shown), showing.done()) == (1, True)


async def test_a_node_that_breaks_is_an_error():
    _, view = seen()
    showing, _ = await looks(view, once=False, ends=True)
    with pytest.raises(UserError, match="has ended: out of memory"):
        await showing


def test_a_swarm_that_does_not_answer_is_told_at_once(monkeypatch):
    monkeypatch.setattr(preflight, "RETRY_PAUSE_S", 0.0)
    parsed = build_parser().parse_args(["watch", ADDRESS.replace("203.0.113.7", "127.0.0.1").replace("31337", "1")])
    with pytest.raises(UserError, match="cannot join"):
        parsed.execute(parsed)
