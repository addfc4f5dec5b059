"""Adapters on a pretrained base: what trains, what is written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.genesis import built_genesis
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import ModelSpec, RunManifest
from peer.protocol.pinning import check_pinned
from peer.train import adapter
from peer.train.compute import Compute
from peer.train.memory import Footprint
from peer.train.model import build_model, build_skeleton, measure_model
from peer.train.optim import build_optimizer
from peer.use.export import export
from peer.use.trained import After, Trained, of_state, open_trained
from tests.hub_cache import COMMIT, put
from tests.train.tiny import VOCAB, random_batches, tiny_model

R, HIDDEN, LAYERS = 2, 16, 2
ADAPTED = LAYERS * 2 * R * (HIDDEN + HIDDEN)  # q_proj and v_proj of each layer


def manifest(**changes: object) -> RunManifest:
    model = {
        "pretrained": "o/base", "revision": COMMIT,
        "adapter": {"r": R, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}, **changes,
    }  # fmt: skip
    return RunManifest.model_validate({
        "name": "a", "seed": 5, "model": model, "data": {"sequence_length": 16}, "recipe": {"name": "diloco"},
    })  # fmt: skip


def spec(**changes: object) -> ModelSpec:
    return manifest(**changes).model


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return put(tmp_path / "hub", "o/base", tiny_model(seed=3))


def flat_of(model: PreTrainedModel) -> torch.Tensor:
    layout = FlatLayout.of(model)
    flat = torch.empty(layout.numel)
    layout.copy_to_flat(model, flat)
    return flat


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.train(False)(input_ids=random_batches(1)[0]).logits
    return found


def test_it_trains_in_fp32_where_the_layers_below_multiply_in_bf16():
    model = tiny_model(seed=3)
    for layer in model.model.layers:
        layer.self_attn.q_proj.compute_dtype = torch.bfloat16  # as a layer of bitsandbytes in 4 bits
    adapter.add_adapter(model, spec())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == ADAPTED
    assert {parameter.dtype for parameter in trained} == {torch.float32}


def test_adapters_alone_are_the_anchor_and_follow_from_the_seed():
    torch.manual_seed(1)
    first = build_model(spec(), 259, 5)
    torch.manual_seed(2)
    second, other = build_model(spec(), 259, 5), build_model(spec(), 259, 6)
    assert FlatLayout.of(first).numel == ADAPTED
    assert FlatLayout.of(first) == FlatLayout.of(build_skeleton(spec(), 259))
    assert torch.equal(flat_of(first), flat_of(second))
    assert not torch.equal(flat_of(first), flat_of(other))
    assert all(float(one.detach().abs().max()) == 0.0 for name, one in first.named_parameters() if "lora_B" in name)
    assert torch.equal(logits(first), logits(tiny_model(seed=3)))  # B is zero: the base, to the bit
    state, base_digest, _ = built_genesis(RunPlan.of(manifest()), ByteTokenizer())
    assert torch.equal(state.anchor, flat_of(first))
    assert base_digest == adapter.base_digest(second)


def test_without_named_layers_all_linear_ones_but_the_head_are_adapted():
    names = {name.split(".lora")[0].rpartition(".")[2] for name in FlatLayout.of(
        build_model(spec(adapter={"r": R}), 259, 5)).names}  # fmt: skip
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def trained() -> Trained:
    """After two steps, so that B is not zero."""
    run = manifest()
    model = build_model(run.model, 259, run.seed)
    optimizer = build_optimizer(model, run.inner)
    before = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    for batch in random_batches(2):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters() if name in before)
    vectors = [flat_of(model), torch.zeros(ADAPTED)]
    return of_state(RunPlan.of(run), vectors, After(round=2, lineage_id="ab", origin="here"), Path())


def test_an_export_is_an_adapter_that_peft_loads_or_a_merged_model_that_transformers_loads(tmp_path):
    expected = logits(trained().model)
    assert not torch.allclose(expected, logits(tiny_model(seed=3)), atol=1e-4)
    folder = export(trained(), tmp_path / "adapter", "fp32")
    sizes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 4 * ADAPTED < sizes < 4 * ADAPTED + 4096
    assert "library_name: peft" in (folder / "README.md").read_text()
    theirs = PeftModel.from_pretrained(tiny_model(seed=3), folder)
    assert torch.allclose(logits(theirs), expected, atol=1e-6)
    assert torch.allclose(logits(open_trained(folder).model), expected, atol=1e-6)
    merged = export(open_trained(folder), tmp_path / "merged", "fp32", merged=True)
    whole = AutoModelForCausalLM.from_pretrained(merged)
    assert not adapter.has_adapter(whole)
    assert torch.allclose(logits(whole), expected, atol=1e-6)
    half = export(trained(), tmp_path / "half", "bf16", merged=True)
    assert "library_name: transformers" in (half / "README.md").read_text()
    with pytest.raises(UserError, match="--merged: this model has no adapter"):
        export(open_trained(merged), tmp_path / "again", "fp32", merged=True)


def test_a_base_with_other_values_is_refused(base):
    digest = adapter.base_digest(build_model(spec(), 259, 5))
    assert build_model(spec(base=digest), 259, 5).training
    tiny_model(seed=4).save_pretrained(base)
    with pytest.raises(UserError, match=r"o/base at 0123\S+ differ from the organiser's"):
        build_model(spec(base=digest), 259, 5)


def test_a_manifest_from_the_network_names_the_base():
    with pytest.raises(UserError, match=r"does not say which model\.base"):
        check_pinned(manifest(), "the swarm")
    check_pinned(manifest(base="0" * 64), "the swarm")


@pytest.mark.parametrize("changes", [
    {"pretrained": None, "architecture": "llama"}, {"adapter": {"r": 0}}, {"adapter": {"kind": "other"}},
    {"adapter": {"target_modules": [".*"]}},
])  # fmt: skip
def test_adapters_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValidationError):
        manifest(**changes)


def test_layers_that_the_model_has_not_are_named():
    with pytest.raises(UserError, match="no_such"):
        build_model(spec(adapter={"target_modules": ["no_such"]}), 259, 5)


def test_peft_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="peft is not installed"):
        build_model(spec(), 259, 5)


def test_the_fit_counts_the_base_once_and_the_adapter_as_what_trains():
    size = measure_model(spec(), 259)
    whole = sum(one.numel() for one in tiny_model().parameters())
    assert (size.parameters, size.frozen, size.trained) == (whole + ADAPTED, whole, ADAPTED)
    assert size.vocab_size == VOCAB
    needed = Footprint.of(size, 16, torch.device("cpu"), Compute())
    assert needed.training == 4 * whole + 16 * ADAPTED
    assert needed.agent == 20 * ADAPTED
