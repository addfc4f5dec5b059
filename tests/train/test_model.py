from __future__ import annotations

import copy

import pytest
import torch

from peer.errors import UserError
from peer.protocol.manifest import ALONE, ModelSpec
from peer.train.model import build_model, check_trains, measure_model
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
    assert measure_model(SPEC, 259).parameters == expected
    # 100 billion parameters: only possible because nothing is allocated.
    assert measure_model(changed(hidden_size=32768, num_hidden_layers=32), 259).parameters > 10**11


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
    (changed(num_layers=3), "model.config of llama: unknown key 'num_layers'", "did you mean 'num_hidden_layers'?"),
    (changed(auto_map="x"), "'auto_map' cannot be set: code from elsewhere is never run", "remove 'auto_map'"),
    (changed(attn_implementation="kernels-community/x"), "'attn_implementation' cannot be set: .* fetch", ""),
    (changed(quantization_config={"quant_method": "gptq"}), "quantised weights cannot be trained", ""),
    (changed(rope_scaling={"rope_type": "default", "auto_map": "x"}), r"rope_scaling\.auto_map' cannot", ""),
    (changed(_name_or_path="a/b"), "'_name_or_path' cannot be set: it is private", ""),
    (changed(torch_dtype="float16"), "'torch_dtype' cannot be set: parameters are fp32", "remove"),
    (changed(model_type="gpt2"), "'model_type' cannot be set: model.architecture names it", ""),
    (changed(return_dict=False), "'return_dict' cannot be set: Atoll sets it", ""),
    (changed(temperature=0.5), "'temperature' cannot be set: it is about generating text", ""),
    (changed(to_dict=1), "unknown key 'to_dict'", ""),
    (changed(tie_word_embeddings="no"), "expected bool, got str", ""),
    (changed(rope_scaling={"rope_type": "linear"}), "Missing required keys .*factor", "rope_scaling="),
    (changed(rope_scaling=[1]), "'rope_parameters' with value", ""),
    (changed(rope_scaling={"rope_type": "weird"}), "llama cannot be built: KeyError: 'weird'", ""),
    (changed(model_type="llama", dtype="bf16", hiden_size=3), "model.config of llama: 3 keys cannot be", "'dtype'"),
    (ModelSpec(architecture="gemma3_text", config={"num_hidden_layers": 2, "layer_types": ["full_attention"]}),
     "must be equal to the number of `layer_types`", ""),
    (changed(vocab_size=258), "vocab_size=258 is smaller than the tokenizer's 259", "at least 259"),
    (changed(num_attention_heads=3), "not a multiple", "hidden_size=16"),
    (changed(num_attention_heads=0), "llama cannot be built: ZeroDivisionError", "num_attention_heads=0"),
    (changed(hidden_act="relux"), "llama cannot be built: KeyError", "hidden_act='relux'"),
    (changed(pad_token_id=999), "pad_token_id=999: must be from 0 to 263", "leave it out, set it to null, or"),
    (changed(eos_token_id=[1, 264]), r"eos_token_id=\[1, 264\]: must be from 0 to 263", "at least 265"),
    (changed(bos_token_id=-1), "bos_token_id=-1: must be from 0", ""),
    (ModelSpec(architecture="musicgen"), "musicgen cannot be trained: it is made of several", "another architecture"),
    (ModelSpec(architecture="gemma4_assistant"), "gemma4_assistant cannot be built: .* must be 0", ""),
    (ModelSpec(architecture="xmod", config={"hidden_size": 8, "num_attention_heads": 3}), "xmod cannot be built", ""),
    (ModelSpec(architecture="gemma3", config={"text_config": {"hiden_size": 3}}),
     r"model.config of gemma3: unknown key 'text_config\.hiden_size'", "hidden_size"),
    (ModelSpec(architecture="gemma3", config={"vision_config": {"num_hidden_layers": 10**9}}),
     r"vision_config\.num_hidden_layers=1000000000: must be at most 1024", ""),
    (ModelSpec(architecture="mixtral", config={"num_local_experts": 10**9}), "num_local_experts=.*at most 1024", ""),
    (changed(hidden_size="wide"), "expected int, got str", "hidden_size='wide'"),
    (changed(num_hidden_layers=10**9), "num_hidden_layers=1000000000: must be at most 1024", ""),
    (changed(num_hidden_layers=1e9), "num_hidden_layers=1000000000.0: must be at most 1024", ""),
    (ModelSpec(architecture="bart", config={"decoder_layers": 1e9}), "decoder_layers=.*at most 1024", ""),
    (changed(hidden_size=2**40), "hidden_size=1099511627776: must be at most 16777216", ""),
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
    spec = ModelSpec.model_validate({"pretrained": "./tiny"}, context=ALONE)
    loaded = build_model(spec, 259, 0)
    assert loaded.training
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), loaded.parameters(), strict=True))
    assert measure_model(spec, 259).parameters == sum(p.numel() for p in original.parameters())
    with pytest.raises(UserError, match="smaller than the tokenizer's 50000"):
        build_model(spec, 50000, 0)
    (tmp_path / "tiny" / "model.safetensors").rename(tmp_path / "tiny" / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"cannot load the model {tmp_path / 'tiny'}"):
        build_model(spec, 259, 0)


