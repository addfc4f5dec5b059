"""What all pages of this folder start from: replicas that train, and nothing of how they average.

A page is a function of a list of replicas. Vectors are flat fp32 tensors of all P parameters. The inner optimizer is
AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) unless the page says Muon (Jordan et al. 2024; the size of its step
as in arXiv 2502.16982).
"""

import copy
import functools
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


class Muon:
    """Muon on the `hidden` matrices, those inside of transformer blocks; AdamW on all other tensors."""

    def __init__(self, x, shapes, lr, hidden, momentum=0.95, weight_decay=0.1):
        self.shapes, self.lr, self.momentum, self.weight_decay = shapes, lr, momentum, weight_decay
        self.matrices = {i: tensors(x, shapes)[i] for i in hidden}
        self.m = {i: torch.zeros_like(w) for i, w in self.matrices.items()}
        self.rest = AdamW(x, shapes, lr, own=[i for i in range(len(shapes)) if i not in hidden])

    def step(self, g):
        for i, w in self.matrices.items():
            own = tensors(g, self.shapes)[i]
            self.m[i] = self.momentum * self.m[i] + own
            turned = orthogonal(own + self.momentum * self.m[i])
            w.copy_((1 - self.lr * self.weight_decay) * w - self.lr * 0.2 * math.sqrt(max(w.shape)) * turned)
        self.rest.step(g)


def orthogonal(matrix, a=3.4445, b=-4.7750, c=2.0315):
    """Roughly U V' of U S V', by five iterations of Newton-Schulz."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def int2(v):
    """2 bits a value: its sign and one of two magnitudes, fitted to the values by two of Lloyd's steps."""
    size = v.abs()
    cut = 0.8 * size.mean() + 0.2 * size.max()
    for _ in range(2):
        large = size > cut
        low = size[~large].mean() if not large.all() else size.sum() * 0
        high = size[large].mean() if large.any() else low
        cut = (low + high) / 2
    low, high = low.bfloat16().float(), high.bfloat16().float()
    return torch.where(v < 0, -1.0, 1.0) * torch.where(size > cut, high, low)


def blocks(v, shapes, line):
    """Views of what a codec cuts: matrices into tiles with the largest sides up to 64, vectors into `line`s."""
    found = []
    for t in tensors(v, shapes):
        if t.dim() < 2:
            found += [part.view(1, -1) for part in t.split(line)]
            continue
        rows, columns = (max(d for d in range(1, 65) if side % d == 0) for side in t.shape)
        found += [part for band in t.split(rows) for part in band.split(columns, dim=1)]
    return found


@functools.cache
def cosines(n):
    """The orthonormal DCT-II as a matrix: the coefficients of a tile are cosines(rows) @ tile @ cosines(columns).T."""
    k, i = torch.arange(n).view(-1, 1), torch.arange(n)
    matrix = math.sqrt(2 / n) * torch.cos(math.pi * (2 * i + 1) * k / (2 * n))
    matrix[0] /= math.sqrt(2)
    return matrix


def inverse(coefficients):
    """The tile with these coefficients, on a grid: what cancels is 0, and has no sign."""
    rows, columns = (cosines(side).double() for side in coefficients.shape)
    tile = rows.T @ coefficients.double() @ columns
    grid = 2.0**-24 * tile.norm().clamp(min=1e-30)
    return ((tile / grid).round() * grid).float()
