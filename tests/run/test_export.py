"""What `atoll join` exports at the end, as another program loads it."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer.checkpoint.export import export_model
from peer.data.tokenizer import load_tokenizer
from peer.genesis import build_initial_model
from peer.protocol.manifest import RunManifest
from tests.train.architectures import tiny_config

PROMPT = "def h\u00e9llo():"


@pytest.mark.parametrize("architecture", ["llama", "mistral", "mixtral", "phi3", "olmo2", "qwen2", "qwen3_moe", "gpt2"])
def test_an_exported_byte_model_goes_on_with_a_prompt(tmp_path, architecture):
    spec = {"architecture": architecture, "config": tiny_config(architecture)}
    manifest = RunManifest.model_validate({"name": "a", "model": spec})
    ours = load_tokenizer(manifest.tokenizer)
    path = export_model(build_initial_model(manifest, ours), ours, tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ours.encode(PROMPT).tolist()
    assert model.generation_config.eos_token_id == ours.eos_id == tokenizer.eos_token_id
    out = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokenizer.decode(out[0], skip_special_tokens=True).startswith(PROMPT)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 3
