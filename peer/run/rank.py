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
    ignore_signals()
    make_files_private()
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog(rotates=True)])
    with starting():
        import torch

        from peer.train.ranks import Ranks

    device = torch.device(arguments.device)
    run(lambda: Ranks.connect(arguments.rank, arguments.count, device, arguments.store, arguments.sharded), device)


def follow_torchrun(sharded: bool) -> None:
    """The same in a process of `torchrun` other than that of rank 0."""
    ignore_signals()
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog()])
    with starting():
        import torch

        from peer.run.devices import torchrun_device
        from peer.train.ranks import Ranks

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    near, device = os.environ.get("GROUP_RANK", "0") == "0", torch.device(torchrun_device(os.environ))
    run(lambda: Ranks.connect(rank, count, device, "env://", sharded, near), device)


def ignore_signals() -> None:
    """Rank 0 drains, and then stops the others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def run(connect: Callable[[], Ranks], device: Any) -> NoReturn:
    """Build what rank 0 describes, do what it orders until it says stop, and exit."""
    from peer.errors import UserError
    from peer.run.follower import RankWorker

    code = 2
    try:
        RankWorker(connect(), device).follow()
        code = 0
    except UserError as error:
        print(" ".join(error.render().split()), file=sys.stderr)
    except Exception as error:
        logging.getLogger(__name__).error("this rank ends", exc_info=error)
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
