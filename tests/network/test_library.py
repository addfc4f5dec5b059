"""Scripts written the way people write them, as peers: the examples, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from difflib import ndiff
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from peer.checkpoint.store import list_checkpoints, read_checkpoint
from peer.data.batches import Batches
from peer.data.tokenizer import ByteTokenizer
from peer.explain.journal import ROUNDS_FILE
from peer.protocol.manifest import parse_manifest
from peer.run.assemble import load_text
from peer.settings import load_settings
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import JoinedPeer, descendants, until
from tests.train.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60  # whose losses are compared
TRAINER_ROUNDS = 120
TRAINER_LOSS = r"'loss': '?([\d.]+)"  # in its log
NAMES = ("lineage_id", "state_digest", "update_digest")


class Script:
    """An example, or another script, as a child; its peer listens on loopback alone."""

    def __init__(self, folder: Path, example: str | Path, *argv: object) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0",
                       "ATOLL_NAT_PORT_MAP": "false", "PYTHONPATH": str(ROOT)}  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / example), *map(str, argv), "--output-dir", str(folder)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def rounds(self) -> int:
        path = self.folder / ROUNDS_FILE
        return path.read_text().count('"committed"') if path.exists() else 0

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.timeout(600)
@pytest.mark.parametrize("eventful", [False, pytest.param(True, marks=pytest.mark.long)])
def test_scripts_with_a_model_of_their_own_end_with_equal_weights(
    tmp_path: Path, stack: ExitStack, eventful: bool
) -> None:
    """Two; or three of which one is killed, and a fourth that comes late and finds them at work."""
    rounds = 200 if eventful else 30
    subprocess.run(
        [sys.executable, str(ROOT / "examples/own_loop.py"), "--init", str(tmp_path / "run"), "--rounds", str(rounds)],
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    bootstrap = stack.enter_context(closing(
        BootstrapProcess(tmp_path / "bootstrap", (tmp_path / "run/run.yaml").read_text())
    ))  # fmt: skip

    def start(name: str) -> Script:
        script = Script(tmp_path / name, "own_loop.py", "--join", bootstrap.address)
        return stack.enter_context(closing(script))

    if eventful:
        ended = three_of_four(start, "model.safetensors", 400.0)
    else:
        ended = ending((start("one"), start("two")), "model.safetensors", 200.0)
    for log in ended.logs:
        (accuracy,) = re.findall(rf"accuracy (.+) after round {rounds}\n", log)
        assert float(accuracy) > 0.5  # of ten digits


class Ended(NamedTuple):
    weights: dict[str, Tensor]
    logs: list[str]

    def check_losses(self, pattern: str, fall: float) -> None:
        """Each loss fell by so much, and the late peer began with the others' model."""
        one, two, late = ([float(loss) for loss in re.findall(pattern, log)] for log in self.logs)
        assert min(one[0] - one[-1], two[0] - two[-1], one[0] - late[0]) > fall, self.logs


def three_of_four(start: Callable[[str], Script], weights: str, timeout_s: float) -> Ended:
    """Three peers, of which one is killed, and a fourth that comes late; -> how those that remain end, all alike."""
    one, two, victim = map(start, ("one", "two", "victim"))
    # until all three have passed probation: half of those that have must remain for a newcomer to follow
    until(lambda: min(script.rounds for script in (one, two, victim)) >= 15, timeout_s, one.log.read_text)
    os.killpg(victim.process.pid, signal.SIGKILL)
    ended = ending((one, two, late := start("late")), weights, timeout_s, victim)
    assert late.rounds >= 1
    return ended


def ending(scripts: Sequence[Script], weights: str, timeout_s: float, *victims: Script) -> Ended:
    """How these end, with equal weights; the digests of all, of victims too, were equal as long as they ran."""
    for script in scripts:
        assert script.process.wait(timeout_s) == 0, script.log.read_text()
    check_digests(*(script.folder for script in (*scripts, *victims)))
    first, *others = (load_file(script.folder / weights) for script in scripts)
    assert all(other.keys() == first.keys() for other in others)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)
    return Ended(first, [script.log.read_text() for script in scripts])


