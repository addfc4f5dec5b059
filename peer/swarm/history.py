"""The chain of certificates and the last updates of this peer, on disk."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from pathlib import Path

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.protocol import hashing
from peer.protocol.lineage import Certificate, chain_weight
from peer.protocol.records import dump_json, parse_json

log = logging.getLogger(__name__)
KEPT_UPDATES = 64


class History:
    """What happened in a run, as far as this peer holds it.

    Args:
        folder: where updates, chain and snapshot files live; created if missing.
        genesis: lineage id 0.

    Attributes:
        chain: certificates from genesis on.
        weight: committed tokens of the whole chain.
        seen: in how many of its rounds each peer was.
    """

    def __init__(self, folder: Path, genesis: str) -> None:
        self.folder, self.genesis = folder, genesis
        self.chain: list[Certificate] = []
        self.weight = 0
        self.seen: Counter[str] = Counter()
        self._whole: set[str] = set()  # digests of the updates that this process has written or read
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def chain_path(self) -> Path:
        return self.folder / "chain.jsonl"

    def load(self, path: Path, lineage_id: str) -> bool:
        """Take the chain in `path` up to `lineage_id`; False when it does not lead there."""
        chain = read_chain(path)
        ids = [self.genesis, *(certificate.link.id for certificate in chain)]
        if lineage_id not in ids:
            return False
        self.replace(chain[: ids.index(lineage_id)])
        return True

    def append(self, certificate: Certificate) -> None:
        """Record a committed round; it outlives this process from here on. Its update is kept apart."""
        with self.chain_path.open("ab") as file:
            file.write(dump_json(certificate) + b"\n")
        self.chain.append(certificate)
        self.weight += certificate.link.weight
        self.seen.update(member.peer_id for member in certificate.link.roster)

    def keep_update(self, *parts: Payload) -> None:
        """Write the update of the newest round, whose bytes are `parts`, and forget the oldest one.

        Nothing depends on it but who catches up from here, so it is left to the machine when it reaches the disk.

        Raises:
            OSError: it is not kept; where the disk is full, neither is the oldest one, so that the chain may go on.
        """
        self._forget_oldest()
        digest = self.chain[-1].link.update_digest
        path = self._update_path(digest)
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.writelines(parts)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            self._make_room()
            raise
        self._whole.add(digest)

    def replace(self, chain: list[Certificate]) -> None:
        """Take another chain (a resumed or an adopted one)."""
        for path in self.folder.glob("update-*.tmp"):  # half written; on a full disk the chain needs the room
            path.unlink(missing_ok=True)
        _write(self.chain_path, b"".join(dump_json(certificate) + b"\n" for certificate in chain))
        self.chain = list(chain)
        self.weight = chain_weight(chain)
        self.seen = Counter(member.peer_id for one in chain for member in one.link.roster)
        self._prune()

    def _forget_oldest(self) -> None:
        """After one more round: the update that is not among the newest any more, unless a newer round has it, too."""
        for left in self.chain[-KEPT_UPDATES - 1 : -KEPT_UPDATES]:
            digest = left.link.update_digest
            if all(one.link.update_digest != digest for one in self.chain[-KEPT_UPDATES:]):
                self._update_path(digest).unlink(missing_ok=True)
                self._whole.discard(digest)

    def _make_room(self) -> None:
        """Give up the oldest update that is kept."""
        for one in self.chain[-KEPT_UPDATES:]:
            if (path := self.update(one.link.update_digest)) is not None:
                path.unlink(missing_ok=True)
                return

    def _prune(self) -> None:
        kept = {self._update_path(one.link.update_digest) for one in self.chain[-KEPT_UPDATES:]}
        for path in set(self.folder.glob("update-*")) - kept:
            path.unlink(missing_ok=True)
        self._whole &= {one.link.update_digest for one in self.chain[-KEPT_UPDATES:]}

    def lineage_id(self, round: int) -> str:
        """Where the state of that round, at most the newest, stands on this lineage."""
        return self.chain[round - 1].link.id if round else self.genesis

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
        path = self.update(digest)
        if path is None or digest in self._whole:
            return path
        with contextlib.suppress(FileNotFoundError):
            if hashing.digest(path.read_bytes()).hex() == digest:
                self._whole.add(digest)
                return path
            log.warning("%s is damaged and is not served any more", path)
            path.unlink()
        return None

    def _update_path(self, digest: str) -> Path:
        return self.folder / f"update-{digest}.bin"


def read_chain(path: Path) -> list[Certificate]:
    """Certificates in a chain file; stops at the first damaged line (a torn write)."""
    chain: list[Certificate] = []
    if not path.exists():
        return chain
    for line in path.read_bytes().splitlines():
        try:
            chain.append(parse_json(Certificate, line))
        except ProtocolError as error:
            log.warning("%s: ignoring what follows round %d: %s", path, len(chain), error)
            break
    return chain


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
