"""The initial state of a run: built by a child process once, and kept for the next start of this node.

Imports nothing heavy: the child is at work while this process imports torch and hivemind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from pydantic import Field

from peer.errors import ProtocolError, UserError
from peer.protocol import hashing
from peer.protocol.manifest import Digest, RunManifest, Spec
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import SnapshotMeta

if TYPE_CHECKING:
    from peer.swarm.state.snapshot_file import SnapshotFile

log = logging.getLogger(__name__)
TIMEOUT_S = 600.0


class Figures(Spec):
    """The metadata that is stored with the initial state.

    Attributes:
        manifest: SHA-256 of the manifest that it was built from, without a genesis.
        digest: of the state.
        chunks: digests of its chunks.
    """

    manifest: Digest
    digest: Digest
    numel: Annotated[int, Field(ge=1)]
    num_buffers: Annotated[int, Field(ge=0)]
    chunks: tuple[Digest, ...]


@dataclass(frozen=True)
class Genesis:
    """The initial state as a file, and the manifest that names its digest."""

    manifest: RunManifest
    snapshot: SnapshotFile


class GenesisBuild:
    """Finds the initial state in the node's folder, or builds it there.

    An existing state is kept, not built again: another version of a library may yield other parameters, and a restarted
    node must not begin another run.

    Args:
        manifest: the run, which may name its genesis.
        manifest_path: its file; the child reads it once more.
        state_dir: the node's folder.
    """

    def __init__(self, manifest: RunManifest, manifest_path: Path, state_dir: Path) -> None:
        self._manifest, self._manifest_path = manifest, manifest_path
        self._state_path, self._figures_path = state_dir / "genesis.bin", state_dir / "genesis.json"
        self._built_from = manifest.model_copy(update={"genesis": None}).run_id
        self._kept = self._read_figures()
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the child, if anything has to be built."""
        if self._kept is None:
            self._child = await self._start_child()

    async def finish(self) -> Genesis:
        """Wait for the child.

        Raises:
            UserError: the model cannot be built, does not fit this machine, or is not the one that the manifest names.
        """
        kept = self._kept
        if kept is not None and await self._is_whole(kept):
            log.info("the initial state in %s is this run's", self._state_path)
            return self._genesis(kept)
        built = await self._built(self._child or await self._start_child())
        if self._manifest.genesis not in (None, built.digest):
            raise UserError(
                f"the manifest names genesis {self._manifest.genesis}; this machine builds {built.digest}",
                "remove 'genesis' from the file to start a new run",
            )
        if kept is not None and kept.digest != built.digest:
            raise UserError(
                f"the run began with {kept.digest}; {self._state_path} is damaged; this machine builds {built.digest}",
                f"restore the file, or the libraries' versions; to start a new run, remove {self._figures_path}",
            )
        self._write_figures(built)
        return self._genesis(built)

    async def _built(self, child: asyncio.subprocess.Process) -> Figures:
        try:
            output, _ = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
        except TimeoutError:
            raise UserError(
                f"the initial model of {self._manifest_path} is not built after {TIMEOUT_S:g} s",
                "use a faster machine, or a smaller model",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                child.kill()
            await child.wait()
        if child.returncode not in (0, 2):
            raise UserError(f"building the initial model of {self._manifest_path} failed (see the messages above)")
        said = json.loads(output.splitlines()[-1])
        if child.returncode == 2:
            raise UserError(said["what"], said["hint"])
        return Figures.model_validate({"manifest": self._built_from, **said})

    async def _start_child(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "peer.genesis", str(self._manifest_path), "--out", str(self._state_path),
            "--parent", str(os.getpid()), stdout=asyncio.subprocess.PIPE, start_new_session=True,  # Ctrl-C is for us
        )  # fmt: skip

    def _genesis(self, figures: Figures) -> Genesis:
        from peer.swarm.state.snapshot_file import SnapshotFile

        digests = [bytes.fromhex(digest) for digest in figures.chunks]
        snapshot = SnapshotFile(self._state_path, _meta_of(figures), digests)
        return Genesis(self._manifest.model_copy(update={"genesis": figures.digest}), snapshot)

    def _read_figures(self) -> Figures | None:
        try:
            figures = parse_json(Figures, self._figures_path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            log.warning("%s cannot be read, the initial state is built again: %s", self._figures_path, error)
            return None
        fits = figures.manifest == self._built_from and self._manifest.genesis in (None, figures.digest)
        return figures if fits else None

    def _write_figures(self, figures: Figures) -> None:
        temporary = self._figures_path.with_suffix(".tmp")
        try:
            temporary.write_bytes(dump_json(figures))
            temporary.replace(self._figures_path)
        except OSError as error:
            raise UserError(f"cannot write {self._figures_path}: {error.strerror}", "check the disk") from None

    async def _is_whole(self, figures: Figures) -> bool:
        """Whether the file holds what the figures say, and they say what a state can be."""
        from peer.outer.state.outer_state import state_digest
        from peer.swarm.state.snapshot_file import chunk_places

        try:
            digests = [bytes.fromhex(digest) for digest in figures.chunks]
            if state_digest(digests, figures.numel, figures.num_buffers) != figures.digest:
                raise ProtocolError("its figures contradict each other")
            with self._state_path.open("rb") as file:
                for (place, size), digest in zip(chunk_places(_meta_of(figures)), digests, strict=True):
                    if await asyncio.to_thread(_digest_of, file, size) != digest:
                        raise ProtocolError(f"it is damaged at byte {place}")
        except (OSError, ValueError, ProtocolError) as error:
            log.warning("%s is built again: %s", self._state_path, error)
            return False
        return True


def _digest_of(file: BinaryIO, size: int) -> bytes:
    return hashing.digest(file.read(size))


def _meta_of(figures: Figures) -> SnapshotMeta:
    return SnapshotMeta(
        round=0,
        lineage_id=figures.digest,
        numel=figures.numel,
        num_buffers=figures.num_buffers,
        num_chunks=len(figures.chunks),
    )
