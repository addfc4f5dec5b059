"""The organiser's hand: signs control records in the state folder, and renews them at the running node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peer.errors import ProtocolError, UserError
from peer.protocol.control import MAX_REVOKED, VALID_S, Control, seal_control
from peer.protocol.identity import Identity
from peer.protocol.manifest import RunManifest
from peer.protocol.problems import explain_validation
from peer.swarm.state.run_control import RunControl, history_folder
from peer.system.file_lock import FileLock, lock_folder

log = logging.getLogger(__name__)
LOOK_S = 1.0
PATIENCE_S = 10.0  # with another command that writes
RETRY_S = 60.0


class ControlSigner:
    """Signs what the organiser decides.

    Args:
        folder: of the run, at its organiser's node.
        identity: the organiser's.
        clock: wall-clock seconds.

    Attributes:
        folder: of the run's history.
    """

    def __init__(
        self, folder: Path, manifest: RunManifest, identity: Identity, clock: Callable[[], float] = time.time
    ) -> None:
        self.manifest, self.identity, self._clock = manifest, identity, clock
        self.folder = history_folder(folder, manifest.run_id)
        self.control = RunControl(
            self.folder, manifest.run_id, identity.peer_id, manifest.rounds, clock
        )

    def decide(self, **changes: Any) -> Control:
        """Sign and keep a record with these changes to the newest one.

        Raises:
            UserError: it is not one, or the disk refuses.
        """
        with self.signing():
            return self._decide(**changes)

    def _decide(self, **changes: Any) -> Control:
        self.control.reload()
        newest, now = self.control.newest, self._clock()
        if newest is None and self.control.is_kept:
            hint = f"give the organiser's key with --identity-path, or remove {self.control.path}"
            raise UserError("the control record on disk is damaged, or signed by another key", hint)
        before = newest.model_dump() if newest is not None else {"run_id": self.manifest.run_id}
        serial = max(int(now * 1000), newest.serial + 1 if newest is not None else 1)
        dated = {"serial": serial, "signed_at": now, "expires_at": now + VALID_S}
        try:
            control = Control.model_validate({**before, **changes, **dated})
            self.control.offer(seal_control(self.identity, control))
        except ValidationError as error:
            raise UserError("the change is not valid", explain_validation(error, Control)) from None
        except ProtocolError as error:
            raise UserError(str(error), "shorten the announcement") from None
        if not self.control.kept:
            raise UserError("the control record cannot be written", "check the disk of the state folder")
        return control

    def revoke(self, number: int) -> Control:
        """Make an invitation void.

        Raises:
            UserError: as many are void as a record holds.
        """
        with self.signing():
            return self._revoke(number)

    def _revoke(self, number: int) -> Control:
        self.control.reload()
        revoked = set(self.control.newest.revoked if self.control.newest is not None else ()) | {number}
        if len(revoked) > MAX_REVOKED:
            raise UserError(f"{MAX_REVOKED} invitations of this run are revoked, the most that there can be",
                            "open a new run, and invite again those who shall stay")  # fmt: skip
        return self._decide(revoked=tuple(sorted(revoked)))

    def signing(self, patience_s: float = PATIENCE_S) -> FileLock:
        """Hold what commands and the node write in turn: each reads the newest before it writes."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return lock_folder(self.folder, "state_dir", "organiser.lock")
            except UserError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    async def watch(self) -> None:
        """Take up what the organiser signs meanwhile, and renew it long before it expires; until cancelled."""
        renew_at = float("-inf")
        while True:
            self.control.reload()
            newest, now = self.control.newest, self._clock()
            if newest is not None and newest.expires_at < now + VALID_S / 2 and now >= renew_at:
                try:
                    with self.signing(patience_s=0.0):
                        self._decide()
                except UserError as error:  # a command writes, or the disk is full; the record is valid for days
                    log.warning("the control record is not renewed; next attempt in %g s: %s", RETRY_S, error)
                    renew_at = now + RETRY_S
            await asyncio.sleep(LOOK_S)
