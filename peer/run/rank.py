"""A further process of a peer with several devices: makes the same steps as rank 0, on its part of each batch."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from peer.system.death_signal import die_with_parent
from peer.system.exit_signals import ending_signals
from peer.system.gc_pause import starting
from peer.system.private_files import make_files_private
from peer.telemetry.process_log import StderrLog

if TYPE_CHECKING:
    from peer.train.ranks import Ranks


def main() -> None:
    """Process entry; `peer.run.devices` starts it."""
    parser = argparse.ArgumentParser(prog="python -m peer.run.rank", description="started by `atoll join`")
    for name in ("rank", "count", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("device", "store"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--sharded", action="store_true")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    make_files_private()
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog(rotates=True)])
    with starting():
        import torch

        from peer.train.ranks import Ranks

    device = torch.device(arguments.device)
    run(lambda: Ranks.connect(arguments.rank, arguments.count, device, arguments.store, arguments.sharded), device)


def follow_torchrun(sharded: bool) -> None:
    """The same in a process of `torchrun` other than that of rank 0."""
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog()])
    with starting():
        import torch

        from peer.run.devices import torchrun_device
        from peer.train.ranks import Ranks

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    near, device = os.environ.get("GROUP_RANK", "0") == "0", torch.device(torchrun_device(os.environ))
    run(lambda: Ranks.connect(rank, count, device, "env://", sharded, near), device)


def run(connect: Callable[[], Ranks], device: Any) -> NoReturn:
    """Build what rank 0 describes, do what it orders until it says stop, and exit.

    A signal ends this process until rank 0 is there; from then on rank 0 drains, and stops the others.
    """
    from peer.errors import UserError
    from peer.run.follower import RankWorker

    _on_signals(signal.SIG_DFL)  # a handler in Python does not run while `connect` waits
    code = 2
    try:
        ranks = connect()
        _on_signals(signal.SIG_IGN)
        RankWorker(ranks, device).follow()
        code = 0
    except UserError as error:
        print(" ".join(error.render().split()), file=sys.stderr)
    except Exception as error:
        logging.getLogger(__name__).error("this rank ends", exc_info=error)
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _on_signals(handler: signal.Handlers) -> None:
    for number in ending_signals():
        signal.signal(number, handler)


if __name__ == "__main__":
    main()
