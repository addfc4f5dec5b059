"""One rank of `benchmarks.devices`: steps of a peer and of plain torch in alternation, on the same batches."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures import median
from peer.link.shared_vectors import SharedVectors
from peer.outer.state.carry import carry_progress_
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec, ModelSpec
from peer.system.death_signal import die_with_parent
from peer.train.batch import Batch
from peer.train.compute import Compute
from peer.train.model import build_model
from peer.train.optim import build_optimizer
from peer.train.rank_part import RankPart
from peer.train.ranks import ALONE, Ranks
from peer.train.sharding import place
from peer.train.step import Trainer

RATE = 1e-4


def main() -> None:
    """Print the seconds of each step, and of each pause, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_rank")
    for name in ("rank", "count", "parent", "hidden", "layers", "rows", "tokens", "pairs", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("device", "store"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--system", choices=("both", "ours", "plain"), default="both")
    at = parser.parse_args()
    die_with_parent(at.parent)
    torch.set_num_threads(1)
    device = torch.device(at.device)
    ranks = ALONE if at.count == 1 else Ranks.connect(at.rank, at.count, device, at.store, at.sharded)
    systems: dict[str, Callable[[Tensor], float]] = {}
    found: dict[str, Any] = {}
    if at.system != "plain":
        systems["ours"], pauses = _ours(at, device, ranks)
        found |= pauses
    if at.system != "ours":
        systems["plain"] = _plain(at, device, ranks)
    found |= {name: [] for name in systems}
    generator = torch.Generator().manual_seed(1)
    for pair in range(at.pairs + 1):
        batches = [torch.randint(3, 1000, (at.rows, at.tokens + 1), generator=generator) for _ in range(at.steps)]
        for name, step in systems.items():
            ranks.barrier()
            began = time.perf_counter()
            losses = [step(batch) for batch in batches]
            if pair:  # the first one is not like the others
                found[name].append((time.perf_counter() - began) / at.steps)
            found[f"{name} loss"] = losses[-1]
    cuda = device.type == "cuda"
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated(device) if cuda else resident
    print(json.dumps({**found, "peak_mb": peak / 1e6}), flush=True)
    ranks.barrier()
    os._exit(0)  # as the ranks of a peer end: a thread of torch that is left may abort an interpreter that shuts down


def _model(at: argparse.Namespace) -> Any:
    config = {
        "hidden_size": at.hidden, "intermediate_size": 3 * at.hidden, "num_hidden_layers": at.layers,
        "num_attention_heads": at.hidden // 64, "num_key_value_heads": at.hidden // 64, "vocab_size": 1000,
        "max_position_embeddings": at.tokens, "tie_word_embeddings": True,
    }  # fmt: skip
    return build_model(ModelSpec(architecture="llama", config=config), 1000, 7)


def _ours(
    at: argparse.Namespace, device: torch.device, ranks: Ranks
) -> tuple[Callable[[Tensor], float], dict[str, float]]:
    """Its step, and the pauses of a round."""
    model, inner = _model(at), InnerSpec(learning_rate=RATE, warmup_steps=0, batch_sequences=at.rows)
    layout = FlatLayout.of(model)
    place(model, device, ranks)
    trainer = Trainer(model, build_optimizer(model, inner), inner, lambda: RATE, compute=Compute(ranks=ranks))
    flat = SharedVectors().empty(layout.numel)
    if not ranks.sharded:  # in a peer the other ranks write their parts into the same memory
        layout.copy_to_flat(model, flat)
    pauses = _pauses(RankPart(layout, model, ranks), flat, ranks)
    return lambda batch: trainer.step(ranks.part_of(Batch.of(batch))).loss, pauses


def _pauses(part: RankPart, flat: Tensor, ranks: Ranks) -> dict[str, float]:
    """Seconds that this rank copies its part for a hand-over and for a merge, and that both keep all ranks."""
    before, after = torch.zeros_like(flat), torch.zeros_like(flat)

    def hand_over() -> None:
        part.read(flat, 0)

    def merge() -> None:
        part.read(flat, 0)
        carry_progress_(flat, before, after)
        part.write(flat, 0)

    found = dict[str, float]()
    for name, work in (("hand_over", hand_over), ("merge", merge)):
        own, whole = [], []
        for _ in range(5):
            ranks.barrier()
            began = time.perf_counter()
            work()
            own.append(time.perf_counter() - began)
            ranks.barrier()
            whole.append(time.perf_counter() - began)
        found |= {f"{name}_s": median(own), f"{name}_of_all_s": median(whole)}
    return found


def _plain(at: argparse.Namespace, device: torch.device, ranks: Ranks) -> Callable[[Tensor], float]:
    """The loop that one writes by hand, with torch's DistributedDataParallel or fully_shard."""
    model = _model(at)
    place(model, device, ranks)
    wrapped: nn.Module = DistributedDataParallel(model) if ranks.count > 1 and not ranks.sharded else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True if device.type == "cuda" else None)
    own = at.rows // ranks.count

    def step(batch: Tensor) -> float:
        rows = batch[ranks.rank * own : (ranks.rank + 1) * own].to(device)
        logits = wrapped(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        if ranks.count > 1:
            dist.all_reduce(mean)
        return float(mean) / ranks.count

    return step


if __name__ == "__main__":
    main()
