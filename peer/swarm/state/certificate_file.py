"""The file of a chain's certificates: one line each. In memory are its places, its ids and the newest certificates."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer.errors import ProtocolError
from peer.protocol.chain import Chain, ChainTally, tally_of
from peer.protocol.coverage import Coverage
from peer.protocol.lineage import Certificate
from peer.protocol.records import dump_json, parse_json

log = logging.getLogger(__name__)
NEWEST = 72  # certificates that are held in memory: those whose updates are kept, and a few
ID_BYTES = 32
MAX_LINE_BYTES = 1 << 20  # of a certificate: 64 members and their signatures need a fiftieth


class CertificateFile:
    """A chain from genesis that grows at its end. Each certificate is 40 bytes of memory, but for the newest ones.

    What it has held can be read from it for as long as it is there, also when another file has taken its place on disk.

    Args:
        path: of the file; made with the first certificate if it is missing.
        genesis: the id that the first link follows.
        shards: of each source of the data that peers share out.

    Attributes:
        tally, coverage: of all links; not to be changed.
    """

    def __init__(self, path: Path, genesis: str, shards: Sequence[int] = ()) -> None:
        self.path, self._genesis, self.tally = path, genesis, ChainTally()
        self._shards, self.coverage = shards, Coverage(shards)
        self._ends, self._ids = array("Q", [0]), bytearray()  # of what is written, and of all
        self._newest: dict[int, Certificate] = {}
        self._counting = threading.Lock()
        self._descriptor: int | None = None
        self._rest = False  # whether more is in the file than the certificates that were read from it

    @classmethod
    def unnamed(cls, folder: Path, genesis: str) -> CertificateFile:
        """An empty one that no other process sees, and that is gone with this object."""
        return _Unnamed(folder / "unnamed", genesis)

    def __len__(self) -> int:
        return len(self._ids) // ID_BYTES

    @property
    def chain(self) -> Chain:
        """All that it holds now."""
        return Chain(self, 0, len(self))

    @property
    def unwritten(self) -> int:
        """How many of the newest certificates are in memory alone."""
        return len(self) - len(self._ends) + 1

    def id(self, place: int) -> str:
        """The lineage id that this link leads to."""
        return self._ids[place * ID_BYTES : (place + 1) * ID_BYTES].hex()

    def read(self, place: int) -> Certificate:
        """See `LinkFile`.

        Raises:
            OSError: what is in the file now is no certificate.
        """
        if (held := self._newest.get(place)) is not None:
            return held
        try:
            return parse_json(Certificate, self.line(place))
        except ProtocolError:
            raise OSError(errno.EIO, f"round {place} is damaged", str(self.path)) from None

    def line(self, place: int) -> bytes:
        """As it is, or will be, in the file."""
        if place + 1 >= len(self._ends):
            return dump_json(self._newest[place]) + b"\n"
        start, stop = self._ends[place : place + 2]
        assert self._descriptor is not None, "it has been read or written"
        return os.pread(self._descriptor, stop - start, start)

    def tally_up_to(self, length: int) -> ChainTally:
        """See `LinkFile`: what is nearer to its beginning is read, or what is not."""
        with self._counting:
            tally = self.tally.copy()
        if tally.links - length <= length:
            return tally.remove(map(self.read, range(length, tally.links)))
        return ChainTally().add(map(self.read, range(length)))

    def load(self, until: str | None = None) -> bool:
        """Read the file up to a lineage id, or all of it.

        The first line that is damaged (a torn write), or does not follow the one before, ends it.

        Returns:
            Whether it has found that id.
        """
        parent = self._genesis
        for descriptor in self._opened():
            with os.fdopen(os.dup(descriptor), "rb") as file:
                line, size = b"\n", os.fstat(descriptor).st_size
                while parent != until and self._ends[-1] < size:
                    line = file.readline(MAX_LINE_BYTES)
                    try:
                        certificate = parse_json(Certificate, line)
                    except ProtocolError as error:
                        log.warning("%s: ignoring what follows round %d: %s", self.path, len(self), error)
                        break
                    if certificate.link.parent != parent:
                        break
                    parent = self.add(certificate)
                    self._ends.append(self._ends[-1] + len(line))
                    self._forget()
                self._rest = self._ends[-1] < size or not line.endswith(b"\n")
        return until in (None, parent)

    def _opened(self) -> Iterator[int]:
        try:
            yield self._open(os.O_RDWR)
        except FileNotFoundError:
            return
        except OSError:  # it is in another run's checkpoint, and read alone
            yield self._open(os.O_RDONLY)

    def _open(self, flags: int) -> int:
        return self._hold(os.open(self.path, flags, 0o600)) if self._descriptor is None else self._descriptor

    def _hold(self, descriptor: int) -> int:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def add(self, certificate: Certificate) -> str:
        """Hold one more, in memory until `flush`; -> its lineage id."""
        lineage_id = certificate.link.id
        self._newest[len(self)] = certificate
        with self._counting:
            self.tally.add([certificate])
        self.coverage.add(certificate.link)
        self._ids += bytes.fromhex(lineage_id)
        return lineage_id

    def extended(self, links: Sequence[Certificate]) -> Chain:
        """Hold more, and write them; -> all that it holds.

        Raises:
            OSError: see `flush`.
        """
        for certificate in links:
            self.add(certificate)
        self.flush()
        return self.chain

    def flush(self) -> None:
        """Write what is in memory alone.

        Raises:
            OSError: it is not written; the file is as it was.
        """
        lines = list(map(self.line, range(len(self) - self.unwritten, len(self))))
        if not lines:
            return
        descriptor, content, end = self._open(os.O_RDWR | os.O_CREAT), b"".join(lines), self._ends[-1]
        try:
            if os.pwrite(descriptor, content, end) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            os.ftruncate(descriptor, end)
            raise
        for line in lines:
            self._ends.append(self._ends[-1] + len(line))
        self._forget()

    def _forget(self) -> None:
        """What is written and not among the newest is read again when it is asked for."""
        kept = min(len(self) - NEWEST, len(self._ends) - 1)
        while (first := next(iter(self._newest), kept)) < kept:
            del self._newest[first]

    def holds(self, chain: Sequence[Certificate]) -> bool:
        """Whether the file on disk is that chain already."""
        same = isinstance(chain, Chain) and chain.file is self and chain.start == 0 and not chain.tail
        return same and len(chain) == len(self) and not self.unwritten and not self._rest and self.path.exists()

    def replaced(self, chain: Sequence[Certificate]) -> CertificateFile:
        """Write another chain in its place, durably.

        Raises:
            OSError: the file is as it was.
        """
        made, temporary = CertificateFile(self.path, self._genesis, self._shards), self.path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                for place, (line, lineage_id) in enumerate(self._lines(chain)):
                    file.write(line)
                    made._ends.append(made._ends[-1] + len(line))
                    made._ids += bytes.fromhex(lineage_id)
                    if place >= len(chain) - NEWEST:
                        made._newest[place] = chain[place]
                file.flush()
                os.fsync(file.fileno())
            made.tally = tally_of(chain)
            made.coverage.add_all(chain)
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        made._open(os.O_RDWR)
        return made

    def _lines(self, chain: Sequence[Certificate]) -> Iterator[tuple[bytes, str]]:
        """Of each certificate its line and its id; those that are in this file are not read again."""
        held = chain.stop if isinstance(chain, Chain) and chain.file is self and chain.start == 0 else 0
        yield from ((self.line(place).rstrip() + b"\n", self.id(place)) for place in range(held))
        yield from ((dump_json(one) + b"\n", one.link.id) for one in chain[held:])


class _Unnamed(CertificateFile):
    def _open(self, flags: int) -> int:
        if self._descriptor is None:
            with tempfile.TemporaryFile(dir=self.path.parent) as file:
                self._hold(os.dup(file.fileno()))
        return super()._open(flags)
