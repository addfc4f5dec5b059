"""How the manifest of a run reaches newcomers: over a stream of the peers that introduce them, and through the DHT."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from peer.errors import ProtocolError, UserError, in_words
from peer.protocol.records import (
    MANIFEST_KEY,
    MANIFEST_TTL_S,
    MAX_RECORD_BYTES,
    SealedManifest,
    open_manifest,
)
from peer.protocol.wire import Kind
from peer.swarm.net.directory import read_records, write_record
from peer.swarm.net.node import Node
from peer.swarm.net.stream import FrameStream, StreamClosedError

log = logging.getLogger(__name__)
MANIFEST_NAME = "atoll/manifest"


async def publish_manifest(node: Node, sealed: bytes, organiser: str, rng: random.Random) -> None:
    """Hand a signed manifest to all who ask for it from now on, and keep it in the DHT. Every peer does, so that the
    run can be joined while its bootstrap is away.
    """

    async def answer(stream: FrameStream) -> None:
        await stream.send(Kind.MANIFEST, sealed, timeout_s=node.timing.manifest_answer_s)

    async def repeat_forever() -> None:
        while True:
            await write_record(node, MANIFEST_KEY, sealed, time.time() + MANIFEST_TTL_S, owner=organiser)
            await asyncio.sleep(node.timing.manifest_period_s * rng.uniform(0.5, 1.0))

    await node.serve(MANIFEST_NAME, "manifest", answer)
    node.spawn(repeat_forever(), essential=True)


async def ask_manifest(node: Node, peer_id: str) -> bytes | None:
    """The sealed manifest that a peer hands out; None if it does not answer."""
    try:
        stream = await node.open(peer_id, MANIFEST_NAME, "manifest", node.timing.manifest_answer_s)
    except StreamClosedError as error:
        log.info("%s hands out no manifest: %s", peer_id, in_words(error))
        return None
    try:
        async with asyncio.timeout(node.timing.manifest_answer_s):
            _, body = await stream.receive({Kind.MANIFEST: MAX_RECORD_BYTES})
        return bytes(body)
    except (TimeoutError, ProtocolError, StreamClosedError) as error:
        log.info("%s hands out no manifest: %s", peer_id, in_words(error))
        return None
    finally:
        stream.close()


class ManifestSearch:
    """What the introducers of a newcomer hand out, and what the DHT holds; of one organiser the highest serial counts.

    Args:
        node: the newcomer, whose introducers are the peers in the addresses that a person gave.
        run_id: accept only the manifest with this hash.
    """

    def __init__(self, node: Node, run_id: str | None) -> None:
        self._node, self._run_id = node, run_id
        self._found: dict[str, SealedManifest] = {}
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
            handed_out, stored = await asyncio.gather(
                asyncio.gather(*(ask_manifest(self._node, peer_id) for peer_id in self._node.introducers)),
                read_records(self._node, MANIFEST_KEY),
            )
            for blob in handed_out:
                self._take(blob, introduced=True)
            for owner, blob in (stored or {}).items():
                self._take(blob, owner=owner)
            if self._found:
                return self._choose()
            if self._node.clock() >= deadline:
                raise self._incompatible or self._malformed or UserError(
                    f"the swarm answered, but holds no manifest (waited {timeout_s:g} s)",
                    "is the address that of an Atoll bootstrap or of a peer that is training?",
                )
            await asyncio.sleep(self._node.timing.recheck_s)

    def _take(self, blob: bytes | None, *, owner: str | None = None, introduced: bool = False) -> None:
        if blob is None:
            return
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
            if introduced or owner in self._introduced:
                raise  # the run that was asked for: waiting cannot mend it
            self._incompatible = error
            return
        if owner not in (None, sealed.organiser):
            return
        if introduced:
            self._introduced.add(sealed.organiser)
        before = self._found.get(sealed.organiser)
        wanted = self._run_id is not None and sealed.manifest.run_id == self._run_id
        if before is None or wanted or (before.serial < sealed.serial and before.manifest.run_id != self._run_id):
            self._found[sealed.organiser] = sealed

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
        preferred = {o: sealed for o, sealed in found.items() if o in self._introduced} or found
        if len(preferred) > 1:
            choices = "\n".join(
                f"--run-id {s.manifest.run_id}  ({s.manifest.name}, by {o})" for o, s in preferred.items()
            )
            raise UserError(f"the swarm holds {len(preferred)} runs; say which one", choices)
        return next(iter(preferred.values()))
