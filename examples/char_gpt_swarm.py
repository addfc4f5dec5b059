"""A small GPT that learns a text letter by letter: `char_gpt.py` in a swarm, by the ten lines that `diff -w` shows.

    python examples/char_gpt_swarm.py init && atoll-bootstrap examples/char_gpt.yaml          # the organiser
    python examples/char_gpt_swarm.py book.txt gpt.safetensors /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... runs/a
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional

import atoll

LAYERS, HEADS, WIDTH, LENGTH, BATCH, STEPS = 2, 4, 64, 64, 16, 2000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.letters(ids) + self.places.weight[: ids.shape[1]]))


def batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - LENGTH, (BATCH,))
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    if sys.argv[1] == "init":
        return atoll.save_weights(model, "char_gpt.safetensors")
    torch.seed()  # each peer its own batches
    text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    with atoll.Swarm(sys.argv[3], model, optimizer, output_dir=sys.argv[4]) as swarm:
        for step in range(STEPS):
            inputs, labels = batch(text)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            swarm.after_step(tokens=inputs.numel(), loss=loss.item())
            if swarm.finished:
                break
            if step % 100 == 0:
                print(f"step {step}, loss {loss.item():.3f}", flush=True)
    save_model(model, sys.argv[2])


if __name__ == "__main__":
    main()
