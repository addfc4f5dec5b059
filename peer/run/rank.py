"""A further process of a peer with several devices: makes the same steps as rank 0, on its part of each batch."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 drains, and then stops the others
        signal.signal(number, signal.SIG_IGN)
    make_files_private()
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog(rotates=True)])
    with starting():
        import torch

        from peer.errors import UserError
        from peer.train.ranks import Ranks

    try:
        ranks = Ranks.connect(
            arguments.rank, arguments.count, torch.device(arguments.device), arguments.store, arguments.sharded
        )
        run(ranks, torch.device(arguments.device))
    except UserError as error:
        print(" ".join(error.render().split()), file=sys.stderr)
        sys.exit(2)
    logging.shutdown()
    os._exit(0)


def run(ranks: Ranks, device: Any) -> None:
    """Build what rank 0 describes, and do what it orders until it says stop."""
    from peer.run.follower import Follower

    Follower(ranks, device).follow()


if __name__ == "__main__":
    main()
