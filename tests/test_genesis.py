from __future__ import annotations

import pytest
import torch

from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.genesis import build_initial_model, built_genesis
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest, parse_manifest
from tests.network.bootstraps import DILOCO, MANIFEST

SMALL = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="")


def manifest(old: str = "", new: str = "") -> RunManifest:
    assert old in SMALL
    return parse_manifest(SMALL.replace(old, new), "run.yaml")


def test_the_first_state_follows_from_the_manifest_alone():
    (one, *_), (two, *_) = (built_genesis(RunPlan.of(manifest()), ByteTokenizer()) for _ in range(2))
    assert one.digest() == two.digest()
    assert one.numel == 264 * 16 + 16 * (4 * 16 + 3 * 16) + 3 * 16  # embedding, attention and mlp, norms
    assert [float(buffer.abs().sum()) for buffer in one.buffers] == [0.0]
    other, *_ = built_genesis(RunPlan.of(manifest("seed: 3", "seed: 4")), ByteTokenizer())
    assert other.digest() != one.digest()
    assert torch.isfinite(one.anchor).all()


def test_texts_end_with_the_tokenizers_token_unless_the_manifest_says_otherwise():
    plain = build_initial_model(manifest("eos_token_id: 1, ", ""), ByteTokenizer())
    assert (plain.config.eos_token_id, plain.generation_config.eos_token_id) == (1, 1)  # of Llama 2 it is 2
    written = build_initial_model(manifest("eos_token_id: 1, ", "eos_token_id: 5, "), ByteTokenizer())
    assert (written.config.eos_token_id, written.generation_config.eos_token_id) == (5, 5)


@pytest.mark.parametrize(("old", "new", "what"), [
    ("architecture: llama", "architecture: lllama", "unknown model architecture 'lllama'"),
    ("name: diloco", "name: diloca", "diloca"),
    ("num_attention_heads: 2", "num_attention_heads: 3", "llama cannot be built: .*not a multiple"),
    ("architecture: llama", "architecture: musicgen", "model.config of musicgen: .* keys cannot be taken"),
    ("sequence_length: 8", "sequence_length: 65", "sequence_length=65 is above .*max_position_embeddings=64"),
    ("hidden_size: 16", "hidden_size: 1048576", "a model of .* needs .* GiB; .* GiB free on cpu"),
])
def test_what_no_peer_could_join_is_refused_by_the_bootstrap_already(old, new, what):
    with pytest.raises(UserError, match=what):
        built_genesis(RunPlan.of(manifest(old, new)), ByteTokenizer())
