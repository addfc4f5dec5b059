"""A peer that does not play fair: a real libp2p host and DHT node in a process of its own, told what to do by lines.

`python -m tests.network.chaos.attacker PARENT_PID FOLDER ADDRESS RUN_ID`; each line of its input is a JSON object with
the name of an attack (`insiders.ATTACKS`) and the honest peers; it answers each with one when the attack is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from peer.protocol.identity import Identity
from peer.protocol.lineage import Position
from peer.protocol.manifest import RoundSpec
from peer.protocol.records import MAX_RECORD_BYTES, PeerRecord, dump_json, parse_json, peers_key, seal
from peer.protocol.weights import WeightRule
from peer.protocol.wire import (
    HEADER_BYTES,
    MAGIC,
    HelloMessage,
    InviteMessage,
    Kind,
    RejectMessage,
    StatusMessage,
)
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.directory import write_record
from peer.swarm.net.node import Handler, Node
from peer.swarm.net.node_start import start_node
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.system.death_signal import children_die_with_us, die_with_parent

HANDLERS = ("join", "invite", "round", "history")
DROPPED_WITHIN_S = 12.0  # the longest first-frame limit is 5 s; the rest is for a busy machine
SEAT_WITHIN_S = 150.0  # a fresh identity that cost a round keeps the next ones out for a minute or two
ATTACK_TIMEOUT_S = 60.0 + SEAT_WITHIN_S
SEATED = ("member", "leader", "join: a replayed one")  # they need a seat, which a peer that attacked before is refused
ASK_AGAIN_S = 0.2


class GivenUpError(Exception):
    """The attack could not be brought about: it counts as not made."""


class Attacker:
    """What the attacks are made of.

    Args:
        node: of this process.
        run_id: of the swarm.
        honest: peer ids; the first is the target.
        rng: of the attack.
        answers: what this peer does with a stream that somebody opens, by handler; it closes what is not there.
    """

    def __init__(
        self, node: Node, run_id: str, honest: tuple[str, ...], rng: random.Random, answers: dict[str, Handler]
    ) -> None:
        self.node, self.run_id, self.honest, self.rng, self.answers = node, run_id, honest, rng, answers
        self.rosters = RosterAuthority(node.identity, run_id, RoundSpec(), WeightRule())

    @property
    def target(self) -> str:
        return self.honest[0]

    @property
    def me(self) -> str:
        return self.node.peer_id

    def name(self, handler: str) -> str:
        return f"atoll/{self.run_id[:16]}/{handler}"

    async def open(self, handler: str, peer_id: str | None = None) -> FrameStream:
        return await self.node.open(peer_id or self.target, self.name(handler), "round")

    @staticmethod
    def raw(stream: FrameStream, data: bytes) -> None:
        """Bytes as they are, no frame around them."""
        with contextlib.suppress(OSError, RuntimeError):
            stream._pipe.write(data)

    async def dropped(self, stream: FrameStream, within_s: float = DROPPED_WITHIN_S) -> None:
        """The target must end this stream, whatever it says before."""
        deadline = time.monotonic() + within_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                await asyncio.wait_for(stream._pipe.read_some(), left)
                if stream._pipe._ended:
                    return
        except (OSError, EOFError):
            return
        except TimeoutError:
            pass
        finally:
            stream.close()
        raise AssertionError(f"the stream was still open after {within_s:g} s")

    async def position(self, peer_id: str | None = None) -> Position:
        """Where a peer stands, by its answer to an invitation that leads nowhere."""
        stream = await self.open("invite", peer_id)
        invite = InviteMessage(run_id=self.run_id, round=0, parent="0" * 64, weight=0, wait_s=0.0)
        await stream.send_message(Kind.INVITE, invite)
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        stream.close()
        return Position(status.round, status.lineage_id, status.weight)

    # -- the directory -----------------------------------------------------------------------------------------------

    def record(self, position: Position, **changes: Any) -> PeerRecord:
        """What a peer at this position says of itself."""
        values = {
            "run_id": self.run_id, "nickname": "mallory", "state": "training", "round": position.round,
            "lineage_id": position.lineage_id, "lineage_weight": position.weight, "expires_at": time.time() + 10.0,
        }  # fmt: skip
        return PeerRecord.model_validate({**values, **changes})

    async def publish(self, record: PeerRecord, identity: Identity | None = None, owner: str | None = None) -> bool:
        """Into the DHT, sealed by this peer or somebody else, under anybody's name."""
        identity = identity or self.node.identity
        blob = seal(identity, "peer", dump_json(record))
        key = peers_key(self.run_id)
        return await write_record(self.node, key, blob, record.expires_at, owner or identity.peer_id)

    async def withdraw(self) -> None:
        """No longer a member to be waited for."""
        position = Position(0, "0" * 64, 0)
        await self.publish(self.record(position, state="finished"))

    # -- in the group ------------------------------------------------------------------------------------------------

    async def take_seat(self, within_s: float = SEAT_WITHIN_S) -> tuple[dict[str, Any], str]:
        """Join the round of the honest as a member; -> (the roster as JSON, the group's id)."""
        deadline, answers = time.monotonic() + within_s, Counter[str]()
        while time.monotonic() < deadline:
            for leader in self.honest:
                await self.publish(self.record(await self.position()))  # as a live peer does: a record soon expires
                answer = await self._hand_in(leader)
                if not isinstance(answer, str):
                    return answer
                answers[answer] += 1
            await asyncio.sleep(ASK_AGAIN_S)
        raise GivenUpError(f"no leader took this peer in: {dict(answers)}")

    async def _hand_in(self, leader: str) -> tuple[dict[str, Any], str] | str:
        """-> the roster, or why there is none."""
        position = await self.position(leader)
        join, sealed = self.rosters.join(position, 100)
        stream = await self.open("join", leader)
        try:
            await stream.send(Kind.JOIN, sealed)
            kind = Kind.STATUS
            while kind is Kind.STATUS:
                limits = dict.fromkeys((Kind.STATUS, Kind.ROSTER, Kind.REJECT), 1 << 16)
                kind, body = await asyncio.wait_for(stream.receive(limits), 15.0)
        except (TimeoutError, StreamClosedError) as error:
            return type(error).__name__
        finally:
            stream.close()
        if kind is Kind.REJECT:
            return parse_json(RejectMessage, body).reason
        group = self.rosters.read(body, sealed, join, leader)
        return json.loads(body), group.id

    async def speak(self, group_id: str, peer_id: str) -> FrameStream:
        """The stream of a member to another, with its proper beginning."""
        stream = await self.open("round", peer_id)
        await stream.send_message(Kind.HELLO, HelloMessage(group_id=group_id))
        return stream

    def absorb(self) -> None:
        """Accept the streams of the others, answer nothing."""

        async def read(stream: FrameStream) -> None:
            while True:
                await stream.receive(dict.fromkeys(Kind, 1 << 28))

        self.answers["round"] = read

    @contextlib.asynccontextmanager
    async def leading(self) -> AsyncIterator[asyncio.Queue[tuple[FrameStream, bytes]]]:
        """Be who the honest follow; -> their joins, each with the stream that waits for an answer."""
        joins: asyncio.Queue[tuple[FrameStream, bytes]] = asyncio.Queue()
        over = asyncio.Event()

        async def gather(stream: FrameStream) -> None:
            _, sealed = await stream.receive({Kind.JOIN: MAX_RECORD_BYTES})
            now = await self.position()
            await stream.send_message(Kind.STATUS, StatusMessage(
                coming=True, round=now.round, lineage_id=now.lineage_id, weight=now.weight, leader=self.me
            ))  # fmt: skip
            joins.put_nowait((stream, sealed))
            await over.wait()

        self.answers["join"] = gather
        await self.publish(self.record(await self.position()))
        inviting = asyncio.ensure_future(self._invite_for_ever())
        try:
            yield joins
        finally:
            inviting.cancel()
            over.set()

    async def _invite_for_ever(self) -> None:
        while True:
            for peer_id in self.honest:
                with contextlib.suppress(StreamClosedError, asyncio.TimeoutError):
                    await self.invite(peer_id, await self.position(peer_id))
            await asyncio.sleep(0.2)

    async def invite(self, peer_id: str, position: Position) -> StatusMessage:
        """One proper invitation to a round at this position."""
        stream = await self.open("invite", peer_id)
        invite = InviteMessage(
            run_id=self.run_id, round=position.round, parent=position.lineage_id, weight=position.weight, wait_s=1.0
        )
        await stream.send_message(Kind.INVITE, invite)
        status = await asyncio.wait_for(stream.receive_message(Kind.STATUS, StatusMessage), 5.0)
        stream.close()
        return status


