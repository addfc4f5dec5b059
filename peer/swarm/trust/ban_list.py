"""The banned peers of a run, with the evidence: permanent, in this peer's folder.

Of offenders that were in no round only the newest are known, and only to this process: identities are free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.errors import ProtocolError
from peer.outer.compress.base import Payload
from peer.protocol.evidence import MAX_EVIDENCE_BYTES, Evidence
from peer.protocol.manifest import PeerIdText, Spec
from peer.protocol.records import dump_json, parse_json
from peer.swarm.runtime.expiring import BoundedMap
from peer.swarm.trust.verdict import Verdict

log = logging.getLogger(__name__)
MAX_NOTED = 1024
MAX_PAYLOAD_BYTES = 2**28  # of all evidence together; without its payloads a ban stays, but cannot be passed on


class Ban(Spec):
    """A verdict that this peer reached itself, and its evidence."""

    culprit: PeerIdText
    offence: str
    evidence: Evidence


@dataclass(frozen=True)
class Proof:
    """What convinces others: the evidence, and where the payloads that it needs are; None if it needs none."""

    evidence: Evidence
    payloads: Path | None


class BanList:
    """The banned peers of one run.

    Args:
        folder: created with the first ban.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bans: dict[str, Ban] = {}
        self._noted: BoundedMap[str, str] = BoundedMap(MAX_NOTED)
        for path in sorted(folder.glob("*.json")):
            try:
                ban = parse_json(Ban, path.read_bytes()[: 2 * MAX_EVIDENCE_BYTES])
            except (OSError, ProtocolError) as error:
                log.warning("%s: ignoring a ban: %s", path, error)
                continue
            if path.stem == ban.culprit:
                self._bans[ban.culprit] = ban

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._bans or peer_id in self._noted

    def __iter__(self) -> Iterator[str]:
        """Those whose evidence is kept."""
        return iter(tuple(self._bans))

    def convicts(self, peer_id: str) -> bool:
        """Whether the evidence against it is kept."""
        return peer_id in self._bans

    def offence(self, peer_id: str) -> str:
        """The offence of a banned peer."""
        return self._bans[peer_id].offence if peer_id in self._bans else self._noted[peer_id]

    def note(self, verdict: Verdict) -> None:
        """Ban one that was in no round, until others of its kind take its place."""
        self._noted[verdict.culprit] = verdict.offence

    def add(self, verdict: Verdict, evidence: Evidence, payloads: Sequence[Payload] | None) -> None:
        """Ban; and write it down, so that it survives this process. Blocks on the disk; raises OSError."""
        ban = Ban(culprit=verdict.culprit, offence=verdict.offence, evidence=evidence)
        self._bans[verdict.culprit] = ban
        self._folder.mkdir(parents=True, exist_ok=True)
        if payloads is not None and self._held() + sum(map(len, payloads)) <= MAX_PAYLOAD_BYTES:
            with self._payloads(verdict.culprit).open("wb") as file:
                for payload in payloads:
                    file.write(payload)
        temporary = self._folder / f"{verdict.culprit}.tmp"
        temporary.write_bytes(dump_json(ban))
        temporary.replace(self._folder / f"{verdict.culprit}.json")

    def proof(self, peer_id: str) -> Proof:
        """What convinces others of a banned peer's guilt."""
        path = self._payloads(peer_id)
        return Proof(self._bans[peer_id].evidence, path if path.exists() else None)

    def _held(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.bin"))

    def _payloads(self, peer_id: str) -> Path:
        return self._folder / f"{peer_id}.bin"
