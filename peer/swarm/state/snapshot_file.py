"""Snapshot files: the outer state of one round, with the digests of its chunks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from io import FileIO
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from peer.outer.numerics.tiles import TILE_ELEMENTS, tile_ranges
from peer.outer.optim.optimizers import Vectors
from peer.outer.state.outer_state import CHUNK, OuterState, columns, state_digest
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol import hashing
from peer.protocol.wire import SnapshotMeta
from peer.swarm.runtime.round_priority import Aside, go_on
from peer.swarm.runtime.timing import Timing
from peer.system.clock import boot_clock

MAX_OFFERED = 1024


class DamagedError(OSError):
    """A snapshot file is not what it was when it was written."""


class SnapshotFile:
    """The outer state of one round as a file, with its chunk digests: written once, served to many.

    Attributes:
        digest: of the state.
        finished_at: the round of the state when the file was complete.
        readers: how many have it open.
        used_at: by `boot_clock`, when the last of them was seen, or the last peer learned of it.
    """

    def __init__(self, path: Path, meta: SnapshotMeta, digests: list[bytes], finished_at: int | None = None) -> None:
        self.path, self.meta, self.digests = path, meta, digests
        self.finished_at = meta.round if finished_at is None else finished_at
        self.digest = state_digest(digests, meta.fragments, meta.num_buffers)
        self.places = chunk_places(meta)
        self.readers = 0
        self._offered: set[str] = set()
        self.written_at = self.used_at = boot_clock()

    @classmethod
    def write(cls, path: Path, state: OuterState) -> SnapshotFile:
        """Write `state`, which the caller holds still."""
        with SnapshotWriter(path.with_suffix(".tmp"), state) as writer:
            for column in writer.columns:
                writer.copy(column)
                writer.put(column, final=True)
            return writer.finish(path, state.lineage_id)

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """The descriptor of the file, which stays readable even when the file is given up meanwhile."""
        self.readers, self.used_at = self.readers + 1, boot_clock()
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        finally:
            self.readers, self.used_at = self.readers - 1, boot_clock()

    def offered(self, remote: str) -> None:
        """Keep the file a moment for a peer that was offered it. Once per peer, so that asking does not hold it."""
        if remote not in self._offered and len(self._offered) < MAX_OFFERED:
            self._offered.add(remote)
            self.used_at = boot_clock()

    def give_up(self, spare: Path | None = None) -> None:
        """Stop serving the file; open readers continue. Its pages become `spare` if there is no reader."""
        if spare is None or self.readers:
            self.path.unlink(missing_ok=True)
        else:
            self.path.replace(spare)

    def in_use(self, timing: Timing) -> bool:
        """Whether it is read, or was read or offered a moment ago: a joiner that checks a chain, or lost a stream,
        returns for the rest. Not if it is too old for that to count.
        """
        now = boot_clock()
        held = self.readers > 0 or now - self.used_at < timing.file_held_s
        return held and now - self.written_at < timing.longest_file_held_s


class SnapshotWriter:
    """A snapshot file under construction, of a state that may change meanwhile.

    It is made of columns: a CHUNK of the anchor's elements in one fragment, and the same of every buffer, which is all
    that an outer step needs to carry them on. Each is copied as the state is by then. What is of an earlier round than
    the rest is carried on in the file, by the updates that the state has taken: so the state is never held still for
    longer than one copy. `finish` makes the file appear; leaving the context without it does not. What takes its time
    calls `aside` between tiles of a few milliseconds.

    Args:
        temporary: where it is made. An existing file is overwritten, which takes a fraction of the time.

    Attributes:
        rounds: at which each column is, as far as they are there.
    """

    def __init__(self, temporary: Path, state: OuterState) -> None:
        self._temporary, self._state = temporary, state
        self._bounds = list(columns(state.fragments.sizes))
        self._tensors = (state.anchor, *state.buffers)
        self._copied = [torch.empty(min(CHUNK, state.numel)) for _ in self._tensors]
        self._digests: dict[tuple[int, int], bytes] = {}
        self._open = threading.Lock()  # a thread whose work was cancelled continues: not in a descriptor of others
        self.columns, self.rounds = range(len(self._bounds)), dict[int, int]()

    def __enter__(self) -> SnapshotWriter:
        self._file = self._temporary.open("r+b" if self._temporary.exists() else "w+b", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def copy(self, column: int) -> None:
        """Take a column of the state, which the caller holds still; `put` it before the next."""
        start, stop = self._bounds[column]
        for own, tensor in zip(self._vectors(column), self._tensors, strict=True):
            own.copy_(tensor[start:stop])
        self.rounds[column] = self._state.round

    def copy_from(self, column: int, source: FileIO, file: SnapshotFile) -> None:
        """Take a column of an earlier snapshot's file, which is open; `put` it before the next.

        Raises:
            DamagedError: it is not what it was.
        """
        whole = self._read(column, source)
        digests = [hashing.digest(own.numpy().data.cast("B")) for own in self._vectors(column)]
        if not whole or digests != file.digests[column :: len(self.columns)]:
            raise DamagedError(f"{file.path.name} is damaged in column {column}")
        self.rounds[column] = file.meta.round

    def put(self, column: int, *, final: bool = False, aside: Aside = go_on) -> None:
        """Write what was copied last, and hash it if it is `final`."""
        for number, own in enumerate(self._vectors(column)):
            view, place = own.numpy().data.cast("B"), self._place(number, column)
            if final:
                aside()
                self._digests[number, column] = hashing.digest(view)
            while view:
                aside()
                with self._open:
                    written = os.pwrite(self._file.fileno(), view[: 4 * TILE_ELEMENTS], place)
                view, place = view[written:], place + written

    def carry_on(self, column: int, update: AnyUpdate, *, final: bool, aside: Aside = go_on) -> None:
        """Take the step of the column's round, in the file, and hash the result if it is `final`; a column of
        another fragment stays as it is.
        """
        part = self._state.fragments.at(self.rounds[column])
        if not part.start <= self._bounds[column][0] < part.stop:
            self.rounds[column] += 1
            return
        aside()
        self._read_own(column)
        anchor, *buffers = self._vectors(column)
        (start, stop), round = self._bounds[column], self.rounds[column]
        for first, last in tile_ranges(start, stop):
            aside()
            own = slice(first - start, last - start)
            self._state.carry_on(Vectors(anchor[own], [one[own] for one in buffers]), update, first, last, round)
        self.rounds[column] += 1
        self.put(column, final=final, aside=aside)

    @property
    def unsealed(self) -> list[int]:
        """Columns that have not been hashed as they are."""
        return [column for column in self.columns if (0, column) not in self._digests]

    def seal(self, column: int, aside: Aside = go_on) -> None:
        """Hash a column that stays as it is in the file."""
        self._read_own(column)
        for number, own in enumerate(self._vectors(column)):
            aside()
            self._digests[number, column] = hashing.digest(own.numpy().data.cast("B"))

    def finish(self, path: Path, lineage_id: str) -> SnapshotFile:
        """All columns are there, of one round and hashed, of this lineage id: the file appears at `path`."""
        (round,) = set(self.rounds.values())
        digests = [self._digests[number, column] for number in range(len(self._tensors)) for column in self.columns]
        self._file.truncate(4 * self._state.numel * len(self._tensors))  # what it was written over may be longer
        self._temporary.replace(path)
        meta = SnapshotMeta(
            round=round,
            lineage_id=lineage_id,
            fragments=self._state.fragments.sizes,
            num_buffers=len(self._tensors) - 1,
            num_chunks=len(digests),
        )
        return SnapshotFile(path, meta, digests, self._state.round)

    def _vectors(self, column: int) -> list[Tensor]:
        start, stop = self._bounds[column]
        return [copied[: stop - start] for copied in self._copied]

    def _place(self, number: int, column: int) -> int:
        return 4 * (number * self._state.numel + self._bounds[column][0])

    def _read_own(self, column: int) -> None:
        if not self._read(column, self._file):
            raise OSError(f"{self._temporary.name} ends before the end of column {column}")

    def _read(self, column: int, file: FileIO) -> bool:
        """Whether all of the column is there."""
        views = [own.numpy().data.cast("B") for own in self._vectors(column)]
        with self._open:
            read = [os.preadv(file.fileno(), [view], self._place(number, column)) for number, view in enumerate(views)]
        return read == list(map(len, views))


def chunk_lengths(meta: SnapshotMeta) -> list[int]:
    """Bytes of each chunk of a snapshot, in order."""
    one_tensor = [4 * (stop - start) for start, stop in columns(meta.fragments)]
    return one_tensor * (1 + meta.num_buffers)


def chunk_places(meta: SnapshotMeta) -> list[tuple[int, int]]:
    """(first byte, bytes) of each chunk in the file, in order."""
    lengths = chunk_lengths(meta)
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def load_snapshot(path: Path, state: OuterState) -> None:
    """Read a verified snapshot file into the state's tensors, in place."""
    with path.open("rb") as file:
        for tensor in (state.anchor, *state.buffers):
            for start, stop in columns(state.fragments.sizes):
                file.readinto(tensor[start:stop].numpy().data.cast("B"))
    state.replaced()