def header(kind: int, length: int) -> bytes:
    """Any header, allowed or not."""
    return MAGIC + bytes([kind]) + b"\0\0\0" + length.to_bytes(4, "big")


assert len(header(1, 0)) == HEADER_BYTES


def ranked(run_id: str, honest: tuple[str, ...], leads: bool) -> Identity:
    """An identity that leads the honest, or is led by each of them: whoever has the lowest hash leads."""

    def rank(peer_id: str) -> bytes:
        return hashlib.sha256(f"{run_id} leads {peer_id}".encode()).digest()

    while True:
        identity = Identity.generate()
        own, theirs = rank(identity.peer_id), [rank(peer_id) for peer_id in honest]
        if own < min(theirs) if leads else own > max(theirs):
            return identity


async def _serve(folder: Path, address: str, run_id: str, honest: tuple[str, ...], lines: asyncio.StreamReader) -> None:
    from tests.network.chaos.insiders import ATTACKS

    answers: dict[str, Handler] = {}
    come = partial(_come, folder, address, run_id, honest, answers)
    node = await come()
    print(json.dumps({"peer_id": node.peer_id}), flush=True)
    while line := await lines.readline():
        asked = json.loads(line)
        if asked["attack"].startswith(SEATED):
            await node.close()
            node = await come(leads=asked["attack"].startswith("leader"))
        attacker = Attacker(node, run_id, tuple(asked["honest"]), random.Random(asked["seed"]), answers)
        answer = {"attack": asked["attack"], "problem": None, "made": True}
        answer.update(await _attack(attacker, ATTACKS[asked["attack"]]))
        answers.clear()
        print(json.dumps(answer), flush=True)