def check_digests(first: Path, *others: Path) -> None:
    """The first saw the same state before each round, and the same update, as each of the others."""
    chains = []
    for folder in (first, *others):
        records = map(json.loads, (folder / ROUNDS_FILE).read_text().splitlines())
        chains.append({one["round"]: one for one in records if one["status"] == "committed"})
    for chain in chains[1:]:
        assert chain.keys() & chains[0].keys()
        for round in chain.keys() & chains[0].keys():
            one, other = (of[round] for of in (chains[0], chain))
            assert [one[name] for name in NAMES] == [other[name] for name in NAMES], f"round {round}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_trainer_of_transformers_takes_part_beside_atoll_join(tmp_path: Path, stack: ExitStack) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    manifest = MANIFEST.format(hidden=16, recipe=DILOCO, steps=20, wait=20.0, total=f", total: {TRAINER_ROUNDS}")
    bootstrap = stack.enter_context(closing(BootstrapProcess(tmp_path / "bootstrap", manifest)))
    joined = stack.enter_context(closing(JoinedPeer(tmp_path / "joined", bootstrap.address, "--torch-threads", "1")))

    def start(name: str) -> Script:
        script = Script(tmp_path / name, "hf_trainer.py", bootstrap.address, "--text", text,
                        "--manifest", bootstrap.folder / "run.yaml")  # fmt: skip
        return stack.enter_context(closing(script))

    ended = three_of_four(start, "model/model.safetensors", 400.0)
    ended.check_losses(TRAINER_LOSS, 1.0)
    assert all("swarm_round" in log for log in ended.logs)
    assert joined.process.wait(60.0) == 0, joined.log_text()
    check_digests(tmp_path / "one", joined.folder)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_script_that_is_stopped_and_started_again_goes_on_where_it_was(tmp_path: Path, stack: ExitStack) -> None:
    """And trains on when its agent crashes, and while no bootstrap is left."""
    subprocess.run(
        [sys.executable, str(ROOT / "examples/own_loop.py"), "--init", str(tmp_path / "run"), "--rounds", "100000"],
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    bootstrap = stack.enter_context(closing(
        BootstrapProcess(tmp_path / "bootstrap", (tmp_path / "run/run.yaml").read_text())
    ))  # fmt: skip

    def start(name: str) -> Script:
        return stack.enter_context(closing(Script(tmp_path / name, "own_loop.py", "--join", bootstrap.address)))

    one, two = start("one"), start("two")
    until(lambda: min(one.rounds, two.rounds) >= 5, 100.0, one.log.read_text)
    family = descendants(one.process.pid)
    (agent,) = [pid for pid in family if b"agent.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(agent, signal.SIGKILL)
    before = one.rounds
    until(lambda: one.rounds >= before + 5, 100.0, one.log.read_text)
    one.process.send_signal(signal.SIGINT)
    one.process.wait(30.0)
    (checkpoint, *_) = list_checkpoints(one.folder / "checkpoints")
    _, state = read_checkpoint(checkpoint)
    identity = (one.folder / "identity.key").read_bytes()
    again = start("one")
    until(lambda: "begins at step" in again.log.read_text(), 100.0, again.log.read_text)
    step, round = map(int, re.findall(r"begins at step (\d+), round (\d+)", again.log.read_text())[-1])
    assert step == state["progress"]["step"] > 100
    assert round >= state["round"] >= before
    assert (again.folder / "identity.key").read_bytes() == identity
    before = again.rounds
    until(lambda: again.rounds >= before + 5, 100.0, again.log.read_text)
    bootstrap.close()
    before = again.rounds
    until(lambda: min(again.rounds, two.rounds) >= before + 5, 100.0, again.log.read_text)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_script_has_the_losses_of_atoll_join_on_the_same_data(tmp_path: Path, stack: ExitStack) -> None:
    """Each is alone, so that rounds are due and none is committed: what they do is theirs alone."""
    text = MANIFEST.format(hidden=16, recipe=DILOCO, steps=10, wait=2.0, total="")
    text = text.replace("batch_sequences: 4", "batch_sequences: 4, learning_rate: 1.0e-2, warmup_steps: 20")
    bootstrap = stack.enter_context(closing(BootstrapProcess(tmp_path / "bootstrap", text)))
    joined = stack.enter_context(closing(JoinedPeer(
        tmp_path / "joined", bootstrap.address, "--data-seed", "7", "--torch-threads", "1"
    )))  # fmt: skip
    joined.wait_for(lambda: joined.step >= STEPS, 150.0)
    joined.close()
    events = joined.events("step")[:STEPS]
    settings = load_settings({"data_seed": 7, "eval_every_rounds": 0, "output_dir": tmp_path / "reader",
                              "train_files": (str(tmp_path / "joined-text"),)}, None, {})  # fmt: skip
    read = load_text(settings, parse_manifest(text, "run.yaml"), ByteTokenizer(), "")
    rows = [rows for rows, _ in islice(Batches(read.corpus.sources, read.batch_sequences, 7), STEPS)]
    save_file({"ids": torch.stack(rows)}, tmp_path / "batches.safetensors")
    script = stack.enter_context(closing(Script(
        tmp_path / "script", ROOT / "tests/network/plain_loop.py", bootstrap.address,
        "--manifest", bootstrap.folder / "run.yaml", "--batches", tmp_path / "batches.safetensors",
    )))  # fmt: skip
    assert script.process.wait(150.0) == 0, script.log.read_text()
    losses = json.loads((script.folder / "losses.json").read_text())
    assert losses == pytest.approx([event["loss"] for event in events], abs=1e-5)
    assert losses[-1] < losses[0] - 0.5
    assert (script.rounds, joined.committed) == (0, [])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_trainer_of_trl_fine_tunes_a_model_of_the_organiser(tmp_path: Path, stack: ExitStack) -> None:
    base, data = tmp_path / "base", tmp_path / "rows.jsonl"
    tiny_model().save_pretrained(base)
    ByteTokenizer().save(base)
    data.write_text('{"text": "the quick brown fox jumps"}\n' * 400)
    text = MANIFEST.format(hidden=16, recipe=DILOCO, steps=20, wait=20.0, total=f", total: {TRAINER_ROUNDS}")
    bootstrap = stack.enter_context(closing(
        BootstrapProcess(tmp_path / "bootstrap", text, flags=("--from", str(base)))
    ))  # fmt: skip

    def start(name: str) -> Script:
        script = Script(tmp_path / name, "trl_sft.py", bootstrap.address, "--model", base, "--data", data,
                        "--max-length", 32)  # fmt: skip
        return stack.enter_context(closing(script))

    ended = three_of_four(start, "model/model.safetensors", 400.0)
    ended.check_losses(TRAINER_LOSS, 1.0)
    assert all("swarm_round" in log for log in ended.logs)
    before = load_file(base / "model.safetensors")
    assert all(not torch.equal(before[name], values) for name, values in ended.weights.items())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_adapter_is_trained_in_a_loop_of_ones_own(tmp_path: Path, stack: ExitStack) -> None:
    """Each peer has the base, and the run the adapter alone."""
    base, data = tmp_path / "base", tmp_path / "mine.txt"
    tiny_model().save_pretrained(base)
    ByteTokenizer().save(base)
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    common = ("--model", base, "--length", 24)
    subprocess.run(
        [sys.executable, str(ROOT / "examples/lora_loop.py"), *map(str, common), "--init", str(tmp_path / "run"),
         "--rounds", str(TRAINER_ROUNDS)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    bootstrap = stack.enter_context(closing(
        BootstrapProcess(tmp_path / "bootstrap", (tmp_path / "run/run.yaml").read_text())
    ))  # fmt: skip

    def start(name: str) -> Script:
        script = Script(tmp_path / name, "lora_loop.py", *common, "--join", bootstrap.address, "--data", data)
        return stack.enter_context(closing(script))

    ended = three_of_four(start, "adapter/adapter_model.safetensors", 400.0)
    ended.check_losses(r"loss ([\d.]+)", 0.05)  # on a base of random values an adapter cannot do much
    assert all("lora_" in name for name in ended.weights)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one/adapter")
    assert any(bool(one.any()) for name, one in model.named_parameters() if "lora_B" in name)


def test_ten_lines_make_a_swarm_of_a_script() -> None:
    plain, swarm = (
        [line.strip() for line in (ROOT / "examples" / name).read_text().split('"""')[2].splitlines()]
        for name in ("char_gpt.py", "char_gpt_swarm.py")
    )
    changed = [line for line in ndiff(plain, swarm) if line[0] in "+-" and line[2:]]
    assert 0 < len(changed) <= 10
    assert all(line[0] == "+" for line in changed)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_script_of_ten_more_lines_trains_in_a_swarm(tmp_path: Path, stack: ExitStack) -> None:
    environment, text = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "book.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    command = [sys.executable, str(ROOT / "examples/char_gpt_swarm.py")]
    subprocess.run([*command, "init"], check=True, env=environment, cwd=tmp_path)
    manifest = (ROOT / "examples/char_gpt.yaml").read_text()
    manifest = manifest.replace("char_gpt.safetensors", str(tmp_path / "char_gpt.safetensors"))
    manifest = manifest.replace("total: 20", "total: 4")
    bootstrap = stack.enter_context(closing(BootstrapProcess(tmp_path / "bootstrap", manifest)))

    def start(name: str) -> Script:
        script = Script(tmp_path / name, "char_gpt_swarm.py", text, tmp_path / f"{name}.safetensors",
                        bootstrap.address, tmp_path / name)  # fmt: skip
        return stack.enter_context(closing(script))

    scripts = [start("one"), start("two")]
    for script in scripts:
        assert script.process.wait(300.0) == 0, script.log.read_text()
        assert script.rounds >= 3
    one, two, initial = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "two", "char_gpt"))
    assert all(torch.equal(one[name], two[name]) and not torch.equal(one[name], initial[name]) for name in one)
