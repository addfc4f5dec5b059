"""The named peer of `benchmarks.rounds`: PyTorch's own all-reduce over gloo, fp32, one process each."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0
WARM_UP = 3


def all_reduce_seconds(numel: int, num_processes: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` all-reduces of an fp32 vector; the slowest process counts.

    Raises:
        RuntimeError: a process said nothing in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        pipes = [context.Pipe(duplex=False) for _ in range(num_processes)]
        processes = [
            context.Process(target=_member, args=(rank, num_processes, meeting, numel, repeats, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            measured = [_answer(ours) for ours, _ in pipes]
        finally:
            for process in processes:
                process.join(5.0)
                process.kill()
    return [max(seconds) for seconds in zip(*measured, strict=True)]


def _answer(pipe: Connection) -> list[float]:
    if not pipe.poll(TIMEOUT_S):
        raise RuntimeError(f"gloo: no result within {TIMEOUT_S:g} s")
    seconds: list[float] = pipe.recv()
    return seconds


def _member(rank: int, num_processes: int, meeting: str, numel: int, repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_processes)
    vector = torch.full((numel,), float(rank + 1))
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        seconds.append(time.perf_counter() - began)
        vector /= num_processes
    pipe.send(seconds[WARM_UP:])
    dist.destroy_process_group()
