"""Work in several processes that make steps together, forked from the test's: its imports are done."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peer.train.ranks import Ranks


def in_ranks(
    count: int, folder: Path, work: Callable[[Ranks], Any], *, sharded: bool = False, near: bool = True
) -> list[Any]:
    """What the work returns in each rank, as JSON values; `near`: all are as on one machine."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            _work_and_exit(rank, count, folder, work, (sharded, near or rank == 0))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0] * count, [path.read_text() for path in sorted(folder.glob("failed*"))]
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(count)]


def _work_and_exit(rank: int, count: int, folder: Path, work: Callable[[Ranks], Any], how: tuple[bool, bool]) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        ranks = Ranks.connect(rank, count, torch.device("cpu"), f"file://{folder}/store", *how)
        found = work(ranks)
        (folder / f"found{rank}").write_text(json.dumps(found))
        ranks.barrier()
        code = 0
    except BaseException:
        (folder / f"failed{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)
