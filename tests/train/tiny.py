"""A model small enough that every test of this room takes a fraction of a second."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peer.protocol.manifest import ModelSpec
from peer.train.model import build_model

VOCAB = 264
SPEC = ModelSpec(
    architecture="llama",
    config={
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    },
)


def tiny_model(seed: int = 7, **config: object) -> PreTrainedModel:
    return build_model(SPEC.model_copy(update={"config": {**SPEC.config, **config}}), 259, seed)


def random_batches(count: int, rows: int = 2, tokens: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 259, (rows, tokens), generator=generator) for _ in range(count)]
