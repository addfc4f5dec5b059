"""What the organiser has decided for this run: the newest control record that this node has seen, on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from peer.errors import ProtocolError
from peer.protocol.control import Control, open_control
from peer.protocol.manifest import RoundSpec, RunManifest
from peer.system.clock import Clock
from peer.system.output_files import replace_file

log = logging.getLogger(__name__)
FILE_NAME, CHAIN_NAME = "control.bin", "chain.jsonl"


def history_folder(folder: Path, run_id: str) -> Path:
    """Where a node keeps what it knows of a run's course, in its own folder."""
    return folder / "history" / run_id[:16]


class RunControl:
    """Keeps the newest control record of a run, and says what holds by it.

    Args:
        folder: of the run's history.
        organiser: peer id of the manifest's signer.
        clock: wall-clock seconds.

    Attributes:
        path: of the file that keeps it.
        newest: the record, None before the first.
        kept: whether it is on disk.
        on_change: called with each newer record.
    """

    def __init__(
        self, folder: Path, run_id: str, organiser: str, rounds: RoundSpec, clock: Clock = time.time
    ) -> None:
        self.path, self.run_id, self.organiser = folder / FILE_NAME, run_id, organiser
        self._rounds, self._clock = rounds, clock
        self.newest: Control | None = None
        self.sealed: bytes | None = None
        self._refused: bytes | None = None  # of the file, so that it is reported once
        self.kept = True
        self.on_change: Callable[[Control], None] = lambda _: None
        self.reload()

    @classmethod
    def of(cls, folder: Path, manifest: RunManifest, organiser: str) -> RunControl:
        """That of a run."""
        return cls(folder, manifest.run_id, organiser, manifest.rounds)

    def reload(self) -> None:
        """Take what is on disk, which may be expired: this node has obeyed it before."""
        try:
            blob = self.path.read_bytes()
            if blob not in (self.sealed, self._refused):
                self._refused = blob
                self._take(blob, open_control(blob, self.run_id, self.organiser))
        except FileNotFoundError:
            pass
        except (OSError, ProtocolError) as error:
            log.warning("%s is not used: %s", self.path, error)

    def offer(self, blob: bytes) -> bool:
        """Take a record that is newer than the one here; True if it was.

        Raises:
            ProtocolError: it is not a record of this run by its organiser, or has expired.
        """
        control = open_control(blob, self.run_id, self.organiser, self._clock())
        if blob == self.sealed or not self._take(blob, control):
            return False
        self.kept = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, blob)
        except OSError as error:
            log.warning("the control record is not kept: %s", error)
        else:
            self.kept = True
        return True

    def _take(self, blob: bytes, control: Control) -> bool:
        if self.newest is not None and control.serial <= self.newest.serial:
            return False
        self.newest, self.sealed = control, blob
        self.on_change(control)
        return True

    @property
    def is_kept(self) -> bool:
        """Whether the file exists, whatever it holds."""
        return self.path.exists()

    @property
    def state(self) -> str:
        return self.newest.state if self.newest is not None else "running"

    @property
    def paused(self) -> bool:
        return self.state == "paused"

    @property
    def names_last_round(self) -> bool:
        """Whether the organiser has said with which round the run ends, so that all peers make that one."""
        return self.newest is not None and self.newest.rounds_total is not None

    @property
    def rounds_total(self) -> int | None:
        """Rounds of the run, if it ends."""
        return (self.newest.rounds_total if self.newest is not None else None) or self._rounds.total

    @property
    def tokens_total(self) -> int | None:
        """Committed tokens of the run, if it ends with them."""
        return (self.newest.tokens_total if self.newest is not None else None) or self._rounds.tokens_total

    def revokes(self, number: int) -> bool:
        """Whether the invitation of this number is void."""
        return self.newest is not None and number in self.newest.revoked
