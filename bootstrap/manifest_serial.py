"""The serial number of an organiser's manifest, on disk: it grows whenever the manifest changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError, UserError
from peer.protocol.manifest import Digest, Name, PeerIdText, Spec
from peer.protocol.records import dump_json, parse_json

log = logging.getLogger(__name__)
FILE_NAME = "manifest-serial.json"


class Published(Spec):
    """The run that was published last, by whom, and under which serial."""

    run_id: Digest
    name: Name
    organiser: PeerIdText
    serial: Annotated[int, Field(ge=1, lt=2**53)]


def manifest_serial(
    state_dir: Path, run: tuple[str, str], organiser: str, clock: Callable[[], float] = time.time
) -> int:
    """The serial of this run's manifest: the one it had, or one above that of the run before, and not below the time
    in milliseconds, should the file be lost.

    Args:
        run: its id, and its name.

    Raises:
        UserError: the folder cannot be written.
    """
    path, (run_id, name) = state_dir / FILE_NAME, run
    before: Published | None = None
    try:
        before = parse_json(Published, path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ProtocolError) as error:
        log.warning("%s is written again: %s", path, error)
    if before is not None and before.run_id == run_id:
        return before.serial
    serial = max(before.serial + 1 if before is not None else 1, int(clock() * 1000))
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(dump_json(Published(run_id=run_id, name=name, organiser=organiser, serial=serial)))
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "check the disk") from None
    return serial
