"""What all pages of this folder start from: replicas that train, and nothing of how they average.

A page is a function of a list of replicas. Vectors are flat fp32 tensors of all P parameters. The inner optimizer is
AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) unless the page says Muon (Jordan et al. 2024; the size of its step
as in arXiv 2502.16982).
"""

import copy
import math

import torch


class Replica:
    """One peer: `x` are its parameters [P], `gradient` that of its next batch, `update` a step of its optimizer.

    gradient_at(x, batch) -> the mean gradient [P]; batches: endless; optimizer(x): `AdamW` or `Muon` below.
    """

    def __init__(self, x, gradient_at, batches, optimizer):
        self.x, self.gradient_at, self.batches = x.clone(), gradient_at, iter(batches)
        self.optimizer, self.tokens = optimizer(self.x), 0
        self.lr, self.shapes = self.optimizer.lr, self.optimizer.shapes

    def gradient(self, batch=None, at=None):
        batch = next(self.batches) if batch is None else batch
        self.tokens += len(batch)
        return self.gradient_at(self.x if at is None else at, batch)

    def update(self, g):
        self.optimizer.step(g)

    def step(self):
        self.update(clip(self.gradient()))


def clip(g, most=1.0):
    """Scaled to a norm of at most `most`."""
    return g * min(1.0, most / (float(g.norm()) + 1e-6))


def tensors(x, shapes):
    """The flat vector as views of the model's tensors."""
    return [part.view(shape) for part, shape in zip(x.split([math.prod(s) for s in shapes]), shapes, strict=True)]


class AdamW:
    """torch.optim.AdamW on a flat vector, whose matrices decay; `own` limits it to some of the tensors."""

    def __init__(self, x, shapes, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, own=None):
        self.shapes, self.lr, self.own = shapes, lr, own or range(len(shapes))
        self.parts = [tensors(x, shapes)[i] for i in self.own]
        groups = [{"params": [p for p in self.parts if p.dim() > 1], "weight_decay": weight_decay},
                  {"params": [p for p in self.parts if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
        self.torch = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=False)

    def step(self, g):
        gradients = tensors(g, self.shapes)
        for part, i in zip(self.parts, self.own, strict=True):
            part.grad = gradients[i]
        self.torch.step()

    def twin(self, x):
        """The same moments, for other parameters."""
        other = AdamW(x, self.shapes, self.lr, own=self.own)
        other.torch.load_state_dict(copy.deepcopy(self.torch.state_dict()))
        return other
