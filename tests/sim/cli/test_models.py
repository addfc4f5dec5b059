"""Models that people bring, through `atoll simulate` and `atoll compare` as they are typed."""

from __future__ import annotations

import socket

import pytest

from peer.data.tokenizer import ByteTokenizer
from tests.sim.typed import STEP_TOKENS, atoll, figures
from tests.train.tiny import tiny_model

HEAD = "seed: 3\ndata: {sequence_length: 16, validation_fraction: 0.2}\ninner: {batch_sequences: 1, warmup_steps: 0}\n"
SIZES = "hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2"
LLAMA = f"{SIZES}, num_key_value_heads: 1, max_position_embeddings: 64"


def simulate(folder, model, *argv):
    (folder / "run.yaml").write_text(f"name: mine\n{HEAD}model: {model}\n")
    return atoll("simulate", "./run.yaml", "--train-files", "text.txt", "--peers", 2, "--tokens", 4 * STEP_TOKENS,
                 "--report", "r.json", *argv)


@pytest.mark.parametrize("model", [
    f"{{architecture: llama, config: {{{LLAMA}, rms_norm_eps: 1e-5, rope_theta: 1e6}}}}",
    f"{{architecture: llama, config: {{{LLAMA}, rope_scaling: {{rope_type: linear, factor: 2.0}}, head_dim: 8}}}}",
    f"{{architecture: gemma3_text, config: {{{LLAMA}, head_dim: 8, rope_scaling: null,\n"
    "  layer_types: [sliding_attention, full_attention]}}",
    f"{{architecture: phi3, config: {{{LLAMA}}}}}",
    "{architecture: bloom, config: {hidden_size: 16, n_layer: 2, n_head: 2}}",
    f"{{architecture: bert, config: {{{SIZES}, is_decoder: true}}}}",
], ids=["scientific", "rope", "layer types", "pad token", "eager", "decoder"])
def test_models_that_train(tiny, model):
    assert simulate(tiny, model) == 0
    (row,) = figures(tiny / "r.json")
    assert (row["status"], row["tokens"]) == ("ok", 4 * STEP_TOKENS)
    assert 4.0 < row["val_loss"] < 7.0


@pytest.mark.parametrize(("model", "parts"), [
    (f"{{architecture: bert, config: {{{SIZES}}}}}", ["depends on later tokens", "is_decoder to true"]),
    ("{architecture: musicgen}", ["musicgen cannot be trained: it is made of several language models", "another"]),
    ("{architecture: gemma4_assistant}", ["gemma4_assistant cannot be built"]),
    (f"{{architecture: phi3, config: {{{LLAMA}, pad_token_id: 32000}}}}", ["pad_token_id=32000", "vocab_size to"]),
    (f"{{architecture: llama, config: {{{SIZES}, max_position_embeddings: 8}}}}",
     ["sequence_length=16 is above the model's max_position_embeddings=8", "lower data.sequence_length"]),
    ("{pretrained: ./nowhere}", ["cannot load the model /", "/nowhere at revision"]),
])
def test_models_that_are_refused_with_the_reason(tiny, capsys, model, parts):
    assert simulate(tiny, model) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert "--network" not in message
    assert "Traceback" not in message


def test_too_few_positions_are_told_where_nothing_is_trained(tiny, capsys):
    (tiny / "run.yaml").write_text(
        f"name: mine\n{HEAD}model: {{architecture: llama, config: {{{SIZES}, max_position_embeddings: 8}}}}\n"
    )
    assert atoll("simulate", "./run.yaml", "--timing-only") == 2
    assert "sequence_length=16 is above the model's max_position_embeddings=8" in capsys.readouterr().err


@pytest.fixture
def offline(monkeypatch):
    """Whoever asks the network fails."""
    def refuse(*_):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("offline")
def test_a_pretrained_folder_is_simulated_and_compared_without_a_network(tiny):
    tiny_model().save_pretrained(tiny / "model")
    ByteTokenizer().save(tiny / "model")
    assert simulate(tiny, "{pretrained: ./model}") == 0
    assert atoll("simulate", "./run.yaml", "--timing-only", "--tokens", 4000) == 0
    (tiny / "run.yaml").write_text(
        f"name: mine\n{HEAD}model: {{pretrained: ./model}}\ntokenizer: {{kind: folder, name: ./model}}\n"
    )
    assert atoll("compare", "diloco", "--manifest", "./run.yaml", "--train-files", "text.txt", "--peers", 2,
                 "--tokens", 4 * STEP_TOKENS, "--report", "c.json", "--jobs", 1, "--baseline", "ddp") == 0
    assert [row["status"] for row in figures(tiny / "c.json")] == ["ok", "ok"]