def test_sequences_must_fit_the_positions():
    check_trains(SPEC, tiny_model(), 32)
    with pytest.raises(UserError, match="sequence_length=33 is above the model's max_position_embeddings=32"):
        check_trains(SPEC, tiny_model(), 33)


def test_a_trial_leaves_the_model_and_the_randomness_as_they_were():
    model = tiny_model()
    torch.manual_seed(5)
    before, state = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    check_trains(SPEC, model, 16)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, old)


TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**TINY, "num_key_value_heads": 1}


@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta"])
def test_a_model_that_looks_ahead_is_refused_with_the_remedy(architecture):
    spec = ModelSpec(architecture=architecture, config={**TINY, "max_position_embeddings": 64})
    with pytest.raises(UserError, match="cannot be trained: what it predicts depends on later tokens") as caught:
        check_trains(spec, build_model(spec, 259, 0), 16)
    assert "is_decoder to true" in caught.value.hint
    decoder = spec.model_copy(update={"config": {**spec.config, "is_decoder": True}})
    check_trains(decoder, build_model(decoder, 259, 0), 16)


@pytest.mark.parametrize(("architecture", "default"), [("phi3", 32000), ("glm4", 151329), ("smollm3", 128004)])
def test_a_default_token_beyond_the_vocabulary_is_left_out_and_a_written_one_is_told(architecture, default):
    own = {"head_dim": 8} if architecture == "glm4" else {}
    spec = ModelSpec(architecture=architecture, config={**GROUPED, **own})
    model = build_model(spec, 259, 0)
    assert model.config.pad_token_id is None
    check_trains(spec, model, 16)
    written = spec.model_copy(update={"config": {**spec.config, "pad_token_id": default}})
    with pytest.raises(UserError, match=f"pad_token_id={default}: must be from 0 to 258") as caught:
        build_model(written, 259, 0)
    assert f"vocab_size to at least {default + 1}" in caught.value.hint
    negative = spec.model_copy(update={"config": {**spec.config, "pad_token_id": -5}})
    with pytest.raises(UserError) as caught:
        build_model(negative, 259, 0)
    assert caught.value.hint == "leave it out, or set it to null"
    wide = spec.model_copy(update={"config": {**spec.config, "vocab_size": default + 1}})
    assert build_model(wide, 259, 0).config.pad_token_id == default


def test_a_token_that_an_architecture_must_have_is_the_last_of_the_vocabulary():
    spec = ModelSpec(architecture="modernbert-decoder", config={**TINY})
    assert build_model(spec, 259, 0).config.pad_token_id == 258


PUBLISHED = {
    "llama": {**GROUPED, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "attention_bias": False, "pretraining_tp": 1,
              "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                               "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    "gemma3_text": {**GROUPED, "head_dim": 8, "rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": None,
                    "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": None},
    "qwen3_moe": {**GROUPED, "head_dim": 8, "rope_scaling": None, "mlp_only_layers": [], "decoder_sparse_step": 1,
                  "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
                  "max_window_layers": 2, "use_sliding_window": False, "sliding_window": None},
    "phi3": {**GROUPED, "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0,
             "rope_scaling": {"type": "longrope", "long_factor": [1.0, 1.1, 2, 4], "short_factor": [1, 1, 1, 1.5]}},
    "gpt_oss": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
                "layer_types": ["sliding_attention", "full_attention"], "initial_context_length": 4096,
                "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                                 "original_max_position_embeddings": 4096, "truncate": False}},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "rope_scaling": None},
    "gemma3": {"text_config": {**GROUPED, "model_type": "gemma3_text", "head_dim": 8,
                               "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
               "vision_config": {**TINY, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_shapes_are_taken(architecture):
    spec = ModelSpec.model_validate({"architecture": architecture, "config": PUBLISHED[architecture]})
    before = copy.deepcopy(spec.config)
    model = build_model(spec, 259, 0)
    check_trains(spec, model, 16)
    assert spec.config == before  # transformers fills in the dicts that it is given; the run id must not change
    rope = PUBLISHED[architecture].get("rope_scaling")
    if rope is not None:
        assert model.config.rope_parameters["rope_type"] == rope.get("rope_type", rope.get("type"))
    if architecture == "gemma3_text":
        assert model.config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
        assert model.config.layer_types == ["sliding_attention", "full_attention"]
    if architecture == "gemma3":
        assert model.config.text_config.vocab_size == 259


def test_numbers_are_taken_as_the_kind_that_the_config_has():
    config = build_model(changed(rms_norm_eps=1e-5, rope_theta=1e6, max_position_embeddings=1e3), 259, 0).config
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 1000)
    assert type(config.max_position_embeddings) is int
    assert config.rope_parameters["rope_theta"] == 1e6
    assert build_model(changed(rms_norm_eps=1), 259, 0).config.rms_norm_eps == 1.0


@pytest.mark.parametrize(("architecture", "config"), [
    ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}), ("gemma2", {**GROUPED, "head_dim": 8}),
    ("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
])
def test_an_architecture_without_sdpa_takes_what_it_has(architecture, config):
    spec = ModelSpec(architecture=architecture, config=config)
    model = build_model(spec, 259, 0)
    assert model.config._attn_implementation == "eager"
    check_trains(spec, model, 16)
