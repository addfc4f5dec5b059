"""A script of one's own as a peer: a small convolutional network learns to tell digits drawn with noise.

The organiser writes the initial weights and a manifest, and opens the run:

    python examples/own_loop.py --init digits
    atoll-bootstrap digits/run.yaml

Everyone trains, with the address that the bootstrap prints:

    python examples/own_loop.py --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import atoll

MANIFEST = """\
name: digits
model: {weights: WEIGHTS}                 # the model is the script's; this fixes names, shapes and initial values
recipe: {name: diloco, compressor: int8, steps_per_round: 20}
inner: {batch_sequences: 8}               # nominal tokens of a step: here 8 x 8 = 64 samples
data: {sequence_length: 8}
rounds: {total: ROUNDS}
trust: {identity_work: 0}
"""
DIGITS = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))  # what each digit looks like


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 7, stride=3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 3 * 3, 10),
    )  # fmt: skip


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (64,), generator=generator)
    return DIGITS[labels] + 4.0 * torch.randn(64, 1, 28, 28, generator=generator), labels


def accuracy(model: nn.Module) -> float:
    images, labels = batch(torch.Generator().manual_seed(1))
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", type=Path, metavar="DIR", help="write the weights and the manifest of a run")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="of the run, with --init")
    parser.add_argument("--join", metavar="ADDRESS", help="train with the swarm at an address")
    parser.add_argument("--output-dir", default="runs/digits", metavar="DIR", help="of this peer")
    arguments = parser.parse_args()
    model = build()
    if arguments.init:
        arguments.init.mkdir(parents=True, exist_ok=True)
        weights = arguments.init / "initial.safetensors"
        atoll.save_weights(model, weights)
        text = MANIFEST.replace("WEIGHTS", str(weights)).replace("ROUNDS", str(arguments.rounds))
        (arguments.init / "run.yaml").write_text(text)
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator()
    generator.seed()  # each peer its own data
    with atoll.Swarm(arguments.join, model, optimizer, output_dir=arguments.output_dir,
                     resume_from_checkpoint="latest") as swarm:  # a script that is started again continues
        print(f"begins at step {swarm.step}, round {swarm.round}", flush=True)
        while not swarm.finished:
            images, labels = batch(generator)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            swarm.after_step(tokens=len(labels), loss=loss.item())
    atoll.save_weights(model, Path(arguments.output_dir) / "model.safetensors")  # what the run yields
    print(f"accuracy {accuracy(model):.3f} after round {swarm.records[-1].round if swarm.records else 0}")


if __name__ == "__main__":
    main()
