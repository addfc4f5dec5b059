"""Two peers on one device through real rounds."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures import median
from peer.train.precision import Precision
from tests.network.bootstraps import BootstrapProcess
from tests.network.processes import JoinedPeer

ROUNDS = 3
TIMEOUT_S = 150.0


@dataclass(frozen=True, kw_only=True)
class RoundOnCard:
    """Rounds with one codec.

    Attributes:
        round_s: from the match to the new state, median.
        pause_s: the longest between two steps.
        paused_share: of the time in which a peer trained.
    """

    codec: str
    round_s: float
    pause_s: float
    paused_share: float


def round_on_card(folder: Path, device: str, precision: Precision, codec: str, *, tiny: bool) -> RoundOnCard:
    """A bootstrap and two peers until the first has made so many rounds with the other.

    Args:
        device: as of `atoll join`.
        tiny: a small model, for a CPU.
    """
    flags = ["--device", device, "--save-steps", "0", *([] if precision == "fp32" else [f"--{precision}"])]
    with closing(BootstrapProcess(folder / "bootstrap", _manifest(codec, tiny))) as bootstrap:
        names = ("one", "two")
        peers = [JoinedPeer(folder / name, bootstrap.address, *flags, env={}) for name in names]
        try:
            wanted = 1 if tiny else ROUNDS
            peers[0].wait_for(lambda: len(_together(peers[0])) >= wanted, TIMEOUT_S)
            steps = [peer.events("step") for peer in peers]
        finally:
            for peer in peers:
                peer.close()
    rounds = [event["seconds"]["total"] - event["seconds"].get("match", 0.0) for event in _together(peers[0])]
    trained_s = sum(seen[-1]["time"] - seen[0]["time"] for seen in steps)
    paused_s = sum(seen[-1]["handover_wait_s"] - seen[0]["handover_wait_s"] for seen in steps)
    return RoundOnCard(
        codec=codec, round_s=median(rounds), pause_s=max(seen[-1]["longest_handover_s"] for seen in steps),
        paused_share=paused_s / max(1e-9, trained_s),
    )  # fmt: skip


def _together(peer: JoinedPeer) -> list[dict[str, Any]]:
    return [event for event in peer.committed if len(event["members"]) == 2]


def _manifest(codec: str, tiny: bool) -> str:
    width, layers, steps = (32, 2, 10) if tiny else (768, 20, 60)
    config = {
        "vocab_size": 264, "hidden_size": width, "intermediate_size": 8 * width // 3 // 8 * 8,
        "num_hidden_layers": layers, "num_attention_heads": width // 16 if tiny else 12,
        "num_key_value_heads": width // 16 if tiny else 12, "max_position_embeddings": 256, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return yaml.safe_dump({
        "name": "card", "model": {"architecture": "llama", "config": config},
        "data": {"sequence_length": 16 if tiny else 128}, "inner": {"batch_sequences": 4 if tiny else 8},
        "recipe": {"name": "diloco", "compressor": codec, "steps_per_round": steps}, "trust": {"identity_work": 0},
    })  # fmt: skip
