"""A script of one's own on several devices, as one peer: DistributedDataParallel, or FSDP2 with --fsdp.

The run is that of examples/own_loop.py with another model:

    python examples/torchrun_loop.py --init digits
    atoll-bootstrap digits/run.yaml
    torchrun --nproc-per-node 2 examples/torchrun_loop.py --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

Every rank makes the same calls of `swarm`; rank 0 alone has an agent.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import atoll

MANIFEST = """\
name: digits
model: {weights: WEIGHTS}
recipe: {name: diloco, compressor: int8, steps_per_round: 20}
inner: {batch_sequences: 8}
data: {sequence_length: 8}
rounds: {total: ROUNDS}
trust: {identity_work: 0}
"""
ROWS = 64  # of a step, whatever the number of ranks
DIGITS = torch.randn(10, 28 * 28, generator=torch.Generator().manual_seed(0))  # what each digit looks like


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (ROWS,), generator=generator)
    return DIGITS[labels] + 4.0 * torch.randn(ROWS, 28 * 28, generator=generator), labels


def train(arguments: argparse.Namespace, rank: int, count: int) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    model = build().to(device)
    if arguments.fsdp:
        fully_shard(model)
    elif count > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(arguments.seed)  # the same batches on all ranks of a peer
    losses, own = [], slice(rank * ROWS // count, (rank + 1) * ROWS // count)
    with atoll.Swarm(arguments.join, model, optimizer, output_dir=arguments.output_dir, save_steps=arguments.save_steps,
                     resume_from_checkpoint="latest") as swarm:
        if rank == 0:
            print(f"begins at step {swarm.step}, round {swarm.round}", flush=True)
        while not swarm.finished and len(losses) < arguments.steps:
            images, labels = (one[own].to(device) for one in batch(generator))
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            if count > 1:
                dist.all_reduce(mean)
            losses.append(mean.item() / count)
            swarm.after_step(tokens=len(labels), loss=loss.item())
    folder = Path(arguments.output_dir)
    atoll.save_weights(model, folder / "model.safetensors")  # all ranks call it, rank 0 writes
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", type=Path, metavar="DIR", help="write the weights and the manifest of a run")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="of the run, with --init")
    parser.add_argument("--join", metavar="ADDRESS", help="train with the swarm at an address")
    parser.add_argument("--fsdp", action="store_true", help="divide the model among the ranks")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the data; each peer another one")
    parser.add_argument("--steps", type=int, default=10**9, metavar="N", help="leave after so many")
    parser.add_argument("--save-steps", type=int, default=200, metavar="N", help="between two checkpoints")
    parser.add_argument("--output-dir", default="runs/digits", metavar="DIR", help="of this peer")
    arguments = parser.parse_args()
    if arguments.init:
        arguments.init.mkdir(parents=True, exist_ok=True)
        weights = arguments.init / "initial.safetensors"
        atoll.save_weights(build(), weights)
        text = MANIFEST.replace("WEIGHTS", str(weights)).replace("ROUNDS", str(arguments.rounds))
        (arguments.init / "run.yaml").write_text(text)
        return
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group()
        train(arguments, dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        train(arguments, 0, 1)


if __name__ == "__main__":
    main()
