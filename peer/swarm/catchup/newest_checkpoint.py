"""The newest checkpoint that this node has seen, on disk: an older one never replaces it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from peer.errors import ProtocolError
from peer.protocol.checkpoints import Checkpoint, open_checkpoint
from peer.protocol.lineage import Certificate
from peer.protocol.manifest import RunManifest

log = logging.getLogger(__name__)
FILE_NAME = "checkpoint.bin"


class NewestCheckpoint:
    """Keeps one checkpoint of a run.

    Args:
        keys: peer ids that may sign checkpoints.

    Attributes:
        newest: the checkpoint, None before the first.
        introduced: where the peer whose address a newcomer was given stood: as good as a checkpoint for its start.
    """

    def __init__(self, folder: Path, run_id: str, keys: Collection[str]) -> None:
        self._path, self.run_id, self.keys = folder / FILE_NAME, run_id, frozenset(keys)
        self.newest: Checkpoint | None = None
        self.sealed: bytes | None = None
        self.introduced: Checkpoint | None = None
        try:
            self._take(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ProtocolError) as error:
            log.warning("%s is not used: %s", self._path, error)

    @classmethod
    def of(cls, folder: Path, manifest: RunManifest, organiser: str) -> NewestCheckpoint:
        """That of a run: its manifest names the keys, or its organiser's is the only one."""
        return cls(folder, manifest.run_id, manifest.trust.checkpoint_keys or (organiser,))

    def binding(self, chain: Sequence[Certificate]) -> Checkpoint | None:
        """What a node with this chain must not go back behind."""
        return self.newest or (None if chain else self.introduced)

    def offer(self, blob: bytes) -> bool:
        """Take a checkpoint that is newer than the one here; True if it was.

        Raises:
            ProtocolError: it is not a checkpoint of this run by one of the keys.
        """
        if blob == self.sealed or not self._take(blob):
            return False
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(blob)
            temporary.replace(self._path)
        except OSError as error:
            log.warning("the checkpoint is not kept: %s", error)
        return True

    def _take(self, blob: bytes) -> bool:
        _, checkpoint = open_checkpoint(blob, self.run_id, self.keys)
        if self.newest is not None and (checkpoint.round, checkpoint.serial) <= (self.newest.round, self.newest.serial):
            return False
        self.newest, self.sealed = checkpoint, blob
        return True
