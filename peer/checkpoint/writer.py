"""Checkpoints written while training continues."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from peer.checkpoint.store import write_checkpoint


class CheckpointWriter:
    """Copies what it is given and writes it on a thread, one checkpoint at a time, in order."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None
        self._taken: Path | None = None

    def part(self, step: int) -> Path:
        """A new folder, for the files that another process adds to the checkpoint of this step; see `submit`.

        Earlier ones are removed, but for that of the checkpoint that is being written.

        Raises:
            OSError: it cannot be made.
        """
        self.remove_parts()
        folder = self._root / f"outer-{step}.part"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def submit(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any],
        part: Path | None = None,
    ) -> None:
        """Start writing; waits first for the checkpoint before, so that at most one copy is in memory.

        Args:
            part: whose files belong to the checkpoint, which takes them.

        Raises:
            CheckpointError: the checkpoint before could not be written. This one is not started.
            OSError: `part` cannot be read.
        """
        self.wait()
        snapshot = {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
            for stem, named in tensors.items()
        }
        extra_files = tuple(sorted(part.iterdir())) if part is not None else ()
        self._taken = part
        self._pending = self._thread.submit(
            write_checkpoint, self._root, step, snapshot, copy.deepcopy(dict(state)), extra_files, self._keep
        )

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written, for which `submit` would wait."""
        return self._pending is not None and not self._pending.done()

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
            self.remove_parts()

    def remove_parts(self) -> None:
        """Checkpoints that were finished took the files; the others are not written any more."""
        busy = self._taken if self._pending is not None and not self._pending.done() else None
        for folder in self._root.glob("outer-*.part"):
            if folder != busy:
                shutil.rmtree(folder, ignore_errors=True)
