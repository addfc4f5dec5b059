"""The chain of certificates and the last updates of this peer, on disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.protocol import hashing
from peer.protocol.chain import Chain, id_of
from peer.protocol.coverage import Coverage
from peer.protocol.lineage import Certificate
from peer.protocol.records import dump_json, parse_json
from peer.swarm.state.certificate_file import CertificateFile
from peer.swarm.state.given_up import keep_given_up
from peer.swarm.state.run_control import CHAIN_NAME

log = logging.getLogger(__name__)
BEYOND_NAME = "beyond.jsonl"
KEPT_UPDATES = 64
READ_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


class ChainStore:
    """The history of a run, as far as this peer holds it.

    Args:
        folder: where updates, chain and snapshot files live; created if missing.
        genesis: lineage id 0.
        shards: of each source of the data that peers share out.

    Attributes:
        beyond: the rounds of an earlier life of this peer that follow the state it begins with; see `load`.
    """

    def __init__(self, folder: Path, genesis: str, shards: Sequence[int] = ()) -> None:
        self.folder, self.genesis, self._shards = folder, genesis, shards
        self.beyond: Sequence[Certificate] = ()
        self._whole: set[str] = set()  # digests of the updates that this process has written or read
        self._reading = threading.Lock()  # one file at a time, and each once
        folder.mkdir(parents=True, exist_ok=True)
        self._file = CertificateFile(self.chain_path, genesis, shards)

    @property
    def chain_path(self) -> Path:
        return self.folder / CHAIN_NAME

    @property
    def _beyond_path(self) -> Path:
        return self.folder / BEYOND_NAME

    def last_rosters(self, count: int) -> list[tuple[str, ...]]:
        """The members of the last `count` rounds, in order."""
        newest = self.chain[len(self.chain) - count :]
        return [tuple(member.peer_id for member in certificate.link.roster) for certificate in newest]

    @property
    def chain(self) -> Chain:
        """Certificates from genesis on, as they are now."""
        return self._file.chain

    @property
    def weight(self) -> int:
        """Committed tokens of the whole chain."""
        return self._file.tally.weight

    @property
    def seen(self) -> Counter[str]:
        """In how many of its rounds each peer was."""
        return self._file.tally.rounds

    @property
    def tokens(self) -> Counter[str]:
        """The tokens of each peer in them."""
        return self._file.tally.tokens

    @property
    def coverage(self) -> Coverage:
        """What of the run's data was trained on."""
        return self._file.coverage

    def claimed(self) -> CertificateFile:
        """An empty file for a chain from genesis that another peer claims."""
        return CertificateFile.unnamed(self.folder, self.genesis)

    def load(self, path: Path, lineage_id: str) -> bool:
        """Take the chain in `path` up to `lineage_id`; False when it does not lead there.

        What this folder's own file holds beyond is kept with its updates, on disk until `forget_beyond`: after a crash,
        all other peers may have lost those rounds, and this peer may crash again.
        """
        file = CertificateFile(path, self.genesis, self._shards)
        found = file.load(lineage_id)
        if found:
            self.beyond = self._after(file) if path == self.chain_path else ()
            self._keep_beyond()
            self._take(file)
        return found

    def forget_beyond(self) -> None:
        """Those rounds are made again, as far as they can be."""
        self.beyond = ()
        self._beyond_path.unlink(missing_ok=True)

    def _keep_beyond(self) -> None:
        try:
            if self.beyond:
                _write(self._beyond_path, *(dump_json(one) + b"\n" for one in self.beyond))
        except OSError as error:
            log.warning("%s is not written, a crash before its rounds are made again loses them: %s",
                        self._beyond_path, error.strerror)  # fmt: skip

    def _after(self, loaded: CertificateFile) -> Sequence[Certificate]:
        """What follows in this folder's own file, and then in what an earlier start had left to make again."""
        whole = CertificateFile(self.chain_path, self.genesis)
        whole.load()
        found = list(whole.chain[len(loaded) : len(loaded) + KEPT_UPDATES])
        tip = id_of(whole.chain, len(whole) - 1) if len(whole) else self.genesis
        with contextlib.suppress(OSError, ProtocolError):  # a damaged line ends it
            for line in self._beyond_path.read_bytes().splitlines():
                certificate = parse_json(Certificate, line)
                if certificate.link.parent == tip:
                    found.append(certificate)
                    tip = certificate.link.id
        return found[:KEPT_UPDATES]

    def load_all(self) -> None:
        """Take all of the chain that this folder holds, as far as its links follow each other."""
        file = CertificateFile(self.chain_path, self.genesis, self._shards)
        file.load()
        self._take(file)

    def _take(self, file: CertificateFile) -> None:
        if file.path == self.chain_path:
            self._file = file
        self.replace(file.chain)

    def append(self, certificate: Certificate) -> None:
        """Record a committed round; it outlives this process from here on. Its update is kept apart.

        Where the disk refuses, and no update is left that could make room, it is written with a later one. Should this
        process end before, its successor catches up.
        """
        self._file.add(certificate)
        try:
            self.write_pending()
        except OSError as error:
            if self._file.unwritten == 1:
                log.warning("%s is not written, rounds continue: %s", self.chain_path, error.strerror)

    def write_pending(self) -> None:
        """Write the rounds for which there was no room.

        Raises:
            OSError: there is none yet.
        """
        self._with_room(self._file.flush)

    def advance(self, chain: Sequence[Certificate]) -> None:
        """Take a chain that may continue this one: new links are appended, so that a long chain is not written again.

        Raises:
            OSError: see `append`.
        """
        known = len(self.chain)
        if known and (len(chain) < known or id_of(chain, known - 1) != self.lineage_id(known)):
            self.replace(chain)
            return
        for certificate in chain[known:]:
            self.append(certificate)

    def keep_update(self, *payloads: Payload) -> None:
        """Write the update of the newest round, whose bytes are `payloads`, and forget the oldest one.

        Only peers that catch up from here need it, so the system decides when it reaches the disk.

        Raises:
            OSError: it is not kept; where the disk is full, neither is any older one.
        """
        self._forget_oldest()
        digest = self.chain[-1].link.update_digest
        path = self._update_path(digest)
        self._with_room(lambda: _write(path, *payloads))
        self._whole.add(digest)

    def replace(self, chain: Sequence[Certificate]) -> None:
        """Take another chain (a resumed or an adopted one).

        Raises:
            OSError: it is not recorded.
        """
        for path in self.folder.glob("*.tmp"):  # half written, in an earlier life
            if path.name.startswith(("update-", "chain")):
                path.unlink(missing_ok=True)
        if not self._file.holds(chain):
            left = [one.link for one in self.chain[self._shared_length(chain) :]] if self._shards else []
            self._file = self._with_room(lambda: self._file.replaced(chain))
            keep_given_up(self.folder, left)
        self._prune()

    def _shared_length(self, chain: Sequence[Certificate]) -> int:
        """Links that another chain has in common with this one: an id stands for all before it."""
        low, high = 0, min(len(chain), len(self.chain))
        while low < high:
            middle = (low + high + 1) // 2
            same = id_of(chain, middle - 1) == self.lineage_id(middle)
            low, high = (middle, high) if same else (low, middle - 1)
        return low

    def _forget_oldest(self) -> None:
        """After one more round: the update that is not among the newest any more, unless a newer round has it, too."""
        for left in self.chain[-KEPT_UPDATES - 1 : -KEPT_UPDATES]:
            digest = left.link.update_digest
            if all(one.link.update_digest != digest for one in self.chain[-KEPT_UPDATES:]):
                self._update_path(digest).unlink(missing_ok=True)
                self._whole.discard(digest)

    def _with_room(self, write: Callable[[], T]) -> T:
        """Do it; while the disk is full, the oldest update that is kept is given up for it."""
        while True:
            try:
                return write()
            except OSError as error:
                oldest = min(self.folder.glob("update-*.bin"), key=_written_at, default=None)
                if error.errno not in FULL or oldest is None:
                    raise
                log.warning("the disk is full (%s): giving up %s", self.folder, oldest.name)
                oldest.unlink(missing_ok=True)

    def _prune(self) -> None:
        kept = {one.link.update_digest for one in [*self.chain[-KEPT_UPDATES:], *self.beyond]}
        for path in set(self.folder.glob("update-*")) - set(map(self._update_path, kept)):
            path.unlink(missing_ok=True)
        self._whole &= kept

    def lineage_id(self, round: int) -> str:
        """The lineage id of that round, at most the newest, on this lineage."""
        return self._file.id(round - 1) if round else self.genesis

    def leads_through(self, round: int, lineage_id: str) -> bool:
        """Whether that round had, or has, this lineage id here."""
        return round <= len(self.chain) and self.lineage_id(round) == lineage_id

    def leads_through_id(self, lineage_id: str) -> bool:
        """Whether this lineage has stood there in any of its newest rounds."""
        length = len(self.chain)
        return any(self.lineage_id(length - back) == lineage_id for back in range(min(KEPT_UPDATES, length)))

    def certified(self, round: int) -> str | None:
        """The digest of the state of that round, which the link that carried it on names; None where none has."""
        if round == 0:
            return self.genesis
        return self.chain[round].link.state_digest if round < len(self.chain) else None

    def update(self, digest: str) -> Path | None:
        """The file of a kept update."""
        path = self._update_path(digest)
        return path if path.exists() else None

    def whole_update(self, digest: str) -> Path | None:
        """The file of a kept update that may be served: what an earlier life of this peer has left is read first, as it
        may not have been on the disk yet when the machine went down.
        """
        with self._reading, contextlib.suppress(FileNotFoundError):
            path = self._update_path(digest)
            if digest in self._whole and path.exists():
                return path
            with path.open("rb") as file:
                hasher = hashing.Hasher()
                while content := file.read(READ_BYTES):
                    hasher.update(content)
            if hasher.digest().hex() == digest:
                self._whole.add(digest)
                return path
            self.drop_damaged(digest)
        return None

    def drop_damaged(self, digest: str) -> None:
        """The file of that update holds something else."""
        path = self._update_path(digest)
        log.warning("%s is damaged and is not served any more", path)
        self._whole.discard(digest)
        path.unlink(missing_ok=True)

    def _update_path(self, digest: str) -> Path:
        return self.folder / f"update-{digest}.bin"


def _written_at(path: Path) -> int:
    """0 if it is gone meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _write(path: Path, *payloads: Payload) -> None:
    """The whole file, or what was there before."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(payloads)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
