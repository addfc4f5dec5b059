"""A peer of `benchmarks.wan`: `atoll join`, of which every step takes as long as on a slower computer.

    python -m benchmarks.wan_peer SECONDS_OF_A_STEP WAITS JOIN_ARGUMENTS...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peer import cli
from peer.run import join
from peer.system.gc_pause import starting

LOOK_S = 0.05


def pace(seconds: float) -> None:
    """Let no step of this process end before so many seconds."""
    from peer.train.step import Trainer

    own = Trainer.step

    def step(self: Trainer, batch: Any) -> Any:
        began = time.monotonic()
        result = own(self, batch)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return result

    Trainer.step = step  # type: ignore[method-assign]


def wait_for_rounds() -> None:
    """Let no step begin before what was handed over is in an anchor, as with DiLoCo where nothing overlaps."""
    from peer.link.sync import SwarmSync

    own = SwarmSync.after_step

    def after_step(self: SwarmSync, result: Any) -> None:
        own(self, result)
        with self._tally.waiting():
            while (self._ledger.outstanding is not None or not self._ledger.armed) and not self.finished:
                self.poll(LOOK_S)

    SwarmSync.after_step = after_step  # type: ignore[method-assign]


def main() -> None:
    """Join. What is replaced is imported where `atoll join` imports it: after its agent has begun."""
    @contextmanager
    def paced() -> Iterator[None]:
        with starting():
            yield
        pace(float(sys.argv[1]))
        if sys.argv[2] == "waits":
            wait_for_rounds()

    join.starting = paced  # type: ignore[attr-defined]
    cli.main(["join", *sys.argv[3:]])


if __name__ == "__main__":
    main()
