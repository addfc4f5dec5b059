"""The `atoll` command as it is typed, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.cli import main

ROOT = Path(__file__).parents[2]
MANIFEST = """\
name: tiny
seed: 3
model:
  architecture: llama
  config: {vocab_size: 264, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 2, max_position_embeddings: 16, tie_word_embeddings: true}
data: {sequence_length: 16, validation_fraction: 0.2}
inner: {batch_sequences: 1, warmup_steps: 0, learning_rate: 0.01}
recipe: {name: diloco, steps_per_round: 2, compressor: int8}
"""
STEP_TOKENS = 16
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGRUVh7v6PYnCvLMnaWmjfr2hGjTFTgAnfRTG5i1iwqpn"


def atoll(*argv):
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in argv])
    return caught.value.code


def figures(path):
    """The rows of a report without what depends on the machine's speed."""
    return [
        {key: value for key, value in row.items() if key != "wall_seconds"}
        for row in json.loads(path.read_text())["rows"]
    ]
