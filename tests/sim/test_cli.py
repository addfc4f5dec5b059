"""`atoll recipes`, `atoll simulate`, `atoll compare`, as they are typed."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest

from peer.cli import main
from peer.outer.published import RECIPES
from peer.outer.recipes import describe
from peer.sim.job import run_job
from peer.sim.label import parse_labels
from peer.sim.plan import build_swarm, load_task, meta_layout, plan_jobs, windows_for
from peer.sim.pool import Pool

ROOT = Path(__file__).parents[2]
MANIFEST = """\
name: tiny
seed: 3
model:
  architecture: llama
  config: {vocab_size: 264, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 2, max_position_embeddings: 16, tie_word_embeddings: true}
data: {sequence_length: 16, validation_fraction: 0.2}
inner: {batch_sequences: 1, warmup_steps: 0, learning_rate: 0.01}
recipe: {name: diloco, steps_per_round: 2, compressor: int8}
"""
STEP_TOKENS = 16


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Flags of a task that learns in seconds; the working folder is `tmp_path`."""
    (tmp_path / "tiny.yaml").write_text(MANIFEST)
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def atoll(*argv):
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in argv])
    return caught.value.code


def simulate(*argv):
    return atoll("simulate", "./tiny.yaml", "--train-files", "text.txt", *argv)


def compare(*argv):
    return atoll("compare", *argv, "--manifest", "./tiny.yaml", "--train-files", "text.txt", "--jobs", "1")


def campaign(*labels, network="ideal"):
    """Swarm, jobs and text of a comparison of two peers over ten steps each."""
    manifest = load_task("./tiny.yaml")
    tokens = str(2 * 10 * STEP_TOKENS)
    swarm = build_swarm(manifest, network=network, peers=2, tokens=tokens, step_s=1.0, evaluations=2)
    jobs = plan_jobs(swarm, parse_labels(list(labels), "ddp"), [0], 2, meta_layout(manifest))
    return swarm, jobs, windows_for(swarm, jobs, ["text.txt"])


def figures(path):
    """The rows of a report without what depends on the machine's speed."""
    return [
        {key: value for key, value in row.items() if key != "wall_seconds"}
        for row in json.loads(path.read_text())["rows"]
    ]


# ---- recipes


