"""A stranger that signs rounds which never were, and serves them as a donor: in a process of its own.

It knows what everyone can know: the manifest, and the true chain, which any peer hands out. As a former member it also
has the key of a peer that took part in rounds. What it forges verifies: rosters, weights, signatures, parents.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peer.errors import ProtocolError
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.outer_state import columns, state_digest
from peer.protocol import hashing
from peer.protocol.identity import Identity
from peer.protocol.lineage import VOTE_DOMAIN, Certificate, Link, Member, Position, chain_weight
from peer.protocol.manifest import RunManifest
from peer.protocol.records import dump_json
from peer.protocol.wire import HistoryRequest, Kind, SnapshotMeta
from peer.swarm.catchup.donor_requests import LATEST, DonorRequests
from peer.swarm.catchup.history_server import history_name
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.keys import load_or_create_identity
from peer.swarm.net.manifests import ManifestSearch
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.net.request import open_request
from peer.swarm.net.stream import FrameStream, StreamClosedError
from tests.network.chaos.attacker import Attacker

CROWD = 16
POISON = 666.0
AGAIN_S = 0.5
NO_ANSWER = (TimeoutError, ProtocolError, StreamClosedError)


@dataclass(frozen=True)
class Forgery:
    """What to forge.

    Attributes:
        base: "genesis", "past" or "tip": the true link that the forged ones follow.
        back: with "past", so many links before the tip.
        rounds: forged links; 0: as many as the run has; negative: none, it says that it takes part and never comes.
        former: the key of a former member, which then signs and serves; empty for a stranger.
        hidden: true links that a victim may lack are shown before; the forged ones only with the snapshot.
        drip_s: before each link that is served; 0: as fast as they are read.
        seed: of the crowd's numbers.
    """

    base: str
    back: int = 0
    rounds: int = 300
    former: str = ""
    hidden: bool = False
    drip_s: float = 0.0
    seed: int = 0

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Forge:
    """Makes chains.

    Args:
        manifest: of the run.
        crowd: signs every forged link.
    """

    def __init__(self, manifest: RunManifest, crowd: list[Identity], forgery: Forgery) -> None:
        self._manifest, self._crowd, self._forgery = manifest, crowd, forgery
        self._salt = itertools.count(forgery.seed * 10**6)
        plan = RunPlan.of(manifest)
        self._rule, self._nominal = plan.weight_rule, plan.nominal_tokens

    def chain(self, true: list[Certificate], state: str) -> list[Certificate]:
        """A chain of which the first links are true. `state`: the digest that the forged ones name."""
        ask = self._forgery
        kept = {"genesis": 0, "past": max(1, len(true) - ask.back), "tip": len(true)}[ask.base]
        chain, last = true[:kept], ask.rounds + kept if ask.rounds else self._manifest.rounds.total or 300
        seen = Counter(member.peer_id for one in chain for member in one.link.roster)
        while len(chain) < min(last, self._manifest.rounds.total or last):
            chain.append(self._link(chain, state, seen))
            seen.update(identity.peer_id for identity in self._crowd)
        return chain

    def _link(self, chain: list[Certificate], state: str, seen: Counter[str]) -> Certificate:
        claims = [(identity.peer_id, self._nominal) for identity in self._crowd]
        roster = [Member(peer_id=p, tokens=t) for (p, _), t in zip(claims, self._rule.weigh(claims, seen), strict=True)]
        link = Link(
            run_id=self._manifest.run_id, round=len(chain),
            parent=chain[-1].link.id if chain else str(self._manifest.genesis), roster=tuple(roster),
            update_digest=f"{next(self._salt):064x}", state_digest=state,
        )  # fmt: skip
        statement = bytes.fromhex(link.id)
        signed = {one.peer_id: one.sign(VOTE_DOMAIN, statement).hex() for one in self._crowd}
        return Certificate(link=link, signatures=signed)


class Forger:
    """Serves what the forge makes, and announces it.

    Args:
        node: of this process.
        told: every forged lineage id goes there, one a line, before anyone is shown it.
    """

    def __init__(self, node: Node, manifest: RunManifest, honest: list[str], forgery: Forgery, told: Path) -> None:
        self._node, self._run_id, self._forgery, self._told = node, manifest.run_id, forgery, told
        own = [node.identity] if forgery.former else []
        crowd = [*own, *(Identity.generate() for _ in range(CROWD - len(own)))]
        self._forge = Forge(manifest, crowd, forgery)
        self._attacker = Attacker(node, manifest.run_id, tuple(honest), random.Random(forgery.seed), {})
        self._requests = DonorRequests(node, manifest.run_id)
        self.chain: list[Certificate] = []
        self._true = 0
        self._meta: SnapshotMeta | None = None
        self._pieces: list[bytes] = []

    async def run(self) -> None:
        """Until this process is killed."""
        await self._look_at_state()
        await self._node.serve(history_name(self._run_id), "history", self._answer)
        for turn in itertools.count():
            if turn == 0 or self._forgery.base == "tip":  # the newest true links, which a victim may not have yet
                await self._renew()
            if turn == 0:
                print(json.dumps({"peer_id": self._node.peer_id, "links": len(self.chain)}), flush=True)
            more = 2**40 if self._forgery.rounds >= 0 else 0
            tip = Position(len(self.chain), self.chain[-1].link.id, chain_weight(self.chain) + more)
            await self._attacker.publish(self._attacker.record(tip, serial=int(1e6 * time.time())))
            for peer_id in self._attacker.honest:
                with contextlib.suppress(*NO_ANSWER):
                    async with asyncio.timeout(AGAIN_S):
                        await self._attacker.invite(peer_id, tip)
            await asyncio.sleep(AGAIN_S)

    async def _renew(self) -> None:
        for peer_id in self._attacker.honest:
            with contextlib.suppress(*NO_ANSWER):
                true = await self._requests.links(peer_id, 0, 10**6)
                if len(true) <= self._true:
                    return
                chain = await asyncio.to_thread(self._forge.chain, true, self._state)
                ids = [one.link.id for one in chain]
                kept = {one.link.id for one in true}
                with self._told.open("a") as file:
                    file.writelines(f"{each}\n" for each in ids if each not in kept)
                self.chain, self._true = chain, len(true)
                return

    async def _look_at_state(self) -> None:
        """How large it is; then one of our own."""
        request = HistoryRequest(what="snapshot", run_id=self._run_id, from_round=LATEST)
        meta = None
        while meta is None:
            for peer_id in self._attacker.honest:
                with contextlib.suppress(*NO_ANSWER):
                    async with open_request(
                        self._node, peer_id, history_name(self._run_id), "history", request
                    ) as stream:
                        meta = await self._requests._receive_meta(stream)
                        break
        whole = torch.full((sum(meta.fragments),), POISON)
        self._meta = meta
        self._pieces = [
            whole[start:stop].numpy().tobytes()
            for _ in range(1 + meta.num_buffers) for start, stop in columns(meta.fragments)
        ]  # fmt: skip
        self._digests = [hashing.digest(piece) for piece in self._pieces]
        self._state = state_digest(self._digests, meta.fragments, meta.num_buffers)

    async def _answer(self, stream: FrameStream) -> None:
        request = await stream.receive_message(Kind.REQUEST, HistoryRequest)
        assert self._meta is not None
        if request.what == "chunks":
            while True:
                for index in request.indexes:
                    await stream.send(Kind.DATA, self._pieces[index])
                request = await stream.receive_message(Kind.REQUEST, HistoryRequest)
        elif request.what == "chain":
            shown = self.chain[: self._true] if self._forgery.hidden and request.from_round < self._true else self.chain
            for certificate in shown[request.from_round :]:
                await asyncio.sleep(self._forgery.drip_s)
                await stream.send(Kind.DATA, dump_json(certificate))
        elif request.what == "state":
            await stream.send(Kind.DATA, bytes.fromhex(self._state))
        elif request.what == "snapshot":
            place = {"round": len(self.chain), "lineage_id": self.chain[-1].link.id}
            await stream.send_message(Kind.META, self._meta.model_copy(update=place))
            await stream.send(Kind.DATA, b"".join(self._digests))
        await stream.send(Kind.END)
        await stream.closed()


async def forge(
    folder: Path, run_id: str, addresses: list[str], honest: list[str], forgery: Forgery, listen: str
) -> None:
    """Join, forge, serve."""
    key = Path(forgery.former) if forgery.former else folder / "forger.key"
    load_or_create_identity(key)
    config = NodeConfig(
        identity_path=key, host_maddrs=(listen,), initial_peers=tuple(addresses), check_identity=False,
        nat_port_map=False,
    )  # fmt: skip
    node = await start_node(config)
    manifest = (await ManifestSearch(node, run_id).run()).manifest
    await Forger(node, manifest, honest, forgery, folder / "forged").run()


def main() -> None:
    """`FOLDER RUN_ID ADDRESSES HONEST FORGERY LISTEN`: the lists and the forgery as JSON."""
    import uvloop

    from peer.system.death_signal import children_die_with_us

    folder, run_id, addresses, honest, forgery, listen = sys.argv[1:]
    children_die_with_us()
    asked: dict[str, Any] = json.loads(forgery)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forge(Path(folder), run_id, json.loads(addresses), json.loads(honest), Forgery(**asked), listen))
