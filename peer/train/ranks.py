"""The processes of one peer with several devices, and what they add up together. See docs/devices.md.

Rank 0 is the trainer. The others make the same steps on other sequences of the same batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from peer.train.arrivals import Arrivals
from peer.train.batch import IGNORED, Batch

FOREVER = timedelta(days=3650)  # rank 0 may wait for its swarm; it sees a rank that ends, or that the others wait for
BUCKET = 2**24  # gradients that are added up at a time: 64 MiB
FILE = "file://"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Ranks:
    """All processes of a peer, as one of them sees them.

    Args:
        rank: of this one.
        count: how many there are.
        sharded: each holds a part of every parameter (FSDP2); else each holds all (DDP).
        control: the group for what is no gradient, on the CPU.

    Attributes:
        near: how many are on the machine of rank 0, whose memory they map; they have the lowest numbers.
        far: the group of rank 0 and those on other machines; None where there are none.
        arrivals: where rank 0 sees which rank the others wait for; None under `torchrun`.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, sharded: bool = False, control: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.count, self.sharded, self.control, self.near = rank, count, sharded, control, count
        self.far: dist.ProcessGroup | None = None
        self.arrivals: Arrivals | None = None

    @classmethod
    def connect(
        cls, rank: int, count: int, device: torch.device, store: str, sharded: bool = False, near: bool = True
    ) -> Ranks:
        """Meet the other ranks; returns when all are there.

        Args:
            store: where they meet, as a URL of torch.distributed.
            near: this one is on the machine of rank 0.
        """
        if store.startswith(FILE):  # one machine: no other one can reach these sockets
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(BACKENDS[device.type], init_method=store, rank=rank, world_size=count, timeout=FOREVER)
        ranks = cls.met(sharded, near)
        if store.startswith(FILE):
            ranks.arrivals = Arrivals(arrivals_beside(store), count)
        return ranks

    @classmethod
    def met(cls, sharded: bool, near: bool) -> Ranks:
        """All processes of the default group of torch.distributed; each makes this call."""
        count = dist.get_world_size()
        ranks = cls(dist.get_rank(), count, sharded, dist.new_group(backend="gloo", timeout=FOREVER))
        (ranks.near,) = ranks.totals([near])
        if ranks.near < count:
            ranks.far = dist.new_group([0, *range(ranks.near, count)], backend="gloo", timeout=FOREVER)
        return ranks

    @property
    def is_far(self) -> bool:
        """Whether this one is on another machine than rank 0."""
        return self.rank >= self.near

    @property
    def mean_of(self) -> int:
        """How many gradients torch takes the mean of, by itself, in a backward pass; wanted is their sum."""
        return self.count if self.sharded else 1

    def rows(self, batch_sequences: int) -> int:
        """Sequences of a step that each rank learns from."""
        return -(-batch_sequences // self.count)

    def part_of(self, batch: Batch) -> Batch:
        """The sequences of this rank; as many for each, so where some are missing nothing is learned from the last.

        Its `tokens` are those of the whole batch, over which the mean is taken.
        """
        if self.count == 1:
            return batch
        own, rows = self.rows(len(batch.inputs_bt)), len(batch.inputs_bt)
        places = torch.arange(self.rank * own, (self.rank + 1) * own)
        there = places.clamp(max=rows - 1)
        labels_bt = batch.labels_bt[there]
        labels_bt[places >= rows] = IGNORED
        positions_bt = None if batch.positions_bt is None else batch.positions_bt[there]
        return Batch(batch.inputs_bt[there], labels_bt, positions_bt).counting(batch.tokens)

    def arrive(self) -> None:
        """To be called by all wherever one may wait for another."""
        if self.arrivals is not None:
            self.arrivals.arrive(self.rank)

    def barrier(self) -> None:
        """Wait for all."""
        self.largest([0])

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Of each number the largest of all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """Of each number the sum over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def _reduced(self, numbers: Sequence[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self.count == 1:
            return list(numbers)
        self.arrive()
        vector = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(vector, how, group=self.control)
        return [int(one) for one in vector.tolist()]

    def agree(self, problem: int, parameters: Sequence[nn.Parameter]) -> int:
        """The largest problem of any rank (0: none). Without one, a parameter with a gradient anywhere has one here.

        Ranks that share a model have none to agree on: what one of them cannot do ends all.
        """
        if self.count == 1 or self.sharded:
            return problem
        worst, *anywhere = self.largest([problem, *(int(parameter.grad is not None) for parameter in parameters)])
        if worst == 0:
            for parameter, wanted in zip(parameters, anywhere, strict=True):
                if wanted and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return worst

    def add_up(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Replace gradients by their sums over all ranks, to the same bits on each; -> the sum of the losses."""
        if self.count == 1:
            return loss
        self.arrive()
        total = loss.float().reshape(1).clone()
        gradients = [] if self.sharded else [one.grad for one in parameters if one.grad is not None]
        for bucket in _buckets([total, *gradients]):
            flat = torch.cat([one.reshape(-1) for one in bucket])
            dist.all_reduce(flat)
            for one, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                one.copy_(part.view(one.shape))
        return total[0]


ALONE = Ranks()


def arrivals_beside(store: str) -> Path:
    """The file in which the ranks that meet at a file count how far they are."""
    return Path(store.removeprefix(FILE)).with_name("arrivals")


def whole(tensor: Tensor) -> Tensor:
    """A tensor that all ranks hold parts of, in full on each; another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket, size = list[Tensor](), 0
    for one in tensors:
        if bucket and size + one.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += one.numel()
    yield bucket