def test_recipes_lists_every_name_with_its_pace(capsys):
    assert atoll("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in RECIPES:
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    assert "every 500 steps" in next(line for line in lines if line.startswith("diloco "))


def test_one_recipe_with_all_of_its_parts(capsys):
    assert atoll("recipes", "sparseloco") == 0
    out = capsys.readouterr().out
    recipe = RECIPES["sparseloco"]
    decay, pace = f"decay {recipe.feedback.decay:g}", f"every {recipe.steps_per_round} steps"
    for word in ("2508.15706", recipe.compressor, decay, pace, recipe.exchange):
        assert word in out


def test_recipes_as_json(capsys):
    assert atoll("recipes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps([describe(r) for r in RECIPES.values()]))


# ---- simulate


def test_simulating_the_manifests_own_recipe(tiny, capsys):
    assert simulate("--peers", 3, "--tokens", 12 * STEP_TOKENS, "--report", "r.json", "--plot", "r.png") == 0
    out = capsys.readouterr().out
    assert "recipe            diloco, every 2 steps" in out
    assert "12 steps of all peers together" in out
    assert "rounds            2 committed, 0 aborted" in out
    document = json.loads((tiny / "r.json").read_text())
    assert document["command"].startswith("atoll simulate ./tiny.yaml --train-files text.txt --peers 3")
    assert (document["task"]["sequence_length"], document["peers"]) == (16, 3)
    (row,) = document["rows"]
    assert (row["seed"], row["recipe"], row["tokens"]) == (3, "diloco", 12 * STEP_TOKENS)
    assert row["val_loss"] < row["curve"][0]["val_loss"]
    assert (tiny / "r.png").read_bytes().startswith(b"\x89PNG")


def test_timing_alone_simulates_a_thousand_peers(tiny, capsys):
    began = time.monotonic()
    argv = ("simulate", "configs/runs/quickstart.yaml", "--peers", 1000, "--timing-only", "--network", "home")
    os.chdir(ROOT)
    assert atoll(*argv, "--tokens", "40960k", "--report", tiny / "r.json") == 0
    assert time.monotonic() - began < 60
    (row,) = figures(tiny / "r.json")
    assert (row["val_loss"], row["peers"], row["tally"]["committed"]) == (None, 1000, 1)
    assert row["reduction_vs_ddp"] == pytest.approx(40 * 4, rel=0.02)      # H = 40, one byte in place of four
    assert "not simulated" in capsys.readouterr().out


def test_the_shipped_task_is_the_one_in_configs():
    assert files("peer.sim").joinpath("tasks/demo.yaml").read_bytes() == (ROOT / "configs/sim/demo.yaml").read_bytes()
    swarm = build_swarm(load_task(None), network="ideal", peers=2, tokens="1.2M", step_s=1.0, evaluations=1)
    assert (swarm.tokens, swarm.tokens_per_step, swarm.steps_per_peer) == (1_200_000, 512, 1172)


# ---- compare


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
    assert figures(tiny / "r.json") == before       # whoever ran them, and in whichever order


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
    monkeypatch.setattr("peer.sim.job.language_task", broken)
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
    def kill_the_first(job):
        if job.label == "ddp":
            os.kill(pids(pool)[0], signal.SIGKILL)

    _, jobs, windows = campaign("papa")
    with Pool(1, windows, kill_the_first, lambda _: None) as pool:
        rows = [row for _, row in pool.run(jobs)]
        last = pids(pool)[0]
    assert [(row["label"], row["status"]) for row in rows] == [("ddp", "failed"), ("papa", "ok")]
    assert rows[0]["note"] == "its process died (signal 9, probably out of memory)"
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


def pids(pool):
    return [worker.process.pid for worker in pool._workers]


# ---- mistakes


@pytest.mark.parametrize(("argv", "parts"), [
    (["recipes", "dilocco"], ["unknown recipe 'dilocco'", "'diloco'"]),
    (["compare", "dilocco"], ["unknown recipe 'dilocco'", "'diloco'"]),
    (["compare", "diloco:steps=3"], ["unknown key 'steps'"]),
    (["compare", "ddp", "--network", "hom"], ["no scenario is named 'hom'", "'home'"]),
    (["compare", "ddp", "--network", "./none.yaml"], ["none.yaml"]),
    (["compare", "ddp", "--peers", "0"], ["--peers=0", "1 to 100000"]),
    (["compare", "ddp", "--peers", "100001"], ["--peers=100001", "1 to 100000"]),
    (["compare", "ddp", "--peers", "4", "--tokens", "2047"], ["--tokens=2047", "2048"]),
    (["compare", "ddp", "--tokens", "many"], ["--tokens=many", "1.2M"]),
    (["compare", "ddp", "--tokens", "0"], ["--tokens=0"]),
    (["compare", "ddp", "--seeds", "0"], ["--seeds=0", "1 to 1000"]),
    (["compare", "ddp", "--seeds", "1", "1"], ["1 is there twice"]),
    (["compare", "ddp", "--seeds", "1", "-2"], ["-2 must be from 0"]),
    (["compare", "ddp", "--jobs", "0"], ["--jobs=0", "1 to 256"]),
    (["compare", "ddp", "--steps-per-round", "0"], ["--steps-per-round=0", "1 to 100000"]),
    (["compare", "ddp", "--evaluations", "0"], ["--evaluations=0", "1 to 1000"]),
    (["compare", "ddp", "--resume"], ["--resume", "--report"]),
    (["compare", "ddp", "--manifest", "./none.yaml"], ["manifest ./none.yaml", "No such file"]),
    (["compare", "ddp", "--manifest", "dem"], ["no task is named 'dem'", "'demo'"]),
    (["compare", "ddp", "--train-files", "none.txt"], ["none.txt"]),
    (["compare", "ddp", "--report", "/proc/none/r.json"], ["--report=/proc/none/r.json", "cannot be written"]),
    (["compare", "ddp", "--plots", "/proc/none"], ["--plot-tokens=/proc/none", "cannot be written"]),
    (["compare", "streaming-diloco:schedule.num_fragments=3"], ["num_fragments=3", "1 to 2", "2 blocks"]),
    (["compare", "ddp:inner.batch_sequences=65536", "--train-files", "text.txt"], ["65536 sequences"]),
    (["simulate", "./none.yaml"], ["manifest ./none.yaml"]),
    (["simulate", "--recipe", "dilocco"], ["unknown recipe 'dilocco'"]),
    (["simulate", "--step-seconds", "nan"], ["--step-seconds=nan"]),
    (["simulate", "--seed", "-1"], ["--seed=-1", "from 0 to"]),
    (["simulate", "--timing-only", "--plot", "a.png"], ["--plot", "--timing-only"]),
    (["simulate", "--timing-only", "--train-files", "text.txt"], ["--train-files", "--timing-only"]),
    (["simulate", "--peers", "100000"], ["--peers=100000", "GiB", "--timing-only"]),
])
def test_a_mistake_is_told_with_its_limit_and_leaves_nothing_behind(tiny, capsys, argv, parts):
    before = sorted(tiny.iterdir())
    assert atoll(*argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("atoll: ")
    assert all(part in message for part in parts), message
    assert sorted(tiny.iterdir()) == before


def test_a_manifest_with_other_than_known_keys_is_refused(tiny, capsys):
    (tiny / "bad.yaml").write_text(MANIFEST.replace("recipe: {name: diloco", "recipe: {label: diloco"))
    assert atoll("simulate", "./bad.yaml") == 2
    assert "recipe.label" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["recipes", "simulate", "compare"])
def test_help_shows_examples(capsys, command):
    assert atoll(command, "--help") == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"  atoll {command}" in out


# ---- as commands


def test_the_command_itself():
    argv = [sys.executable, "-m", "peer.cli", "recipes", "ddp", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps([describe(RECIPES["ddp"])]))


@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_comparison_and_its_processes(tiny):
    argv = ("compare", "ddp", "--manifest", tiny / "tiny.yaml", "--train-files", tiny / "text.txt", "--jobs", "2",
            "--seeds", "2", "--tokens", "100M", "--report", tiny / "r.json")
    process = subprocess.Popen([sys.executable, "-m", "peer.cli", *map(str, argv)], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c, env=os.environ | LIVE_BARS)
    try:
        read_until(process.stdout, [rf"ddp, seed {seed} [^\n]*loss" for seed in range(2)])  # both have made steps
        children = workers_of(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
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


def heed_ctrl_c():
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
