"""How the manifest of a run reaches newcomers: over a stream of the peers that introduce them, and through the DHT."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping

from peer.errors import ProtocolError, UserError, did_you_mean, in_words
from peer.protocol.records import (
    MANIFEST_KEY,
    MANIFEST_TTL_S,
    MAX_RECORD_BYTES,
    MAX_RUNS,
    SealedManifest,
    open_manifest,
)
from peer.protocol.wire import Kind
from peer.swarm.net.directory import read_records, write_record
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError

log = logging.getLogger(__name__)
MANIFEST_NAME = "atoll/manifest"


async def publish_manifests(node: Node, manifests: Mapping[str, bytes], rng: random.Random) -> None:
    """Hand signed manifests to all who ask from now on, and keep them in the DHT. Every peer does so for its run, so
    that it can be joined while its bootstrap is away.

    Args:
        manifests: by owner, see `SealedManifest.owner`.
    """

    async def answer(stream: FrameStream) -> None:
        for blob in manifests.values():
            await stream.send(Kind.MANIFEST, blob, timeout_s=node.timing.manifest_answer_s)
        await stream.send(Kind.END, timeout_s=node.timing.manifest_answer_s)

    async def repeat_forever() -> None:
        while True:
            for owner, blob in manifests.items():
                await write_record(node, MANIFEST_KEY, blob, time.time() + MANIFEST_TTL_S, owner=owner)
            await asyncio.sleep(node.timing.manifest_period_s * rng.uniform(0.5, 1.0))

    await node.serve(MANIFEST_NAME, "manifest", answer)
    node.spawn(repeat_forever(), essential=True)


async def ask_manifests(node: Node, peer_id: str) -> list[bytes]:
    """The sealed manifests that a peer hands out, at most MAX_RUNS; none if it does not answer."""
    found: list[bytes] = []
    try:
        stream = await node.open(peer_id, MANIFEST_NAME, "manifest", node.timing.manifest_answer_s)
    except StreamClosedError as error:
        log.info("%s hands out no manifest: %s", peer_id, in_words(error))
        return found
    try:
        async with asyncio.timeout(node.timing.manifest_answer_s):
            while len(found) < MAX_RUNS:
                kind, body = await stream.receive({Kind.MANIFEST: MAX_RECORD_BYTES, Kind.END: 0})
                if kind is Kind.END:
                    break
                found.append(bytes(body))
    except (TimeoutError, ProtocolError, StreamClosedError) as error:
        log.info("%s hands out no more manifests than %d: %s", peer_id, len(found), in_words(error))
    finally:
        stream.close()
    return found


class ManifestSearch:
    """What the introducers of a newcomer hand out, and what the DHT holds; of one organiser's run of one name the
    highest serial counts.

    Args:
        node: the newcomer, whose introducers are the peers in the addresses that a person gave.
        run_id: accept only the manifest with this hash.
        name: accept only a run of this name.
    """

    def __init__(self, node: Node, run_id: str | None, name: str | None = None) -> None:
        self._node, self._run_id, self._name = node, run_id, name
        self._found: dict[str, SealedManifest] = {}  # by owner
        self._handed_out: set[str] = set()  # owners of what introducers hand out
        self._introduced: set[str] = set(node.introducers)  # and the organisers that they name
        self._incompatible: UserError | None = None
        self._malformed: UserError | None = None

    async def run(self) -> SealedManifest:
        """Ask until there is one.

        Raises:
            UserError: none found in time, hash mismatch, an incompatible version, or several runs to choose from.
        """
        timeout_s = self._node.timing.manifest_timeout_s
        deadline = self._node.clock() + timeout_s
        while True:
            await self.look()
            if self._found:
                return self._choose()
            if self._node.clock() >= deadline:
                raise self._incompatible or self._malformed or UserError(
                    f"the swarm answered, but holds no manifest (waited {timeout_s:g} s)",
                    "is the address that of an Atoll bootstrap, of a peer that is training, or of a DHT node that a "
                    "bootstrap names with --initial-peers?",
                )
            await asyncio.sleep(self._node.timing.recheck_s)

    async def look(self) -> list[SealedManifest]:
        """Ask once; -> all that has been found."""
        handed_out, stored = await asyncio.gather(
            asyncio.gather(*(ask_manifests(self._node, peer_id) for peer_id in self._node.introducers)),
            read_records(self._node, MANIFEST_KEY),
        )
        for blob in (blob for blobs in handed_out for blob in blobs):
            self._take(blob, introduced=True)
        for owner, blob in (stored or {}).items():
            self._take(blob, owner=owner)
        return list(self._found.values())

    def _take(self, blob: bytes, *, owner: str | None = None, introduced: bool = False) -> None:
        try:
            sealed = open_manifest(blob)
        except ProtocolError as error:
            log.warning("ignoring a manifest: %s", error)
            if introduced:
                self._malformed = UserError(
                    f"the manifest at that address is refused: {error}", "tell its organiser; no peer can join that run"
                )
            return
        except UserError as error:
            if introduced or (owner or "").partition("/")[0] in self._introduced:
                raise  # the run that was asked for: waiting cannot mend it
            self._incompatible = error
            return
        if owner not in (None, sealed.organiser, sealed.owner):
            return
        if introduced:
            self._introduced.add(sealed.organiser)
            self._handed_out.add(sealed.owner)
        before = self._found.get(sealed.owner)
        wanted = self._run_id is not None and sealed.manifest.run_id == self._run_id
        if before is None or wanted or (before.serial < sealed.serial and before.manifest.run_id != self._run_id):
            self._found[sealed.owner] = sealed

    def _choose(self) -> SealedManifest:
        found = self._found
        if self._run_id is not None:
            found = {o: sealed for o, sealed in self._found.items() if sealed.manifest.run_id == self._run_id}
            if not found:
                seen = ", ".join(sorted(sealed.manifest.run_id for sealed in self._found.values()))
                raise UserError(
                    f"manifest hash mismatch: the swarm runs {seen}, not {self._run_id}",
                    "check --run-id, or leave it out to trust the address alone",
                )
        if self._name is not None:
            found = {o: sealed for o, sealed in found.items() if sealed.manifest.name == self._name}
            if not found:
                names = [sealed.manifest.name for sealed in self._found.values()]
                raise UserError(f"no run at that address is named {self._name}", did_you_mean(self._name, names))
        preferred = (
            {owner: sealed for owner, sealed in found.items() if owner in self._handed_out}
            or {owner: sealed for owner, sealed in found.items() if sealed.organiser in self._introduced}
            or found
        )
        if len(preferred) > 1:
            alike = len({sealed.manifest.name for sealed in preferred.values()}) < len(preferred)
            choices = "\n".join(
                f"--run-id {s.manifest.run_id}  ({s.manifest.name}, by {s.organiser})" if alike
                else f"--run {s.manifest.name}  (by {s.organiser})"
                for s in preferred.values()
            )
            raise UserError(f"the swarm holds {len(preferred)} runs; say which one", choices)
        return next(iter(preferred.values()))