async def _come(
    folder: Path, address: str, run_id: str, honest: tuple[str, ...], answers: dict[str, Handler], leads: bool = True
) -> Node:
    """A host that nobody has met; as a member it is one that the honest do not wait for as their leader."""
    key = folder / "attacker.key"
    key.touch(mode=0o600)
    key.write_bytes(ranked(run_id, honest, leads).to_bytes())
    config = NodeConfig(
        identity_path=key, host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=(address,), check_identity=False
    )
    node = await start_node(config)
    for handler in HANDLERS:
        await node.serve(f"atoll/{run_id[:16]}/{handler}", "round", partial(_answer, answers, handler))
    return node


async def _answer(answers: dict[str, Handler], handler: str, stream: FrameStream) -> None:
    if handler in answers:
        await answers[handler](stream)


async def _attack(attacker: Attacker, script: Callable[[Attacker], Any]) -> dict[str, Any]:
    try:
        await asyncio.wait_for(script(attacker), ATTACK_TIMEOUT_S)
    except (TimeoutError, StreamClosedError, GivenUpError) as error:
        return {"made": False, "problem": f"{type(error).__name__}: {error}"[:300]}
    except AssertionError as error:
        return {"problem": str(error)[:300]}
    except Exception as error:  # root of a script: the next ones go on, and this one counts as not made
        traceback.print_exc()
        return {"made": False, "problem": f"{type(error).__name__}: {error}"[:300]}
    finally:
        await attacker.withdraw()
    return {}


async def main(arguments: list[str]) -> None:
    """Serve the requests of the parent."""
    folder, address, run_id, *honest = arguments
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await _serve(Path(folder), address, run_id, tuple(honest), reader)


if __name__ == "__main__":
    import uvloop

    from tests.network.chaos import attacker  # the scripts catch the errors of that module, not of this `__main__`

    die_with_parent(int(sys.argv[1]))
    children_die_with_us()
    uvloop.install()
    asyncio.run(attacker.main(sys.argv[2:]))
