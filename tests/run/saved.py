"""A small checkpoint of a run, as a peer writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from peer.checkpoint.store import write_checkpoint

NUMEL = 2
PLACE = {"turn": 0, "cursor": 0, "position": 3}
ORIGIN = {"text": "aa", "tokenizer": "bb", "batch_sequences": 4, "data_seed": 1}


def state_of(run_id: str, step: int, round: int) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "lineage_id": "a" * 64,
        "round": round,
        "progress": {"step": step, "round": round, "tokens": 9, "steps_since_snapshot": 1, "unsent_tokens": [3]},
        "data": {"seed": 1, "sources": [{"lanes": [PLACE], "next_lane": 0, "credit": 0}]},
        "origin": ORIGIN,
    }


def save(
    root: Path, run_id: str, step: int, round: int, *, progress: Mapping[str, Any] = MappingProxyType({}),
    second: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """`progress`, `second`: what it holds beyond those of every recipe."""
    root.mkdir(parents=True, exist_ok=True)
    outer, chain = root / "outer.safetensors", root / "chain.jsonl"
    save_file({"anchor": torch.ones(NUMEL)}, outer)
    chain.write_bytes(b"")
    tensors = {"inner": {"parameters": torch.zeros(NUMEL)}, "optimizer": {"layer.exp_avg": torch.zeros(NUMEL)}}
    if second:
        tensors["second"] = dict(second)
    state = state_of(run_id, step, round)
    state["progress"] |= progress
    return write_checkpoint(root, step, tensors, state, (outer, chain), keep=9)
