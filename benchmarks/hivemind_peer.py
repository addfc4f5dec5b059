"""A hivemind peer of `benchmarks.exchange`: its DecentralizedAverager as published. Imports no Atoll.

Timed is the all-reduce alone, inside the averager's own process: from the moment a full group is known and shares are
divided, until the last tensor has been updated. Matchmaking, retries of it and the way back to the caller do not count.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from typing import Any

import hivemind
import torch
from hivemind import compression
from hivemind.averaging import DecentralizedAverager

from benchmarks.contributions import fill, relative_error
from benchmarks.member import MemberSetup, TimedAveraging, parse_setup, processor_seconds, serve

CODECS = {
    "none": compression.NoCompression,
    "fp16": compression.Float16Compression,
    "scaled-fp16": compression.ScaledFloat16Compression,
    "uniform-8bit": compression.Uniform8BitQuantization,
    "quantile-8bit": compression.Quantile8BitQuantization,
    "blockwise-8bit": compression.BlockwiseQuantization,
}
MATCHMAKING_S = 1.0
REQUEST_TIMEOUT_S = 0.3


class TimedAverager(DecentralizedAverager):  # type: ignore[misc]
    """Notes when its last all-reduce began and ended, and what processor time the session had used before.

    `marks` is shared with the averager's process, which is forked from this one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.marks = multiprocessing.Array("d", 4, lock=False)
        super().__init__(*arguments, **options)

    async def _run_allreduce_inplace_(self, *arguments: Any, **options: Any) -> None:
        self.marks[2], self.marks[3] = processor_seconds()
        self.marks[0] = time.monotonic()
        await super()._run_allreduce_inplace_(*arguments, **options)
        self.marks[1] = time.monotonic()


class HivemindMember:
    """Implements `Member`."""

    def __init__(self, setup: MemberSetup) -> None:
        self._setup = setup
        self._vector = torch.empty(setup.numel)
        self._dht = hivemind.DHT(
            initial_peers=[setup.first] if setup.first else [], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True,
            nat_port_map=False, auto_nat=False,
        )
        self._averager = TimedAverager(
            [self._vector], self._dht, start=False, prefix="benchmark", target_group_size=setup.peers,
            min_group_size=setup.peers, min_matchmaking_time=MATCHMAKING_S, request_timeout=REQUEST_TIMEOUT_S,
            compression=CODECS[setup.codec](), allreduce_timeout=setup.timeout_s, allow_state_sharing=False,
        )
        self._averager.run_in_background(await_ready=True)
        self.address = str(self._dht.get_visible_maddrs()[0])

    def prepare(self) -> None:
        """The averager works in place."""
        with self._averager.get_tensors() as (vector,):
            fill(vector, self._setup.index, self._setup.seed)

    def meet(self, gathered: Sequence[None]) -> None:
        """It has a matchmaking of its own."""

    def average(self) -> TimedAveraging:
        """One step, and again if its matchmaking finds no full group."""
        self._averager.marks[:] = [float("nan")] * 4
        gathered = self._averager.step(gather=self._setup.index, timeout=self._setup.timeout_s, allow_retries=True)
        if gathered is None or len(gathered) != self._setup.peers:
            raise RuntimeError(f"a group of {len(gathered or ())}, not {self._setup.peers}")
        began, ended, *cpu = self._averager.marks
        return TimedAveraging(began=began, ended=ended, cpu=(cpu[0], cpu[1]))

    def check(self) -> float:
        """Its step reports success even when its codecs have raised and nothing was averaged."""
        with self._averager.get_tensors() as (vector,):
            return relative_error(vector, self._setup.peers, self._setup.seed)

    def close(self) -> None:
        """Ask the processes to end; those that do not are killed with this process's session."""
        self._averager.shutdown()
        self._dht.shutdown()


def main() -> None:
    """Process entry. Whatever happens, no process that hivemind has forked outlives this one."""
    setup, answers = parse_setup()
    torch.set_num_threads(1)
    try:
        serve(HivemindMember(setup), answers)
    except Exception:
        traceback.print_exc()
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
