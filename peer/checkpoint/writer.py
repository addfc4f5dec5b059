"""Checkpoints written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from peer.checkpoint.store import write_checkpoint


class CheckpointWriter:
    """Copies what it is given and writes it on a thread, one checkpoint at a time, in order.

    Args:
        root: as `write_checkpoint`.
        keep: as `write_checkpoint`.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def submit(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any],
        extra_files: Sequence[Path] = (),
    ) -> None:
        """Start writing; waits first for the checkpoint before, so that at most one copy is in memory.

        Raises:
            CheckpointError: the checkpoint before could not be written. This one is not started.
        """
        self.wait()
        snapshot = {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
            for stem, named in tensors.items()
        }
        self._pending = self._thread.submit(
            write_checkpoint, self._root, step, snapshot, copy.deepcopy(dict(state)), tuple(extra_files), self._keep
        )

    def wait(self) -> Path | None:
        """Until nothing is being written; the checkpoint that just finished, if any.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def close(self) -> None:
        """Finish what was submitted and end the thread.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
