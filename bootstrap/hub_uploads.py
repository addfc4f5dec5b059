"""Puts the exported model of a run on the hub, every few rounds: in a child, so that nothing there stops the node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from peer.swarm.state.run_control import RunControl
from peer.swarm.state.snapshot_file import SnapshotFile
from peer.swarm.state.store import StateStore

log = logging.getLogger(__name__)
RETRY_S = 300.0
TIMEOUT_S = 6 * 3600.0
MAX_SAID = 1000


@dataclass
class HubUploads:
    """Uploads of one run, one at a time.

    Attributes:
        store: the archive's.
        control: says with which round the run ends: the last state is uploaded as well.
        home: the run's folder, with the files of its tokenizer.
        name: of the repository.
        every: rounds.
        address: of this node.
    """

    store: StateStore
    control: RunControl
    home: Path
    name: str
    every: int
    address: str
    _uploaded: int = 0  # the round of the newest

    async def run(self) -> None:
        """Until it is cancelled. The first look finds the state that an earlier process may not have uploaded."""
        while True:
            timing = self.store.timing
            await asyncio.sleep(timing.recheck_s if not self._due or await self._upload() else RETRY_S)

    @property
    def _due(self) -> bool:
        round, last = self.store.position.round, self._uploaded
        due = round // self.every > last // self.every or round == self.control.rounds_total
        return self.store.valid and round > last and due

    async def _upload(self) -> bool:
        try:
            file = await self.store.snapshot_cache.offer(None, self.store.position.round)
            if file is None:
                raise OSError("the archive could not write its snapshot")
            with file.reading() as descriptor:
                address = await self._run_child(file, descriptor)
        except (OSError, TimeoutError) as error:
            said = str(error) or "it takes too long"
            log.error("the model is not on the hub as %s, the next try is in %.0f s: %s", self.name, RETRY_S, said)
            return False
        self._uploaded = file.meta.round
        log.info("the model of round %d is at %s", self._uploaded, address)
        return True

    async def _run_child(self, file: SnapshotFile, descriptor: int) -> str:
        """The address of the repository.

        Raises:
            OSError: the child failed; its last words.
            TimeoutError: it takes too long.
        """
        meta = file.meta
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "peer.use.upload_state", "--state", f"/proc/self/fd/{descriptor}",
            "--vectors", str(1 + meta.num_buffers), "--home", str(self.home),
            "--run-id", self.control.run_id, "--round", str(meta.round), "--lineage-id", meta.lineage_id,
            "--name", self.name, "--address", self.address, "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
        )  # fmt: skip
        try:
            told, complained = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                child.kill()
            await child.wait()
        if child.returncode:
            said = complained.decode(errors="replace").strip()
            raise OSError(said[-MAX_SAID:] or f"the child ended with code {child.returncode}")
        return told.decode(errors="replace").strip()[-MAX_SAID:]
