"""G11: a newcomer among three donors, the members of the last round, of which one lies; production nodes in one loop.

Everything that fetches and checks is production code; the Byzantine one serves what `tests.swarm.donor` lets it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from peer.errors import ProtocolError
from peer.outer.state import outer_state as state_module
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state import snapshot_file
from tests.network.chaos.report import added
from tests.swarm.donor import Joiner, ScriptedDonor
from tests.swarm.network import MemoryNetwork
from tests.swarm.runs import Run

CHUNK = 1024
NUMEL = 8 * CHUNK
CHUNKS = 16
GIVE_UP_S = 30.0
LIES: dict[str, Callable[[random.Random, list[bytes], int], bytes]] = {
    "a flipped bit": lambda rng, pieces, at: _flipped(rng, pieces[at]),
    "cut short": lambda rng, pieces, at: pieces[at][: 4 * rng.randrange(CHUNK)],
    "too long": lambda rng, pieces, at: pieces[at] + bytes(4 * rng.randrange(1, 10)),
    "another chunk": lambda rng, pieces, at: pieces[(at + rng.randrange(1, CHUNKS)) % CHUNKS],
    "zeros": lambda _, pieces, at: bytes(len(pieces[at])),
}
WHOLE_LIES = ("digests", "state", "meta", "chain", "updates")


@contextmanager
def small_chunks() -> Iterator[None]:
    """Chunks of 1024 elements, so that a small state has many."""
    settings = [(state_module, "CHUNK", CHUNK), (snapshot_file, "CHUNK", CHUNK)]
    before = [(module, name, getattr(module, name)) for module, name, _ in settings]
    try:
        for module, name, value in settings:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _flipped(rng: random.Random, piece: bytes) -> bytes:
    place = rng.randrange(len(piece))
    return piece[:place] + bytes([piece[place] ^ 1 << rng.randrange(8)]) + piece[place + 1 :]


class Trial:
    """One newcomer, three donors, one of them Byzantine."""

    def __init__(self, rng: random.Random, run: Run, folder: Path) -> None:
        self._rng, self._run, self._folder = rng, run, folder
        self.tampered = 0
        self.lie = ""

    async def __call__(self) -> dict[str, Any]:
        """-> counts of this trial."""
        network = MemoryNetwork(replace(STANDARD, watch_period_s=0.01, slow_floor_s=0.2))  # slow ones are left soon
        try:
            nodes = map(network.node, self._run.identities)
            donors = [await ScriptedDonor(node, self._run).start() for node in nodes]
            byzantine = self._rng.choice(donors)
            self._corrupt(byzantine)
            return await self._join(network, donors, byzantine)
        finally:
            await network.close()

    def _corrupt(self, byzantine: ScriptedDonor) -> None:
        if self._rng.random() < 0.15:
            self.lie = self._rng.choice(WHOLE_LIES)
            self._corrupt_whole(byzantine)
            return
        if self._rng.random() < 0.1:
            self.lie = "stalls"
            byzantine.pieces = [asyncio.Event().wait] * CHUNKS
            return
        self.lie = self._rng.choice(list(LIES))
        pieces = list(byzantine.pieces)
        bad = self._rng.sample(range(CHUNKS), self._rng.choice((1, 4, CHUNKS)))
        for index in bad:
            byzantine.pieces[index] = partial(self._tampered, LIES[self.lie](self._rng, pieces, index))

    def _corrupt_whole(self, byzantine: ScriptedDonor) -> None:
        if self.lie == "digests":
            byzantine.digests[self._rng.randrange(CHUNKS // 2)] = self._rng.randbytes(32)
        elif self.lie == "state":
            byzantine.poison(self._rng.randrange(CHUNKS))
        elif self.lie == "meta":
            byzantine.meta = byzantine.meta.model_copy(update={"lineage_id": "f" * 64})
        elif self.lie == "chain":
            del byzantine.chain[0]
        else:
            byzantine.updates = {digest: _flipped(self._rng, update) for digest, update in byzantine.updates.items()}

    async def _tampered(self, piece: bytes) -> bytes:
        self.tampered += 1
        return piece

    async def _join(
        self, network: MemoryNetwork, donors: list[ScriptedDonor], byzantine: ScriptedDonor
    ) -> dict[str, Any]:
        """Follow donors in a random order, as a peer follows one record after another, until one leads to a state."""
        joiner = Joiner(network, self._folder, numel=NUMEL)
        joiner.valid = self.lie == "updates"
        accused: set[str] = set()
        order = self._rng.sample(donors, len(donors))
        for donor in order:
            others = [each for each in order if each is not donor and each.peer_id not in accused]
            try:
                await asyncio.wait_for(joiner.catch_up(donor, *others), GIVE_UP_S)
                break
            except ProtocolError:
                accused.add(donor.peer_id)
            except (TimeoutError, StreamClosedError):
                continue
        accused |= set(joiner.accused)
        same = joiner.state.digest() == self._run.state.digest()
        untouched = joiner.state.round == 0 and not joiner.applied
        return {
            "joins": int(same),
            "poisoned_joins": int(not same and not untouched),
            "joins_failed": int(untouched),
            "parts_tampered": self.tampered,
            # the first tampered chunk ends the Byzantine donor: the few that were on their way with it count with it
            "parts_caught": self.tampered if byzantine.peer_id in accused and same else 0,
            "false_accusations": len(accused - {byzantine.peer_id}),
            "trials_per_lie": {self.lie: 1},
        }


async def _campaign(
    rng: random.Random, budget: int, folder: Path, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    run = Run(folder / "donor", numel=NUMEL).commit(2)
    total: dict[str, Any] = {"trials": 0, "parts_tampered": 0}
    while total["parts_tampered"] < budget:
        trial = Trial(rng, run, folder / f"joiner{total['trials']}")
        total = added([total, {"trials": 1, **await trial()}])
        tell(total)
    return total


def run(
    seed: int, budget: int, *, tell: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Newcomers join until `budget` tampered chunks have been served to them; -> counts."""
    with small_chunks(), tempfile.TemporaryDirectory(prefix="atoll-donors-") as folder:
        return asyncio.run(_campaign(random.Random(seed), budget, Path(folder), tell))
