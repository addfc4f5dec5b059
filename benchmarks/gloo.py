"""PyTorch's own all-reduce over gloo, fp32, one process each: the named peer of other benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contributions import fill, relative_error
from benchmarks.member import MemberSetup, TimedAveraging, parse_setup, processor_seconds, serve
from benchmarks.peers import Peers, PeersSetup
from peer.system.death_signal import die_with_parent

MODULE = "benchmarks.gloo"
WARM_UP = 3


def all_reduce_seconds(numel: int, num_processes: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` all-reduces of an fp32 vector, from the first process to begin to the last to end.

    Raises:
        PeerFailedError: a process died or said nothing in time.
    """
    with Peers(PeersSetup(module=MODULE, codec="fp32", numel=numel, peers=num_processes, seed=0)) as peers:
        return [peers.average().seconds for _ in range(WARM_UP + repeats)][WARM_UP:]


class GlooMember:
    """Implements `Member`."""

    address = ""

    def __init__(self, setup: MemberSetup) -> None:
        self._setup = setup
        self._vector = torch.empty(setup.numel)

    def prepare(self) -> None:
        """The first time, wait for the others: they are started one after another."""
        if not dist.is_initialized():
            meeting = f"file://{Path(self._setup.folder) / 'meeting'}"
            dist.init_process_group(
                "gloo", init_method=meeting, rank=self._setup.index, world_size=self._setup.peers
            )
        fill(self._vector, self._setup.index, self._setup.seed)

    def meet(self, gathered: Sequence[None]) -> None:
        """Nothing to agree on."""

    def average(self) -> TimedAveraging:
        """All-reduce in place: a sum, as gloo has no mean."""
        cpu = processor_seconds()
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(self._vector)
        return TimedAveraging(began=began, ended=time.monotonic(), cpu=cpu)

    def check(self) -> float:
        """Make it the mean."""
        self._vector /= self._setup.peers
        return relative_error(self._vector, self._setup.peers, self._setup.seed)

    def close(self) -> None:
        """No-op: gloo has no matchmaking."""
        dist.destroy_process_group()


def main() -> None:
    """Process entry."""
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    setup, answers = parse_setup()
    serve(GlooMember(setup), answers)


if __name__ == "__main__":
    main()
