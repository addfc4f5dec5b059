"""`atoll rounds` as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.cli import main
from peer.explain.folder import find_folder
from peer.explain.journal import RoundJournal
from peer.explain.show import RoundsOptions, show_rounds
from peer.outer.record import RoundRecord
from peer.telemetry.status import write_status
from tests.explain.samples import DELTA, STORY, aborted, alone, committed
from tests.telemetry.rows import row

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_OUTPUT_DIR", raising=False)


def keep(folder: str, records: list[RoundRecord]) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    journal = RoundJournal(Path(folder))
    for record in records:
        journal.append(record)
    journal.close()
    return Path(folder)


def atoll(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["rounds", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


Capture = pytest.CaptureFixture[str]


def test_the_last_ones_with_a_summary(capsys: Capture) -> None:
    keep("runs/peer", STORY)
    assert atoll("runs/peer", "--last", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/peer: alpha ALPHA1"
    assert sum("  round " in line for line in lines) == 2
    assert "  round 41   aborted in the exchange, with bravo and charlie, after 2 min 5 s" in lines[-7]
    assert lines[-2:] == ["", "2 of 13 records: 0 committed, 1 aborted, 1 caught up"]


def test_zero_is_all_of_them(capsys: Capture) -> None:
    keep("runs/peer", STORY)
    assert atoll("--last=0") == 0
    assert sum("  round " in line for line in capsys.readouterr().out.splitlines()) == 12


def test_only_the_failed_with_what_followed_them(capsys: Capture) -> None:
    keep("runs/peer", STORY)
    assert atoll("--failed", "--last=0") == 0
    out = capsys.readouterr().out
    assert "instead: trained on; contributed again in round 4, committed 1.90 s later" in out
    assert out.splitlines()[-1] == "7 of 13 records: 0 committed, 7 aborted (2 without other peers), 0 caught up"


def test_where_nothing_failed_it_says_so(capsys: Capture) -> None:
    keep("runs/peer", [committed(1, 1.0), committed(2, 2.0)])
    assert atoll("--failed") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["", "nothing was aborted in 2 records"]


def test_who_is_in_no_record_by_name_is_looked_up_in_the_status_file(capsys: Capture) -> None:
    folder = keep("runs/peer", STORY)
    write_status(folder / "status.json", [row(peer_id=DELTA, nickname="delta")], "quickstart")
    assert atoll() == 0
    assert "caught up: replayed 4 rounds from delta\n" in capsys.readouterr().out


def test_json_is_a_list_that_reads_back(capsys: Capture) -> None:
    keep("runs/peer", STORY)
    assert atoll("--json", "--last", "5") == 0
    documents = json.loads(capsys.readouterr().out)
    assert [RoundRecord.model_validate(document) for document in documents] == STORY[-5:]
    assert atoll("--json", "--failed", "--last", "0") == 0
    assert {document["status"] for document in json.loads(capsys.readouterr().out)} == {"aborted"}


def test_a_damaged_line_is_left_out_and_said_on_stderr(capsys: Capture) -> None:
    path = keep("runs/peer", STORY[:2]) / "rounds.jsonl"
    path.write_bytes(b"?\n" + path.read_bytes() + b'{"torn')
    assert atoll("--json") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 2
    assert captured.err.startswith("atoll: runs/peer/rounds.jsonl line 1: not a round record: Invalid JSON")
    assert captured.err.count("\n") == 1


def test_the_newest_run_is_the_default_and_a_variable_names_another() -> None:
    for age, folder in ((300, "runs/peer"), (100, "runs/demo/alpha"), (200, "runs/mine")):
        keep(folder, STORY[:1])
        os.utime(Path(folder) / "rounds.jsonl", (1e9 - age, 1e9 - age))
    assert find_folder(None, Path("runs"), {}) == Path("runs/demo/alpha")
    assert find_folder(None, Path("runs"), {"ATOLL_OUTPUT_DIR": "runs/mine"}) == Path("runs/mine")
    assert find_folder(Path("runs/peer"), Path("runs"), {"ATOLL_OUTPUT_DIR": "runs/mine"}) == Path("runs/peer")


def no_runs() -> None:
    pass


def a_demo() -> None:
    keep("runs/demo/alpha", STORY)


def a_fresh_peer() -> None:
    Path("runs/peer").mkdir(parents=True)


def only_damage() -> None:
    keep("runs/peer", []).joinpath("rounds.jsonl").write_bytes(b"[]\n")


def only_a_torn_line() -> None:
    keep("runs/peer", []).joinpath("rounds.jsonl").write_bytes(b'{"sta')


@pytest.mark.parametrize(
    ("prepare", "argv", "said"),
    [
        (no_runs, [], ["no round records below runs/", "atoll rounds RUN-FOLDER"]),
        (no_runs, ["runs/pear"], ["runs/pear: no such folder", "Name the --output-dir of a peer."]),
        (a_demo, ["runs/pear"], ["runs/pear: no such folder", "There are records in runs/demo/alpha."]),
        (a_demo, ["runs/demo"], ["runs/demo: no round records (rounds.jsonl)", "records in runs/demo/alpha."]),
        (a_demo, ["runs/demo", "--follow"], ["runs/demo: no round records", "There are records in runs/demo/alpha."]),
        (a_fresh_peer, ["runs/peer"], ["runs/peer: no round records", "--follow waits for the first one."]),
        (only_damage, [], ["runs/peer/rounds.jsonl line 1: not a round record", "Move the file away"]),
        (only_a_torn_line, ["--json"], ["runs/peer: no round has been recorded yet", "--follow waits"]),
        (a_demo, ["--last=-1"], ["--last=-1: must be at least 0", "0 shows all"]),
    ],
)
def test_mistakes_are_told_with_what_to_do(
    prepare: Callable[[], None], argv: list[str], said: list[str], capsys: Capture
) -> None:
    prepare()
    assert atoll(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("atoll: ")
    assert "Traceback" not in captured.err
    for words in said:
        assert words in captured.err


def test_a_folder_that_may_not_be_read_is_a_mistake_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("runs/peer", STORY)

    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "rounds.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert atoll("runs/peer") == 2
    assert capsys.readouterr().err.startswith("atoll: runs/peer: cannot be read: Permission denied")


class Meanwhile:
    """In place of the pause between two looks: what the peer does, then a Ctrl-C."""

    def __init__(self, *works: Callable[[], object]) -> None:
        self._works = list(works)

    def __call__(self, _seconds: float) -> None:
        if not self._works:
            raise KeyboardInterrupt
        self._works.pop(0)()


def test_following_shows_each_round_once_as_it_ends(capsys: Capture) -> None:
    folder = keep("runs/peer", [])
    meanwhile = Meanwhile(
        lambda: keep("runs/peer", [committed(1, 1.0)]),
        lambda: None,
        lambda: keep("runs/peer", [aborted(2, 2.0, "commit", "x"), committed(2, 3.0)]),
    )
    assert show_rounds(folder, RoundsOptions(follow=True), pause=meanwhile) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "  round " in line]
    assert [line.split()[2:4] for line in lines] == [["1", "committed"], ["2", "aborted"], ["2", "committed"]]


def test_following_as_json_is_one_record_a_line(capsys: Capture) -> None:
    folder = keep("runs/peer", [alone(1, 0.0), committed(1, 1.0)])
    meanwhile = Meanwhile(lambda: keep("runs/peer", [committed(2, 2.0), alone(3, 3.0)]))
    options = RoundsOptions(follow=True, as_json=True, failed=True)
    assert show_rounds(folder, options, pause=meanwhile) == 0
    assert [json.loads(line)["round"] for line in capsys.readouterr().out.splitlines()] == [1, 3]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_gets_no_traceback(flags: list[str]) -> None:
    keep("runs/peer", [committed(number, float(number)) for number in range(1, 2000)])
    command = [sys.executable, "-m", "peer.cli", "rounds", "--last", "0", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() != b""
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_help_shows_how_to_use_it(capsys: Capture) -> None:
    assert atoll("--help") == 0
    out = capsys.readouterr().out
    for words in ("atoll rounds runs/peer --last 50", "--failed", "--follow", "--json", "RUN-FOLDER"):
        assert words in out
