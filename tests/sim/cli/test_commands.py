"""`atoll recipes` and `atoll simulate` as they are typed, and the mistakes of all three commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files

import pytest

from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import describe
from peer.sim.campaign.plan import build_swarm, load_task
from tests.sim.typed import ADDRESS, MANIFEST, ROOT, STEP_TOKENS, atoll, figures


def simulate(*argv):
    return atoll("simulate", "./tiny.yaml", "--train-files", "text.txt", *argv)


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
    assert document["task"]["data"] == "text.txt"
    (row,) = document["rows"]
    assert (row["seed"], row["recipe"], row["tokens"]) == (3, "diloco", 12 * STEP_TOKENS)
    assert row["val_loss"] < row["curve"][0]["val_loss"]
    assert (tiny / "r.png").read_bytes().startswith(b"\x89PNG")


def test_timing_alone_simulates_a_thousand_peers(tiny, capsys):
    argv = ("simulate", "configs/runs/quickstart.yaml", "--peers", 1000, "--timing-only", "--network", "home")
    os.chdir(ROOT)
    assert atoll(*argv, "--tokens", "40960k", "--report", tiny / "r.json") == 0
    (row,) = figures(tiny / "r.json")
    assert (row["val_loss"], row["peers"], row["tally"]["committed"]) == (None, 1000, 1)
    assert row["reduction_vs_ddp"] == pytest.approx(40 * 4, rel=0.02)      # H = 40, one byte in place of four
    assert "not simulated" in capsys.readouterr().out


def test_the_shipped_task_is_the_one_in_configs():
    assert files("peer.sim").joinpath("tasks/demo.yaml").read_bytes() == (ROOT / "configs/sim/demo.yaml").read_bytes()
    swarm = build_swarm(load_task(None), network="ideal", peers=2, tokens="1.2M", step_s=1.0, evaluations=1)
    assert (swarm.tokens, swarm.tokens_per_step, swarm.steps_per_peer) == (1_200_000, 512, 1172)


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
    (["compare", "ddp", "--device", "cuda:99"], ["device='cuda:99'", "not available", "use auto, cpu"]),
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


@pytest.mark.parametrize(("name", "text", "argv", "parts"), [
    ("twice.yaml", MANIFEST.replace("seed: 3\n", "seed: 3\nseed: 4\n"), ["simulate", "./twice.yaml"],
     ["manifest ./twice.yaml", "line 3: the key 'seed' is there twice, first in line 2"]),
    ("twice.json", '{"name": "a", "name": "b"}', ["simulate", "./twice.json"], ["the key 'name' is there twice"]),
    ("twice.yaml", "name: net\npeers: [{share: 1, speed: 1,\n  speed: 2}]", ["simulate", "--network", "./twice.yaml"],
     ["scenario ./twice.yaml", "line 3: the key 'speed' is there twice, first in line 2"]),
    ("twice.yaml", "save_steps: 1\nsave_steps: 2", ["join", ADDRESS, "--config", "twice.yaml"],
     ["settings file twice.yaml", "line 2: the key 'save_steps' is there twice"]),
    ("twice.yaml", MANIFEST, ["compare", "diloco:compressor=int8,compressor=int4"], ["'compressor' is set twice"]),
    ("large.yaml", MANIFEST + "#" * 32_000, ["simulate", "./large.yaml"],
     [f"manifest ./large.yaml is {len(MANIFEST) + 32_000} bytes; the limit is 16384 bytes"]),
])
def test_what_is_written_twice_or_too_long_is_told_with_its_place(tiny, capsys, name, text, argv, parts):
    (tiny / name).write_text(text)
    assert atoll(*argv) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("command", ["recipes", "simulate", "compare"])
def test_help_shows_examples(capsys, command):
    assert atoll(command, "--help") == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"  atoll {command}" in out


# ---- as a command


def test_the_command_itself():
    argv = [sys.executable, "-m", "peer.cli", "recipes", "ddp", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps([describe(RECIPES["ddp"])]))
