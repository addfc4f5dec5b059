"""The initial state of a run: built by a child process once, and kept for the next start of this node.

Imports nothing heavy: the child is at work while this process imports torch and hivemind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from pydantic import Field

from peer.errors import ProtocolError, UserError
from peer.protocol import hashing
from peer.protocol.data_spec import SharedData
from peer.protocol.manifest import (
    COMMIT_PATTERN,
    ORGANISER,
    Digest,
    ModelSpec,
    RecipeSpec,
    RunManifest,
    Spec,
    TokenizerSpec,
)
from peer.protocol.pinning import with_commits
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import SnapshotMeta
from peer.tokenizer_files import TokenizerFiles, list_files, read_folder

if TYPE_CHECKING:
    from peer.swarm.state.snapshot_file import SnapshotFile

log = logging.getLogger(__name__)
TIMEOUT_S = 600.0
Commit = Annotated[str, Field(pattern=f"^{COMMIT_PATTERN}$")]
MAX_CHANGES = 5  # that a message lists


class Figures(Spec):
    """The metadata that is stored with the initial state.

    Attributes:
        manifest: what it was built from, without a genesis.
        digest: of the state.
        fragments: elements of each.
        shapes: of the parameters, in the order of the flat vector.
        hidden: places of the matrices inside transformer blocks.
        chunks: digests of its chunks.
        commits: what the branches that it names on the hub were then, by section.
        tokenizer: what other machines learn about it.
        base: digest of the model that an adapter stands on.
        model: architecture and config of the organiser's folder that it was built from.
        shared: the text that peers lease from each other.
    """

    manifest: RunManifest
    digest: Digest
    fragments: tuple[Annotated[int, Field(ge=1)], ...]
    shapes: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    hidden: tuple[Annotated[int, Field(ge=0)], ...] = ()
    num_buffers: Annotated[int, Field(ge=0)]
    chunks: tuple[Digest, ...]
    commits: dict[Annotated[str, Field(pattern=r"^[a-z0-9.]{1,32}$")], Commit] = Field(default_factory=dict)
    tokenizer: TokenizerSpec
    base: Digest | None = None
    model: ModelSpec | None = None
    shared: SharedData | None = None


@dataclass(frozen=True)
class Genesis:
    """The initial state as a file, and the manifest that names its digest."""

    manifest: RunManifest
    snapshot: SnapshotFile
    shapes: tuple[tuple[int, ...], ...] = ()
    hidden: tuple[int, ...] = ()

    @property
    def fragments(self) -> tuple[int, ...]:
        """Elements of each fragment of the model."""
        return self.snapshot.meta.fragments


class GenesisBuild:
    """Finds the initial state in the node's folder, or builds it there.

    An existing state is kept, not built again: another version of a library may yield other parameters, and a restarted
    node must not begin another run.

    Args:
        manifest: the run, which may name its genesis.
        manifest_path: its file; the child reads it once more.
        state_dir: the node's folder.
        base: folder of the model that the run continues, which the child reads as well.
        new_run: open another run where the folder holds one.

    Raises:
        UserError: the folder holds another run.
    """

    def __init__(
        self, manifest: RunManifest, manifest_path: Path, state_dir: Path, *, base: Path | None = None,
        new_run: bool = False,
    ) -> None:  # fmt: skip
        self._manifest, self._manifest_path = _with_layout(_keep_tokenizer(manifest, state_dir)), manifest_path
        self._base = base
        self._state_path, self._figures_path = state_dir / "genesis.bin", state_dir / "genesis.json"
        self._built_from = self._manifest.model_copy(update={"genesis": None})
        self._kept = self._read_figures()
        if self._kept is not None and (changes := self._changes(self._kept)):
            if not new_run:
                raise _another_run(state_dir, self._kept.manifest.name, changes)
            self._kept = None
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
        if built.tokenizer.files != self._manifest.tokenizer.files:
            raise UserError("the tokenizer's folder has changed while it was read", "start again when it is complete")
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
            killed = child.returncode == -signal.SIGKILL
            raise UserError(
                f"building the initial model of {self._manifest_path} ended with code {child.returncode}",
                "probably out of memory: free some, or choose a smaller model" if killed else "a bug: please report it",
            )
        said = json.loads(output.splitlines()[-1])
        if child.returncode == 2:
            raise UserError(said["what"], said["hint"])
        return Figures.model_validate({"manifest": self._built_from, **said}, context=ORGANISER)

    async def _start_child(self) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "peer.genesis", *self._arguments]
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    @property
    def _arguments(self) -> list[str]:
        base = ["--from", str(self._base)] if self._base is not None else []
        return [str(self._manifest_path), "--out", str(self._state_path), "--parent", str(os.getpid()), *base]

    def _genesis(self, figures: Figures) -> Genesis:
        from peer.swarm.state.snapshot_file import SnapshotFile

        digests = [bytes.fromhex(digest) for digest in figures.chunks]
        snapshot = SnapshotFile(self._state_path, _meta_of(figures), digests)
        pinned = with_commits(self._manifest, figures.commits)
        if figures.base is not None:
            pinned = pinned.model_copy(update={"model": pinned.model.model_copy(update={"base": figures.base})})
        if figures.shared is not None:
            pinned = pinned.model_copy(update={"data": pinned.data.model_copy(update={"shared": figures.shared})})
        changes = {
            **({"model": figures.model} if figures.model is not None else {}),
            "genesis": figures.digest, "tokenizer": figures.tokenizer,
            "recipe": _with_fragments(self._manifest.recipe, len(figures.fragments)),
        }  # fmt: skip
        return Genesis(pinned.model_copy(update=changes), snapshot, figures.shapes, figures.hidden)

    def _read_figures(self) -> Figures | None:
        try:
            figures = parse_json(Figures, self._figures_path.read_bytes(), ORGANISER)
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            log.warning("%s cannot be read, the initial state is built again: %s", self._figures_path, error)
            return None
        return figures

    def _changes(self, kept: Figures) -> list[str]:
        """What this manifest says and the kept run does not, one line a key."""
        old, new = (dict(_flat(manifest.model_dump(mode="json"))) for manifest in (kept.manifest, self._built_from))
        old["genesis"], new["genesis"] = kept.digest, self._manifest.genesis or kept.digest
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        return [f"{key}: {old.get(key)} there, {new.get(key)} in the manifest" for key in keys]

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
            if state_digest(digests, figures.fragments, figures.num_buffers) != figures.digest:
                raise ProtocolError("its figures contradict each other")
            with self._state_path.open("rb") as file:
                for (place, size), digest in zip(chunk_places(_meta_of(figures)), digests, strict=True):
                    if await asyncio.to_thread(_digest_of, file, size) != digest:
                        raise ProtocolError(f"it is damaged at byte {place}")
        except (OSError, ValueError, ProtocolError) as error:
            log.warning("%s is built again: %s", self._state_path, error)
            return False
        return True


def _keep_tokenizer(manifest: RunManifest, state_dir: Path) -> RunManifest:
    """The manifest with the files of the tokenizer's folder in place of its name; copies of them are in the node's."""
    spec = manifest.tokenizer
    if spec.kind != "folder":
        return manifest
    if spec.name is None:
        raise UserError("tokenizer.files is for atoll-bootstrap to write", "give tokenizer.name, its folder, instead")
    contents = read_folder(Path(spec.name))
    files = list_files(contents)
    kept = TokenizerFiles(state_dir, files)
    for file in files:
        kept.put(file, contents[file.name])
    return manifest.model_copy(update={"tokenizer": spec.model_copy(update={"name": None, "files": files})})


def _with_fragments(recipe: RecipeSpec, count: int) -> RecipeSpec:
    """The recipe with as many fragments as the model has, where it says of how many blocks each is."""
    from peer.outer.recipe.resolve import resolve  # torch, which no other start needs that early

    resolved = resolve(recipe)
    if resolved.fitted(1) == resolved:
        return recipe
    said = {"name": recipe.schedule} if isinstance(recipe.schedule, str) else recipe.schedule or {}
    return recipe.model_copy(update={"schedule": {**said, "num_fragments": count, "blocks_per_fragment": None}})


def _with_layout(manifest: RunManifest) -> RunManifest:
    """The manifest with the layout of the organiser's weights in place of the file's name."""
    if manifest.model.weights is None:
        return manifest
    from peer.free_weights import layout_of_file  # torch, which no other start needs that early

    layout = layout_of_file(Path(manifest.model.weights)).digest()
    return manifest.model_copy(update={"model": ModelSpec(layout=layout)})


def _flat(document: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _another_run(state_dir: Path, name: str, changes: list[str]) -> UserError:
    more = [f"and {len(changes) - MAX_CHANGES} more"] if len(changes) > MAX_CHANGES else []
    remedy = (
        "Its members would stay behind without a bootstrap. Give another --state-dir to open a second run, take back\n"
        "the change to continue the run, or give --new-run to leave it for a new one at the same address."
    )
    what = f"state_dir={state_dir}: holds the run {name}, which was opened with another manifest"
    return UserError(what, "\n".join([*changes[:MAX_CHANGES], *more, remedy]))


def _digest_of(file: BinaryIO, size: int) -> bytes:
    return hashing.digest(file.read(size))


def _meta_of(figures: Figures) -> SnapshotMeta:
    return SnapshotMeta(
        round=0,
        lineage_id=figures.digest,
        fragments=figures.fragments,
        num_buffers=figures.num_buffers,
        num_chunks=len(figures.chunks),
    )
