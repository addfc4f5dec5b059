"""`atoll compare` as it is typed: its report, its processes, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peer.sim.campaign.job import run_job
from peer.sim.campaign.label import parse_labels
from peer.sim.campaign.plan import build_swarm, load_task, meta_layout, plan_jobs, windows_for
from peer.sim.campaign.pool import Pool
from tests.sim.typed import ROOT, STEP_TOKENS, atoll, figures


def compare(*argv):
    return atoll("compare", *argv, "--manifest", "./tiny.yaml", "--train-files", "text.txt", "--jobs", "1",
                 "--baseline", "ddp")


def campaign(*labels, network="ideal"):
    """Swarm, jobs and text of a comparison of two peers over ten steps each."""
    manifest = load_task("./tiny.yaml")
    tokens = str(2 * 10 * STEP_TOKENS)
    swarm = build_swarm(manifest, network=network, peers=2, tokens=tokens, step_s=1.0, evaluations=2)
    jobs = plan_jobs(swarm, parse_labels(list(labels), ["ddp"]), [0], 2, meta_layout(manifest))
    return swarm, jobs, windows_for(swarm, jobs, ["text.txt"])


# ---- reports


def test_a_comparison_its_report_its_pictures_and_going_on_with_it(tiny, capsys):
    flags = ("--peers", 2, "--tokens", 40 * STEP_TOKENS, "--report", "r.json", "--plots", "plots", "--evaluations", 2)
    assert compare("diloco:compressor=int8", *flags, "--seeds", 2) == 0
    out = capsys.readouterr().out
    assert "2 recipes x 2 seeds = 4 runs" in out
    assert "rounds of 2 steps (--steps-per-round) in place of these recipes' own: diloco:compressor=int8 500" in out
    document = json.loads((tiny / "r.json").read_text())
    keys = [(row["label"], row["seed"]) for row in document["rows"]]
    assert keys == [("ddp", 0), ("ddp", 1), ("diloco:compressor=int8", 0), ("diloco:compressor=int8", 1)]
    assert document["complete"]
    assert "gaps are to ddp" in out
    assert "the best of" not in out
    assert document["rows"][0]["reduction_vs_ddp"] == pytest.approx(1.0)
    assert document["rows"][2]["reduction_vs_ddp"] > 7
    assert [len(row["curve"]) for row in document["rows"]] == [3, 3, 3, 3]
    assert sorted(file.name for file in (tiny / "plots").iterdir()) == ["loss-bytes.png", "loss-tokens.png"]

    before = figures(tiny / "r.json")
    document["rows"] = [row for row in document["rows"] if row["seed"] == 0]
    document["complete"] = False
    (tiny / "r.json").write_text(json.dumps(document))
    assert compare("diloco:compressor=int8", *flags, "--seeds", 2) == 2
    assert "2 finished runs of an unfinished comparison" in capsys.readouterr().err
    assert compare("diloco:compressor=int8", *flags, "--seeds", 2, "--resume") == 0
    assert "4 runs, 2 of them already in the report" in capsys.readouterr().out
    assert figures(tiny / "r.json") == before       # whichever process ran them, and in whichever order


@pytest.mark.long
def test_rows_do_not_depend_on_how_many_run_at_once(tiny):
    argv = ("papa", "noloco", "--peers", 2, "--tokens", 20 * STEP_TOKENS)
    assert compare(*argv, "--report", "one.json") == 0
    assert compare(*argv, "--report", "two.json", "--jobs", 2) == 0
    assert figures(tiny / "one.json") == figures(tiny / "two.json")


@pytest.mark.usefixtures("tiny")
def test_a_run_that_did_not_learn_is_a_row_that_says_so():
    _, jobs, windows = campaign("diloco:outer.lr=1e6,steps_per_round=1")
    good, bad = (run_job(job, windows) for job in jobs)
    assert (good["status"], good["note"]) == ("ok", None)
    assert bad["note"].startswith("learned nothing: the loss was 5.5")
    json.dumps(bad, allow_nan=False)


@pytest.mark.usefixtures("tiny")
def test_a_bug_in_one_recipe_is_a_row_with_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("by chance")

    _, (job, _), windows = campaign("papa")
    monkeypatch.setattr("peer.sim.campaign.job.language_task", broken)
    row = run_job(job, windows)
    assert (row["status"], row["note"], row["val_loss"]) == ("failed", "ZeroDivisionError: by chance", None)
    assert "in broken" in row["traceback"]


@pytest.mark.usefixtures("tiny")
def test_a_swarm_that_dies_is_a_row():
    Path("gone.yaml").write_text("name: gone\npeers: [{share: 1, leave_s: 3}]\n")
    _, (job, _), windows = campaign("papa", network="./gone.yaml")
    row = run_job(job, windows)
    assert row["status"] == "stopped"
    assert "died after" in row["note"]


@pytest.mark.usefixtures("tiny")
def test_a_process_that_dies_costs_its_own_run_alone():
    class Killer:
        def started(self, job):
            if job.label == "ddp":
                os.kill(pids(pool)[0], signal.SIGKILL)

        def progress(self, _):
            pass

    _, jobs, windows = campaign("papa")
    with Pool(1, windows, Killer()) as pool:
        rows = [row for _, row in pool.run(jobs)]
        last = pids(pool)[0]
    assert [(row["label"], row["status"]) for row in rows] == [("ddp", "failed"), ("papa", "ok")]
    assert rows[0]["note"] == "its process died (signal 9, probably out of memory)"
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


def pids(pool):
    return [worker.process.pid for worker in pool._workers]


# ---- Ctrl-C


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_comparison_and_its_processes(tiny):
    argv = ("compare", "ddp", "--manifest", tiny / "tiny.yaml", "--train-files", tiny / "text.txt", "--jobs", "2",
            "--seeds", "2", "--baseline", "ddp", "--tokens", "100M", "--report", tiny / "r.json")
    process = subprocess.Popen([sys.executable, "-m", "peer.cli", *map(str, argv)], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=accept_ctrl_c, env=os.environ | LIVE_BARS,
                               start_new_session=True)
    try:
        read_until(process.stdout, [rf"ddp, seed {seed} [^\n]*loss" for seed in range(2)])  # both have made steps
        children = workers_of(process.pid)
        assert len(children) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)  # a second on a quiet machine
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted; nothing is kept" in out
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert sorted(file.name for file in tiny.iterdir()) == ["text.txt", "tiny.yaml"]


LIVE_BARS = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}
"""Environment in which progress is drawn although nobody looks at it."""


def read_until(stream, patterns, within_s=200):
    """Read what a process prints until all patterns are in it; bars come without the end of a line."""
    seen, deadline = "", time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not all(re.search(pattern, seen) for pattern in patterns):
            assert selector.select(deadline - time.monotonic()), seen
            chunk = os.read(stream.fileno(), 1 << 16)
            assert chunk, seen
            seen += chunk.decode(errors="replace")


def accept_ctrl_c():
    """A shell starts its background jobs, and all that they start, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def workers_of(pid):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"spawn_main" in command:
            found.append(int(status.parent.name))
    return found
