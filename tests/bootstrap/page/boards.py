"""A board over a chain and a state without a network."""

from __future__ import annotations

from types import SimpleNamespace

from bootstrap.page.board import Board
from bootstrap.page.run_card import RunCard
from peer.explain.history import FILE_NAME, History
from peer.outer.recipe.plan import RunPlan
from peer.protocol.identity import Identity
from peer.protocol.manifest import RunManifest
from peer.swarm.net.stream import Traffic
from peer.swarm.state.run_control import RunControl
from tests.explain.samples import DAY, committed
from tests.explain.watched import Watched
from tests.swarm.runs import Run

ORGANISER = Identity.generate()
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWPgKdGiqW2VLJ2ecamJ3w2ntTJ6nXbdZFj8LLcpf3jrQK"
MANIFEST = RunManifest.model_validate({
    "name": "lagoon-1", "model": {"architecture": "llama", "config": {"hidden_size": 8}},
    "recipe": {"name": "diloco", "compressor": "int8"}, "genesis": "0" * 64, "rounds": {"total": 40},
})  # fmt: skip


class Watching:
    """A run that is watched, and the board about it; `chain` has `rounds` of its own three members."""

    def __init__(self, folder, rounds=0, manifest=MANIFEST):
        self.folder, self.watched = folder, Watched()
        self.run = Run(folder / "chain")
        if rounds:
            self.run.commit(rounds)
        self.members = [identity.peer_id for identity in self.run.identities]
        self.node = SimpleNamespace(traffic={"history": Traffic(5, 7)})
        self.control = RunControl.of(folder / "chain", manifest, ORGANISER.peer_id)
        self.card = RunCard(RunPlan.of(manifest), ORGANISER.peer_id, (ADDRESS,), self.control)
        self.open()

    def open(self):
        """As a bootstrap that starts, again if need be."""
        self.history = History(self.folder / FILE_NAME)
        self.board = Board(
            self.card, self.node, self.watched.state, self.run.history, self.history, lambda: self.watched.now
        )

    def reopen(self):
        self.history.close()
        self.watched.state = Watched().state
        self.open()

    async def look(self, seconds=5.0):
        """So much later."""
        self.watched.now += seconds
        self.watched.look()
        await self.board.look()
        return self.board

    def join(self, **changes):
        """The three members announce themselves."""
        for peer_id, name in zip(self.members, ("alpha", "bravo", "charlie"), strict=True):
            self.watched.peer(peer_id, name, **changes)

    def told(self):
        """The newest round as a member tells of it."""
        link = self.run.history.chain[-1].link
        return committed(
            link.round + 1, self.watched.now - DAY, tuple(member.peer_id for member in link.roster),
            weights=tuple(member.tokens for member in link.roster), lineage_id=link.id, seconds={"total": 0.5},
        )  # fmt: skip
