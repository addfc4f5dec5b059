"""Models out of checkpoints: exported, sampled and measured as transformers and the trainer do it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer import cli
from peer.checkpoint.inventory import INVENTORY_FILE
from peer.checkpoint.store import write_checkpoint
from peer.data.corpus import ReadingOptions, open_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.genesis import build_initial_model
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest
from peer.run.run_file import RUN_FILE, keep_manifest
from peer.train.evaluate import evaluate
from peer.use.generate import Sampling, generate
from peer.use.measure import measure
from peer.use.trained import open_trained

CONFIG = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def manifest_of(**recipe: object) -> RunManifest:
    return RunManifest.model_validate({
        "name": "used", "model": {"architecture": "llama", "config": CONFIG}, "genesis": "0" * 64,
        "data": {"sequence_length": 16, "validation_tokens": 1024}, "recipe": recipe or {"name": "diloco"},
    })  # fmt: skip


class Saved:
    """The output folder of a peer with one checkpoint, of the run `published`, and the vectors in it."""

    def __init__(
        self, output: Path, manifest: RunManifest, round: int = 7, published: RunManifest | None = None
    ) -> None:
        self.output, self.manifest, published = output, manifest, published or manifest
        folder = output / "checkpoints" / published.run_id[:16]
        keep_manifest(folder, published)
        recipe = RunPlan.of(manifest).recipe
        self.model = build_initial_model(manifest, ByteTokenizer())
        self.layout = FlatLayout.of(self.model, recipe.cut)
        generator = torch.Generator().manual_seed(5)
        self.vectors = {"anchor": torch.empty(self.layout.numel)}
        self.layout.copy_to_flat(self.model, self.vectors["anchor"])
        for name in ("anchor", *(f"buffer{index}" for index in range(recipe.optimizer.num_buffers))):
            noise = 0.1 * torch.randn(self.layout.numel, generator=generator)
            self.vectors[name] = self.vectors.get(name, torch.zeros(())) + noise
        buffers = [vector for name, vector in self.vectors.items() if name != "anchor"]
        self.result = recipe.optimizer.result(self.vectors["anchor"], buffers, round).clone()
        outer = output / "outer.safetensors"
        save_file(self.vectors, outer)
        state = {
            "run_id": published.run_id, "lineage_id": "ab" * 32, "round": round, "origin": {},
            "progress": {"round": round, "step": 9, "tokens": 8, "steps_since_snapshot": 0, "unsent_tokens": [0]},
            "data": {"seed": 0, "sources": []},
        }  # fmt: skip
        local = {"inner": {"parameters": self.vectors["anchor"] + 1.0}}
        self.checkpoint = write_checkpoint(folder, 9, local, state, [outer])


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "peer", manifest_of())


@pytest.fixture
def atoll(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*argv: object) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(map(str, argv)))
        captured = capsys.readouterr()
        assert caught.value.code in (0, None), captured.err
        return captured.out

    return run


def parameters_of(saved: Saved, model: torch.nn.Module) -> torch.Tensor:
    flat = torch.empty(saved.layout.numel)
    saved.layout.copy_to_flat(model, flat)
    return flat


@pytest.mark.parametrize("recipe", [
    {"name": "diloco"}, {"name": "diloco", "average": 0.5}, {"name": "streaming-diloco"}, {"name": "lagoon"},
], ids=lambda recipe: " ".join(map(str, recipe.values())))  # fmt: skip
def test_a_model_is_what_its_run_yields_and_not_what_the_peer_trains(tmp_path: Path, recipe: dict[str, object]) -> None:
    saved = Saved(tmp_path / "peer", manifest_of(**recipe))
    for place in (saved.output, saved.checkpoint):
        trained = open_trained(place)
        assert torch.equal(parameters_of(saved, trained.model), saved.result)
        assert (trained.after.round, trained.after.lineage_id) == (7, "ab" * 32)
        assert trained.manifest == saved.manifest


def test_an_export_is_loaded_by_transformers_and_by_atoll(saved: Saved, tmp_path: Path, atoll) -> None:
    assert "in fp32" in atoll("export", saved.output, "--to", tmp_path / "out", "--device", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(parameters_of(saved, theirs), saved.result)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("déjà")["input_ids"] == ByteTokenizer().encode("déjà").tolist()
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (saved.manifest.run_id, "ab" * 32, "diloco", "standard library", "| round | 7 |"):
        assert fact in card
    assert torch.equal(parameters_of(saved, open_trained(tmp_path / "out").model), saved.result)
    (tmp_path / "stopped").mkdir()
    (tmp_path / "out").rename(tmp_path / "stopped" / "export")  # of a peer that saved no checkpoint
    assert torch.equal(parameters_of(saved, open_trained(tmp_path / "stopped").model), saved.result)
    atoll("export", saved.checkpoint, "--to", tmp_path / "half", "--dtype", "bf16", "--device", "cpu")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert torch.equal(parameters_of(saved, half.float()), saved.result.bfloat16().float())


@pytest.mark.parametrize("prompt", ["", "def main(", "longer than the window of this model, by far"])
def test_the_likeliest_text_is_that_of_a_plain_loop(saved: Saved, prompt: str) -> None:
    trained, window = open_trained(saved.output), CONFIG["max_position_embeddings"]
    ids = ByteTokenizer().encode(prompt).tolist() if prompt else [1]
    new = min(40, max(window // 2, window - len(ids)))
    ids = ids[-(window - new) :]
    start = len(ids)
    while len(ids) < window:
        with torch.no_grad():
            ids.append(int(trained.model(input_ids=torch.tensor([ids])).logits[0, -1, :259].argmax()))
        if ids[-1] == 1:
            break
    expected = ByteTokenizer().decode(np.array(ids[start:], dtype=np.int32))
    pieces: list[str] = []
    said = generate(trained, prompt, Sampling(max_new_tokens=40, temperature=0.0), pieces.append)
    assert said == expected == "".join(pieces)
    assert said or not prompt  # these weights end an empty text with bytes that are no text


def test_a_share_of_almost_nothing_leaves_the_likeliest_and_a_seed_gives_a_text(saved: Saved) -> None:
    trained = open_trained(saved.output)
    likeliest = generate(trained, "x", Sampling(temperature=0.0))
    assert generate(trained, "x", Sampling(temperature=5.0, top_p=1e-6)) == likeliest
    before = torch.random.get_rng_state()
    texts = [generate(trained, "x", Sampling(temperature=5.0, seed=seed)) for seed in (0, 1, 2, 0)]
    assert len(set(texts)) == 3
    assert texts[0] == texts[3]
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_loss_is_that_of_the_trainer_on_its_own_validation_text(saved: Saved, tmp_path: Path, atoll) -> None:
    trained = open_trained(saved.output)
    options = ReadingOptions(cache=tmp_path / "cache", hub_headers={})
    validation = open_corpus(saved.manifest.data, ByteTokenizer(), options, 1).validation
    expected = evaluate(trained.model, validation, 32, 4)
    found = json.loads(atoll("evaluate", saved.output, "--sequences", 32, "--json", "--device", "cpu"))
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert found["round"] == 7
    own = tmp_path / "own.txt"
    own.write_text("abcd" * 64)
    one = measure(trained, [str(own)], 4)
    assert one.tokens == 4 * 16
    assert one.bits_per_byte == pytest.approx(one.loss / math.log(2))  # a byte is a token


def test_what_holds_no_model_is_refused_with_the_remedy(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no model: neither config"):
        open_trained(tmp_path / "empty")
    with pytest.raises(UserError, match="is no folder"):
        open_trained(tmp_path / "nothing")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no model that can be loaded"):
        open_trained(tmp_path / "broken")
    other = manifest_of(name="fedavg")
    keep_manifest(saved.checkpoint.parent, other)
    with pytest.raises(UserError, match=f"is the manifest of run {other.run_id[:16]}, not of"):
        open_trained(saved.output)
    (saved.checkpoint.parent / RUN_FILE).unlink()
    with pytest.raises(UserError, match="manifest of the run"):
        open_trained(saved.output)
    inventory = saved.checkpoint / INVENTORY_FILE
    inventory.write_bytes(inventory.read_bytes()[:-20])
    with pytest.raises(UserError):
        open_trained(saved.checkpoint)


@pytest.mark.parametrize("flag", ["--max-new-tokens 0", "--temperature -1", "--top-p 0", "--top-p 1.5"])
def test_sampling_has_limits(saved: Saved, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", str(saved.output), "--prompt", "x", *flag.split()])
    assert caught.value.code == 2
    assert flag.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "said"), [
    (("--files", "x"), "--files is for text, and --tasks are not scored on it"),
    (("--sequence-length", "8"), "--sequence-length is for text"),
    (("--sequences", "8"), "--sequences is for text"),
], ids=lambda one: str(one[0]))  # fmt: skip
def test_flags_that_scoring_would_ignore_are_refused(flags, said, capsys, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(tmp_path), "--tasks", "colours", *flags])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--limit", "3"), ("--task-folder", "x")], ids=lambda one: str(one[0]))
def test_flags_of_tasks_need_tasks(flags, capsys, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(tmp_path), *flags])
    assert f"{flags[0]} is for --tasks" in capsys.readouterr().err


def test_the_checkpoint_of_a_script_says_what_it_lacks(tmp_path: Path, capsys) -> None:
    manifest = manifest_of().model_dump(mode="json") | {"model": {"layout": "0" * 64}}
    saved = Saved(tmp_path / "peer", manifest_of(), published=RunManifest.model_validate(manifest))
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", str(saved.output), "--to", str(tmp_path / "model")])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "names no architecture of transformers" in said
    assert "swarm.take_result()" in said
    assert not (tmp_path / "model").exists()
