from __future__ import annotations

import pytest
import torch

from peer.errors import UserError
from peer.protocol.manifest import ModelSpec
from peer.train.model import build_model, check_sequence_length, count_parameters
from tests.train.tiny import SPEC, tiny_model


def changed(**config: object) -> ModelSpec:
    return ModelSpec.model_validate({"architecture": "llama", "config": {**SPEC.config, **config}})


def test_two_builds_are_bit_identical_and_leave_the_callers_randomness_alone():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second = tiny_model(), tiny_model()
    assert torch.equal(before, torch.get_rng_state())
    weights = dict(second.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in first.named_parameters())
    assert not torch.equal(tiny_model(seed=8).get_input_embeddings().weight, first.get_input_embeddings().weight)


def test_the_model_is_fp32_sdpa_and_training():
    model = tiny_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_parameters_are_counted_without_building():
    expected = sum(parameter.numel() for parameter in tiny_model().parameters())
    assert count_parameters(SPEC, 259) == expected
    # 100 billion parameters: only possible because nothing is allocated.
    assert count_parameters(changed(hidden_size=32768, num_hidden_layers=32), 259) > 10**11


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_other_architectures_take_the_tokenizers_vocabulary(architecture):
    sizes = {
        "gpt2": {"n_embd": 8, "num_hidden_layers": 1, "n_head": 2},
        "qwen3": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "head_dim": 4, "rope_theta": 5e5},
    }
    model = build_model(ModelSpec(architecture=architecture, config=sizes[architecture]), 259, 0)
    assert model.config.vocab_size == 259
    assert model.config.num_hidden_layers == 1
    if architecture == "qwen3":
        assert model.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(("spec", "message", "hint"), [
    (ModelSpec(architecture="lllama"), "unknown model architecture 'lllama'", "did you mean 'llama'?"),
    (ModelSpec(architecture="bart-large"), "unknown model architecture", "bart"),
    (changed(num_layers=3), "unknown key 'num_layers' in model.config of llama", "did you mean 'num_hidden_layers'?"),
    (changed(auto_map="x"), "unknown key 'auto_map'", ""),
    (changed(dtype="float16"), "unknown key 'dtype'", ""),
    (changed(return_dict=False), "unknown key 'return_dict'", ""),
    (changed(vocab_size=258), "vocab_size=258 is smaller than the tokenizer's 259", "at least 259"),
    (changed(num_attention_heads=3), "not a multiple", "hidden_size=16"),
    (changed(num_attention_heads=0), "llama cannot be built: ZeroDivisionError", "num_attention_heads=0"),
    (changed(hidden_act="relux"), "llama cannot be built: KeyError", "hidden_act='relux'"),
    (changed(pad_token_id=999), "llama cannot be built", "pad_token_id=999"),
    (changed(hidden_size="wide"), "expected int, got str", "hidden_size='wide'"),
    (changed(num_hidden_layers=10**9), "num_hidden_layers=1000000000: must be at most 1024", ""),
    (ModelSpec(pretrained="no-owner/none"), "cannot load the model no-owner/none at revision 'main'", "safetensors"),
    (ModelSpec(pretrained="o/n", config={"hidden_size": 4}), r"model\.config \['hidden_size'\] cannot", "remove"),
])
def test_what_makes_no_model_is_a_users_problem(spec, message, hint):
    with pytest.raises(UserError, match=message) as caught:
        build_model(spec, 259, 0)
    assert hint in caught.value.hint


def test_a_pretrained_model_loads_from_safetensors_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original = tiny_model()
    original.save_pretrained("tiny")
    loaded = build_model(ModelSpec(pretrained="tiny"), 259, 0)
    assert loaded.training
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), loaded.parameters(), strict=True))
    assert count_parameters(ModelSpec(pretrained="tiny"), 259) == sum(p.numel() for p in original.parameters())
    with pytest.raises(UserError, match="smaller than the tokenizer's 50000"):
        build_model(ModelSpec(pretrained="tiny"), 50000, 0)
    (tmp_path / "tiny" / "model.safetensors").rename(tmp_path / "tiny" / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load the model tiny"):
        build_model(ModelSpec(pretrained="tiny"), 259, 0)


def test_sequences_must_fit_the_positions():
    check_sequence_length(tiny_model(), 32)
    with pytest.raises(UserError, match="sequence_length=33 is above the model's max_position_embeddings=32"):
        check_sequence_length(tiny_model(), 33)
