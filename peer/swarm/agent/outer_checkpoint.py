"""The agent's half of a checkpoint: the outer state, and the chain that leads to it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from peer.link.messages import Saved
from peer.swarm.gossip.round_loop import GossipRounds
from peer.swarm.lineage.round_loop import LineageRounds


async def save_outer_state(rounds: LineageRounds | GossipRounds, path: Path) -> Saved:
    """Write the outer state and the chain that leads to it into `path` (a checkpoint being made)."""
    state = rounds.store.state

    def write() -> None:
        tensors = {"anchor": state.anchor, **{f"buffer{i}": buffer for i, buffer in enumerate(state.buffers)}}
        save_file(tensors, path / "outer.safetensors")
        rounds.store.history.write_pending()
        shutil.copyfile(rounds.store.history.chain_path, path / "chain.jsonl")

    problem = None
    async with rounds.store.still():
        try:
            await asyncio.to_thread(write)
        except (OSError, SafetensorError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        return Saved(path=str(path), round=state.round, lineage_id=state.lineage_id, problem=problem)
